import json
from typing import Any

import pytest

from headrace.protocols import requests
from headrace.protocols.fields import structure
from headrace.protocols.ollama.bodies import CHAT, GENERATE
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Infill, Request, Text
from tests.gateway.builders import parsed

USER = {"role": "user", "content": "hi"}


def parse(**body: Any) -> Request:
    return parsed(CHAT, {"model": "headrace-mini", "messages": [USER]} | body)


def parse_generate(**body: Any) -> Request:
    return parsed(GENERATE, {"model": "headrace-mini"} | body)


def chat_of(request: Request) -> Chat:
    (prompt,) = request.prompts
    assert isinstance(prompt, Chat)
    return prompt


def refusal(**body: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    shown: str = json.loads(CHAT.ERRORS.body(caught.value))["error"]
    return shown


def test_an_answer_is_streamed_by_default() -> None:
    assert parse().response_options.stream and parse().route == "/api/chat"
    assert not parse(stream=False).response_options.stream


def test_options_become_settings() -> None:
    options = {"num_predict": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
    options |= {"seed": 3, "repeat_penalty": 1.2, "presence_penalty": 1, "stop": ["x", "y"]}
    request = parse(options=options)
    drawn = request.sampling
    assert (drawn.max_tokens, drawn.temperature, drawn.top_k, drawn.top_p) == (9, 0.5, 4, 0.9)
    assert (drawn.min_p, drawn.seed, drawn.repetition_penalty) == (0.1, 3, 1.2)
    assert drawn.presence_penalty == 1 and request.stop == ("x", "y")
    assert parse(options={"num_predict": -2}).sampling.max_tokens is None


def test_options_without_effect_are_named() -> None:
    body = {"model": "m", "messages": [USER], "options": {"num_ctx": 4096, "n_keep": 1}}
    checked = requests.pack(CHAT, CHAT.read(body))
    assert checked.ignored == ("options.num_ctx", "options.n_keep")
    assert parse(options={"mirostat": 1, "mirostat_tau": 3}).sampling.mirostat_tau == 3


def test_a_format_is_any_object_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    for given, wanted in (("json", {"type": "object"}), (schema, schema)):
        found = structure.take(CHAT.read({"model": "m", "messages": [USER], "format": given}))
        assert found and found.wanted and found.wanted.value == wanted
    assert structure.take(CHAT.read({"model": "m", "messages": [USER], "format": ""})) is None
    assert refusal(format="yaml") == 'format is "yaml"; it must be "json" or a JSON schema.'


def test_think_becomes_a_variable_of_the_template() -> None:
    assert chat_of(parse(think=False)).template_kwargs == {"enable_thinking": False}
    wanted = {"reasoning_effort": "low", "enable_thinking": True}
    assert chat_of(parse(think="low")).template_kwargs == wanted


def test_calls_and_their_results_are_matched() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "sub")]
    turns = [{"role": "assistant", "tool_calls": calls, "thinking": "hm"}]
    turns += [{"role": "tool", "tool_name": name, "content": name} for name in ("sub", "add")]
    _, called, *results = chat_of(parse(messages=[USER, *turns])).messages
    ids = [call["id"] for call in called["tool_calls"]]
    assert called["reasoning_content"] == "hm" and called["content"] == ""
    assert [it["tool_call_id"] for it in results] == ids[::-1] and len(set(ids)) == 2


def test_images_are_base64_in_their_message() -> None:
    prompt = chat_of(parse(messages=[USER | {"images": ["aGk="]}]))
    assert prompt.images == (b"hi",) and prompt.image_params == ("messages[0].images[0]",)
    prompt = chat_of(parse_generate(prompt="see", images=["aGk="]))
    assert prompt.images == (b"hi",) and prompt.image_params == ("images[0]",)
    assert refusal(messages=[USER | {"images": ["?"]}]) == "The image is not valid base64."


def test_a_last_message_of_the_assistant_is_completed() -> None:
    begun = {"role": "assistant", "content": "The"}
    assert chat_of(parse(messages=[USER, begun])).continue_final_message


def test_a_request_without_a_prompt_loads_the_model() -> None:
    assert parse(messages=[]).sampling.max_tokens == 0
    assert parse_generate().sampling.max_tokens == 0


@pytest.mark.parametrize("nothing", [0, 0.0, "0", "0s", "-0m0.0s"])
def test_keep_alive_zero_without_a_prompt_unloads_the_model(nothing: object) -> None:
    for body in ({"keep_alive": nothing}, {"keep_alive": nothing, "prompt": ""}):
        checked = requests.pack(GENERATE, GENERATE.read({"model": "m", **body}))
        assert checked.fields["unloads"] and checked.ignored == ()
    checked = requests.pack(CHAT, CHAT.read({"model": "m", "messages": [], "keep_alive": nothing}))
    assert checked.fields["unloads"]


@pytest.mark.parametrize("time", [5, -1, 0.5, "5m", "-1", "1h30m", "1.5h", ".5s", "60"])
def test_any_other_keep_alive_is_named_as_without_effect(time: object) -> None:
    body = {"model": "m", "options": {"num_ctx": 1}, "keep_alive": time}
    checked = requests.pack(GENERATE, GENERATE.read(body))
    assert not checked.fields["unloads"]
    assert checked.ignored == ("options.num_ctx", "keep_alive")


def test_keep_alive_zero_with_a_prompt_is_named_as_without_effect() -> None:
    checked = requests.pack(CHAT, CHAT.read({"model": "m", "messages": [USER], "keep_alive": 0}))
    assert not checked.fields.get("unloads") and checked.ignored == ("keep_alive",)


@pytest.mark.parametrize("time", ["soon", "", "5 m", "s", "1.s", "1d", True, [], {}, 9 * "1" + "x"])
def test_an_invalid_keep_alive_is_refused_by_its_name(time: object) -> None:
    assert refusal(keep_alive=time).startswith("keep_alive is ")


def test_generate_takes_a_chat_a_raw_text_or_an_infill() -> None:
    asked = chat_of(parse_generate(prompt="hi", system="Be brief."))
    assert [it["role"] for it in asked.messages] == ["system", "user"]
    raw = parse_generate(prompt="hi", raw=True)
    assert raw.prompts == (Text("hi"),) and raw.sampling.max_tokens is None
    body = {"model": "m", "prompt": "a", "suffix": "b"}
    assert GENERATE.to_prompts(GENERATE.read(body)) == (Infill("a", "b"),)
    assert parse_generate(prompt="hi", raw=True, think=False).prompts == (Text("hi"),)
    with pytest.raises(RequestError, match="system only applies to chats"):
        parse_generate(prompt="hi", raw=True, system="Be brief.")
    with pytest.raises(RequestError, match="think only applies to chats"):
        parse_generate(prompt="hi", raw=True, think=True)
