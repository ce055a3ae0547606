from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.protocols.fields.common import NO_EFFECT, UNSUPPORTED
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.requests import pack
from headrace_common.checkpoints.spec import Defaults
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Request
from tests.gateway.builders import JSON, FakeModel, parsed

USER = {"role": "user", "content": "hi"}


def parse(served: FakeModel | None = None, /, **body: Any) -> Request:
    return parsed(openai_chat, {"messages": [USER]} | body, served)


def refusal(**body: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    return caught.value.code, caught.value.param


def chat_of(request: Request) -> Chat:
    (chat,) = request.prompts
    assert isinstance(chat, Chat)
    return chat


OUT_OF_RANGE = {
    "max_tokens": 0,
    "max_completion_tokens": -2,
    "min_tokens": -1,
    "temperature": 100.5,
    "top_p": 1.5,
    "min_p": -0.1,
    "top_k": -2,
    "frequency_penalty": 2.5,
    "presence_penalty": -2.5,
    "repetition_penalty": 0,
    "seed": 1 << 63,
    "n": 0,
    "best_of": 129,
    "top_logprobs": 21,
    "sse_ping_interval": 0,
    "cache_salt": "",
    "priority": 101,
    "model": "",
    "messages": [],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_every_field_out_of_range_names_itself(name: str) -> None:
    assert refusal(**{name: OUT_OF_RANGE[name]}) == ("invalid_value", name)


@pytest.mark.parametrize("name", openai_chat.TABLE)
def test_null_equals_absent(name: str) -> None:
    if name == "messages":
        assert refusal(messages=None) == ("missing_required_parameter", "messages")
    else:
        assert parse(seed=1, **{name: None} if name != "seed" else {}) == parse(seed=1)


@pytest.mark.parametrize("value", [16.5, True, "16", [], {}])
def test_a_value_of_another_type_is_not_accepted_as_an_integer(value: Any) -> None:
    assert refusal(max_tokens=value) == ("invalid_type", "max_tokens")


@pytest.mark.parametrize("value", [True, "0.7", []])
def test_a_value_of_another_type_is_not_accepted_as_a_number(value: Any) -> None:
    assert refusal(temperature=value) == ("invalid_type", "temperature")


def test_a_float_without_a_fraction_is_an_integer() -> None:
    asked = parse(max_tokens=8.0, seed=-0.0, n=2.0, stop_token_ids=[5.0, 6]).sampling
    assert (asked.max_tokens, asked.seed, asked.stop_token_ids) == (8, 0, (5, 6))
    assert type(asked.max_tokens) is type(asked.seed) is type(asked.stop_token_ids[0]) is int
    assert parse(max_tokens=-1.0).sampling.max_tokens is None
    for value in (8.5, 1e-320):
        assert refusal(max_tokens=value) == ("invalid_type", "max_tokens")
    assert refusal(seed=1e308) == ("invalid_value", "seed")


def test_an_integer_is_a_number() -> None:
    assert parse(temperature=0).sampling.is_greedy


def test_the_error_message_has_the_value_and_the_limit() -> None:
    with pytest.raises(RequestError) as caught:
        parse(temperature=101)
    assert caught.value.message == "temperature is 101; it must be from 0 to 100."


def test_an_unknown_field_changes_nothing() -> None:
    assert parse(seed=1, colour="green") == parse(seed=1)


@pytest.mark.parametrize("name", NO_EFFECT)
@pytest.mark.parametrize("value", [1, "x", {"a": []}, True])
def test_a_field_without_effect_takes_any_value(name: str, value: Any) -> None:
    assert parse(seed=1, **{name: value}) == parse(seed=1)


@pytest.mark.parametrize("name", [name for name in UNSUPPORTED if name not in openai_chat.TABLE])
def test_a_neutral_unsupported_value_passes_and_another_does_not(name: str) -> None:
    for neutral in (*UNSUPPORTED[name], None, "", [], {}):
        parse(**{name: neutral})
    assert refusal(**{name: [{"x": 1}]}) == ("unsupported_parameter", name)


def test_true_is_not_the_neutral_value_one() -> None:
    assert refusal(length_penalty=True) == ("unsupported_parameter", "length_penalty")
    parse(length_penalty=1.0)


def test_best_of_is_neutral_where_it_equals_n() -> None:
    parse(n=2, best_of=2)
    assert refusal(n=2, best_of=3) == ("unsupported_parameter", "best_of")


def test_the_smaller_of_two_limits_counts_and_minus_one_is_absent() -> None:
    assert parse(max_tokens=9, max_completion_tokens=5).sampling.max_tokens == 5
    assert parse(max_tokens=-1).sampling.max_tokens is None
    assert parse(max_tokens=-1, max_completion_tokens=5).sampling.max_tokens == 5


def test_more_min_tokens_than_max_tokens_is_refused() -> None:
    assert refusal(min_tokens=6, max_tokens=5) == ("invalid_value", "min_tokens")


def test_the_defaults_of_the_model_replace_missing_fields() -> None:
    model = FakeModel(defaults=Defaults(temperature=0.6, top_k=20))
    assert parse(model).sampling.temperature == 0.6
    assert parse(model).sampling.top_k == 20
    assert parse(model).sampling.top_p == 1.0
    assert parse(model, temperature=0.1, top_k=0).sampling.temperature == 0.1
    assert parse(model, top_k=0).sampling.top_k == 0


def test_a_models_limit_holds_unless_a_request_sets_one() -> None:
    model = FakeModel(defaults=Defaults(max_tokens=1024))
    assert parse(model).sampling.max_tokens == 1024
    assert parse(model, max_tokens=2000).sampling.max_tokens == 2000
    assert parse(model, max_tokens=-1).sampling.max_tokens is None
    assert parse(model, max_completion_tokens=5).sampling.max_tokens == 5
    assert parse(model, min_tokens=1500).sampling.max_tokens == 1500


@pytest.mark.parametrize("top_k", [0, -1, 256, 1 << 40])
def test_top_k_off_is_zero(top_k: int) -> None:
    assert parse(top_k=top_k).sampling.top_k == 0


def test_a_seed_is_drawn_if_the_request_has_none() -> None:
    assert parse().sampling.seed != parse(seed=-1).sampling.seed
    assert parse(seed=-2).sampling.seed == -2


def test_the_answer_names_the_model_as_the_request_did() -> None:
    assert parse().model == "headrace-mini"
    assert parse(model="org/other").model == "org/other"


def test_n_may_exceed_the_number_of_slots_up_to_128() -> None:
    assert parse(n=9).n == 9 and parse(n=128).n == 128
    assert refusal(n=129) == ("invalid_value", "n")


def test_ids_outside_the_vocabulary_are_named_by_their_place() -> None:
    assert refusal(stop_token_ids=[3, 256]) == ("invalid_value", "stop_token_ids[1]")
    assert refusal(logit_bias={"256": 1}) == ("invalid_value", "logit_bias.256")


def test_logit_bias_keys_are_decimal_ids() -> None:
    assert parse(logit_bias={"5": -100}).sampling.logit_bias == {5: -100.0}
    for key in ("x", "-1", "1.0", "", "٣", " 1"):
        assert refusal(logit_bias={key: 1}) == ("invalid_value", "logit_bias")
    assert refusal(logit_bias={"5": 101}) == ("invalid_value", "logit_bias.5")
    assert refusal(logit_bias={"5": None}) == ("invalid_type", "logit_bias.5")
    assert refusal(logit_bias={str(i): 0 for i in range(1025)}) == ("invalid_value", "logit_bias")


def test_stop_is_a_string_or_a_limited_list() -> None:
    assert parse(stop="a").stop == ("a",)
    assert parse(stop=["a", "b"]).stop == ("a", "b")
    assert parse(stop=[]).stop == ()
    assert refusal(stop=5) == ("invalid_type", "stop")
    with pytest.raises(RequestError, match="it must be a string or an array of strings"):
        parse(stop=5)
    assert refusal(stop=["a", 1]) == ("invalid_type", "stop[1]")
    assert refusal(stop=["a"] * 65) == ("invalid_value", "stop")
    assert refusal(stop="a" * 1001) == ("invalid_value", "stop")


def test_an_empty_or_null_stop_has_no_effect() -> None:
    assert parse(stop="").stop == parse(stop=[""]).stop == parse(stop=[None]).stop == ()
    assert parse(stop=["", "a", None, "b"]).stop == ("a", "b")
    assert refusal(stop=["", 1]) == ("invalid_type", "stop[1]")


def test_logprobs_are_a_pair() -> None:
    assert parse().sampling.num_logprobs is None
    assert parse(logprobs=True).sampling.num_logprobs == 0
    assert parse(logprobs=True, top_logprobs=3).sampling.num_logprobs == 3
    assert parse(logprobs=False, top_logprobs=0).sampling.num_logprobs is None
    assert refusal(top_logprobs=3) == ("invalid_value", "top_logprobs")


def test_stream_options_without_a_stream_are_refused_if_they_ask_for_chunks() -> None:
    options = {"include_usage": True, "include_obfuscation": 5}
    assert parse(stream=True, stream_options=options).response_options.include_usage
    for harmless in (options, {}, {"continuous_usage_stats": False}):
        assert parse(stream_options=harmless).response_options.stream is False
    name = "continuous_usage_stats"
    refused = ("invalid_value", f"stream_options.{name}")
    assert refusal(stream_options={name: True}) == refused
    wrong = {"include_usage": 1}
    assert refusal(stream=True, stream_options=wrong) == (
        "invalid_type",
        "stream_options.include_usage",
    )


def test_heartbeats_are_on_if_the_request_streams() -> None:
    assert parse(stream=True).response_options.heartbeat
    assert not parse().response_options.heartbeat
    assert parse(heartbeat=True).response_options.heartbeat
    assert not parse(stream=True, heartbeat=False).response_options.heartbeat


def test_progress_without_a_stream_has_no_effect() -> None:
    assert not parse(return_progress=True).response_options.return_progress
    assert parse(stream=True, return_progress=True).response_options.return_progress


def test_text_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = chat_of(parse(messages=[{"role": "user", "content": parts}]))
    assert chat.messages[0]["content"] == "ab"


@pytest.mark.parametrize("kind", ["input_text", "output_text"])
def test_text_parts_may_be_named_as_in_responses(kind: str) -> None:
    parts = [{"type": kind, "text": "a", "annotations": []}]
    chat = chat_of(parse(messages=[{"role": "user", "content": parts}]))
    assert chat.messages[0]["content"] == "a"


def test_message_fields_that_templates_read_are_passed_unchanged() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER | {"name": "Ann", "unknown": 1},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so"},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]
    first, second, third = chat_of(parse(messages=messages)).messages
    assert first == USER | {"name": "Ann"}
    assert second == {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "so"}
    assert third["tool_call_id"] == "c"


EMPTY = {"type": "text"}


@pytest.mark.parametrize(
    ("message", "code", "below"),
    [
        ("hi", "invalid_type", ""),
        ({"content": "hi"}, "missing_required_parameter", ".role"),
        ({"role": 5, "content": "hi"}, "invalid_type", ".role"),
        ({"role": "user"}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": 5}, "invalid_type", ".content"),
        ({"role": "user", "content": [5]}, "invalid_type", ".content[0]"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "missing_required_parameter",
            ".content[0].text",
        ),
        ({"role": "user", "content": "hi", "name": 5}, "invalid_type", ".name"),
        ({"role": "assistant", "tool_calls": [5]}, "invalid_type", ".tool_calls[0]"),
    ],
)
def test_a_wrong_message_is_named_by_its_path(message: Any, code: str, below: str) -> None:
    assert refusal(messages=[USER, message]) == (code, f"messages[1]{below}")


def test_more_than_ten_thousand_messages_are_refused() -> None:
    assert len(chat_of(parse(messages=[USER] * 10_000)).messages) == 10_000
    assert refusal(messages=[USER] * 10_001) == ("invalid_value", "messages")


def test_a_final_message_of_the_assistant_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "So"}]
    chat = chat_of(parse(messages=messages, continue_final_message=True))
    assert chat.continue_final_message and not chat.add_generation_prompt
    assert chat_of(parse()).add_generation_prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(messages=messages, **both)[0] == "invalid_value"
    assert refusal(continue_final_message=True) == ("invalid_value", "continue_final_message")


def test_template_variables_cannot_replace_the_conversation() -> None:
    chat = chat_of(parse(chat_template_kwargs={"x": 1}, reasoning_effort="low"))
    assert chat.template_kwargs == {"x": 1, "reasoning_effort": "low"}
    for name in ("messages", "tools", "add_generation_prompt"):
        path = f"chat_template_kwargs.{name}"
        assert refusal(chat_template_kwargs={name: 1}) == ("invalid_value", path)


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1, 10**300])
def test_an_integer_that_cannot_be_stored_is_refused_in_any_field(number: int) -> None:
    inside = {"x": [{"y": number}]}
    assert refusal(chat_template_kwargs=inside) == ("invalid_value", "chat_template_kwargs")
    said = {"role": "assistant", "tool_calls": [inside]}
    assert refusal(messages=[said]) == ("invalid_value", "messages[0].tool_calls[0]")
    assert parse(chat_template_kwargs={"x": [(1 << 64) - 1, -(1 << 63), 1e300]})


NAMES = st.sampled_from([*openai_chat.TABLE, *UNSUPPORTED, *NO_EFFECT])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans())
@example({"logit_bias": {"\x00": 1}}, True)
@example({"chat_template_kwargs": {"x": 1 << 64}}, True)
def test_any_json_is_a_request_or_a_400(body: dict[str, Any], has_messages: bool) -> None:
    if has_messages:
        body = {"messages": [USER]} | body
    try:
        request = parsed(openai_chat, body)
    except RequestError as error:
        assert error.kind.status == 400
        assert error.message.endswith(".")
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_a_history_of_another_provider_becomes_messages_that_templates_know() -> None:
    patch = {"type": "custom", "id": "c1", "custom": {"name": "apply_patch", "input": 'a "b"'}}
    file = {"filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
    messages = [
        {
            "role": "user",
            "content": [{"type": "file", "file": file}, {"type": "text", "text": "x"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [patch], "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "Never.", "tool_calls": []},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "3"},
        {"role": "assistant", "content": None, "tool_calls": None, "audio": {"id": "a1"}},
        {"role": "user", "content": None},
        {"role": "ipython", "content": "5"},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]},
        {"role": "user", "content": [{"type": "search_result", "content": "found"}]},
        {"role": "assistant", "content": "Well.", "refusal": "No."},
    ]
    body = {"messages": messages}
    checked = pack(openai_chat, openai_chat.read(body))  # type: ignore[arg-type]
    assert checked.ignored == ("messages[9].role", "messages[10].content[0]")
    shown = chat_of(parse(messages=messages)).messages
    assert [it["content"] for it in shown] == [
        *(
            "a.txt:\nhi\nx",
            "",
            "ok",
            "No.",
            "Never.",
            "",
            "3",
            "",
            "",
            "5",
            "",
            "found",
            "Well.\nNo.",
        )
    ]
    function = {"name": "apply_patch", "arguments": r'{"input":"a \"b\""}'}
    assert shown[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert "tool_calls" not in shown[4]
    assert shown[5]["tool_calls"][0]["id"] == shown[6]["tool_call_id"]
    assert [shown[i]["role"] for i in (6, 9)] == ["tool", "user"]
