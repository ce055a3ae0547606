"""Tests bodies of /v1/responses: messages from items, errors by path, and chains."""

import json
from typing import Any

import msgspec
import pytest

from headrace.protocols.dialect import encode
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.openai.response_events import open_kept
from headrace.protocols.requests import pack
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Request
from headrace_common.worker_jobs import CheckedBody
from tests.gateway.builders import parsed

CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}
CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "sql", "input": 'a "b"'}
SHELL = {
    "type": "local_shell_call",
    "id": "lsh_1",
    "call_id": "c2",
    "action": {"type": "exec", "command": ["ls"], "env": {}, "user": None},
    "status": "completed",
}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def request_of(input: Any = "hi", **fields: Any) -> Request:
    return parsed(openai_responses, {"input": input} | fields)  # type: ignore[arg-type]


def chat_of(input: Any = "hi", **fields: Any) -> Chat:
    (chat,) = request_of(input, **fields).prompts
    assert isinstance(chat, Chat)
    return chat


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}


def refused(**body: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as error:
        openai_responses.read({"input": "hi"} | body)
    return error.value.code, error.value.param


def test_a_string_input_is_a_user_message_after_the_instructions() -> None:
    assert chat_of(instructions="Be brief.").messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    )


def test_parts_are_joined_and_roles_kept() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    assert [m["content"] for m in chat_of(items).messages] == ["x", "ab"]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    user, turn, result = chat_of([{"role": "user", "content": "x"}, THOUGHT, CALL, RESULT]).messages
    assert user["role"] == "user"
    function = {"name": "add", "arguments": '{"a":1}'}
    assert turn["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert (turn["content"], turn["reasoning_content"]) == ("", "Hm")
    assert result == {"role": "tool", "content": "2", "tool_call_id": "call_1"}


def test_a_message_after_a_message_is_a_turn_of_its_own() -> None:
    assert len(chat_of([said("a"), CALL, RESULT, said("b"), said("c")]).messages) == 4


def test_encrypted_reasoning_of_another_provider_is_left_out() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None}
    assert chat_of([item, said("a")]).messages == ({"role": "assistant", "content": "a"},)


def test_tools_are_flat_and_those_of_other_types_are_skipped() -> None:
    body = {"input": "hi", "tools": [{"type": "web_search"}, ADD]}
    checked = pack(openai_responses, openai_responses.read(body))  # type: ignore[arg-type]
    assert checked.ignored == ("tools[0]",)
    (tool,) = chat_of(tools=body["tools"]).tools
    assert tool["function"] == {name: ADD[name] for name in ("name", "parameters", "strict")}
    shown = json.loads(open_kept(checked.kept).shown)["tools"]
    assert shown == [{"type": "web_search"}, {"description": None} | ADD]


WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
SPACE = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Weather",
    "tools": [WEATHER, {"type": "web_search", "name": "x"}, WEATHER | {"name": "y" * 120}],
}


def test_functions_of_a_namespace_reach_the_model_by_both_names() -> None:
    body = {"input": "hi", "tools": [ADD, SPACE]}
    checked = pack(openai_responses, openai_responses.read(body))  # type: ignore[arg-type]
    assert checked.ignored == ("tools[1].tools[1]", "tools[1].tools[2]")
    names = [tool["function"]["name"] for tool in chat_of(tools=body["tools"]).tools]
    assert names == ["add", "mcp__weather__get_weather"]
    space = json.loads(open_kept(checked.kept).shown)["tools"][1]
    assert space == SPACE
    choice = {"type": "function", "name": "get_weather", "namespace": "mcp__weather"}
    assert request_of(tools=body["tools"], tool_choice=choice).sampling.grammar is not None
    with pytest.raises(RequestError) as refused:
        request_of(tools=body["tools"], tool_choice=choice | {"namespace": "x"})
    assert refused.value.param == "tool_choice.name"


def test_a_call_into_a_namespace_comes_back_as_the_model_wrote_it() -> None:
    call = CALL | {"name": "get_weather", "namespace": "mcp__weather"}
    _, turn, _ = chat_of([{"role": "user", "content": "x"}, call, RESULT]).messages
    assert turn["tool_calls"][0]["function"]["name"] == "mcp__weather__get_weather"


def test_reasoning_effort_turns_thinking_on_or_off() -> None:
    kwargs = chat_of(reasoning={"effort": "none"}).template_kwargs
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    assert chat_of(reasoning={"effort": "low"}).template_kwargs["enable_thinking"] is True
    assert "enable_thinking" not in chat_of(reasoning={"summary": "auto"}).template_kwargs


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": 1}, "invalid_type", "input"),
        ({"input": [{"type": 5}]}, "invalid_type", "input[0].type"),
        ({"input": [CUSTOM | {"call_id": 5}]}, "invalid_type", "input[0].call_id"),
        ({"input": [SHELL | {"action": 5}]}, "invalid_type", "input[0].action"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"type": "message"}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [CALL | {"name": None}]}, "missing_required_parameter", "input[0].name"),
        ({"input": [RESULT | {"output": 1}]}, "invalid_type", "input[0].output"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [ADD, ADD | {"name": "?"}]}, "invalid_value", "tools[1].name"),
        ({"tools": [ADD | {"parameters": 1}]}, "invalid_type", "tools[0].parameters"),
        ({"tool_choice": {"type": "function"}}, "missing_required_parameter", "tool_choice.name"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
            "invalid_value",
            "tool_choice.name",
        ),
        ({"truncation": "some"}, "invalid_value", "truncation"),
        ({"conversation": {"id": 5}}, "invalid_type", "conversation.id"),
        ({"background": True, "store": False}, "invalid_value", "store"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ],
)
def test_a_fault_names_its_path(body: dict[str, Any], code: str, param: str) -> None:
    assert refused(**body) == (code, param)


def test_sampling_and_limits_are_taken_over() -> None:
    request = request_of(max_output_tokens=7, temperature=0, top_logprobs=2, background=True)
    assert (request.sampling.max_tokens, request.sampling.num_logprobs) == (7, 2)
    assert request.response_options.background and request.route == "/v1/responses"
    assert request_of(include=["message.output_text.logprobs"]).sampling.num_logprobs == 0
    assert request_of().sampling.num_logprobs is None


def checked_of(**body: Any) -> CheckedBody:
    return pack(openai_responses, openai_responses.read(body))  # type: ignore[arg-type]


def test_chained_responses_equal_the_same_conversation_sent_whole() -> None:
    first = [{"role": "user", "content": "x"}]
    output = [THOUGHT, said("a"), CALL]
    own = {"instructions": "Be brief.", "tools": [ADD]}
    chained = openai_responses.go_on(
        checked_of(input=first, instructions="another").kept,
        encode(output),
        checked_of(input=[RESULT], **own),
        {},
    )
    whole = checked_of(input=[*first, *output, RESULT], **own)
    assert chained.packed == whole.packed
    assert open_kept(chained.kept).items == open_kept(whole.kept).items


def items_page(*arguments: Any) -> Any:
    kept = checked_of(input=[{"role": "user", "content": "x"}, said("a"), CALL, RESULT]).kept
    return json.loads(openai_responses.input_items(kept, "resp_1", *arguments))


def test_items_are_listed_in_pages_of_either_order() -> None:
    whole = items_page(20, True, "")
    ids = [item["id"] for item in whole["data"]]
    assert ids[1] == "msg_1" and len(set(ids)) == 4 and not whole["has_more"]
    assert (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
    page = items_page(2, False, ids[3])
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]] and page["has_more"]
    with pytest.raises(RequestError):
        items_page(2, True, "msg_unknown")


def test_an_old_record_without_kept_items_can_be_opened() -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(request_of()))
    del raw["kept"]
    assert msgspec.convert(raw, Request, strict=False).kept == b""


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind} | fields


FILE = item("input_file", filename="a.txt", file_data="data:text/plain;base64,aGk=")
PATCH = item("apply_patch_call", call_id="c3", operation={"type": "delete_file", "path": "a"})
RUN = item("shell_call", call_id="c4", action={"commands": ["ls"], "timeout_ms": None})
CHUNK = {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}}
SHOT = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="}


@pytest.mark.parametrize(
    ("call", "output", "shown", "result"),
    [
        (CUSTOM, item("custom_tool_call_output", call_id="c1", output="3"), ("sql", None), "3"),
        (
            SHELL,
            item("local_shell_call_output", id="lsh_1", output="ok"),
            ("local_shell", None),
            "ok",
        ),
        (PATCH, item("apply_patch_call_output", call_id="c3", status="failed"), None, "failed"),
        (RUN, item("shell_call_output", call_id="c4", output=[CHUNK]), None, "a\nb\nExit code 2."),
        (
            item("tool_search_call", call_id="c5", arguments={"query": "x"}),
            item("tool_search_output", call_id="c5", tools=[{"name": "y"}]),
            ("tool_search", {"query": "x"}),
            '[{"name":"y"}]',
        ),
        (
            item("tool_search_call", id="tsc_1", call_id=None, arguments={"query": "x"}),
            item("tool_search_output", id="tso_1", call_id=None, tools=[{"name": "y"}]),
            ("tool_search", {"query": "x"}),
            '[{"name":"y"}]',
        ),
        (
            item("computer_call", call_id="c7", actions=[{"type": "wait"}]),
            item("computer_call_output", call_id="c7", output=SHOT),
            ("computer", {"actions": [{"type": "wait"}]}),
            "",
        ),
        (
            item("computer_call", call_id="c6", action={"type": "screenshot"}),
            item("computer_call_output", call_id="c6", output=SHOT),
            ("computer", {"type": "screenshot"}),
            "",
        ),
    ],
)
def test_calls_of_every_type_become_function_calls_with_results(
    call: dict[str, Any], output: dict[str, Any], shown: Any, result: str
) -> None:
    turn, told = chat_of([call, output]).messages
    function = turn["tool_calls"][0]["function"]
    known = {
        "sql": {"input": 'a "b"'},
        "local_shell": {"command": ["ls"], "env": {}},
        "apply_patch": {"type": "delete_file", "path": "a"},
        "shell": {"commands": ["ls"]},
    }
    arguments = shown[1] if shown and shown[1] else known[function["name"]]
    assert json.loads(function["arguments"]) == arguments
    assert not shown or function["name"] == shown[0]
    assert (told["role"], told["content"]) == ("tool", result)


@pytest.mark.parametrize(
    ("foreign", "messages"),
    [
        (
            item(
                "mcp_call", id="m1", name="look", arguments="{}", server_label="s", output="found"
            ),
            [("assistant", ""), ("tool", "found")],
        ),
        (
            item(
                "code_interpreter_call", id="i", code="1", outputs=[{"type": "logs", "logs": "1"}]
            ),
            [("assistant", ""), ("tool", "1")],
        ),
        (
            item("code_interpreter_call", id="i", code="1", outputs=None),
            [("assistant", ""), ("tool", "The output was not kept.")],
        ),
        (item("mcp_list_tools", server_label="s", error="It is down."), [("user", "It is down.")]),
        (
            item("file_search_call", id="f", queries=["q"], results=[{"text": "page", "score": 1}]),
            [("assistant", ""), ("tool", "page")],
        ),
        (
            item("compaction", summary="So far."),
            [("user", "Summary of the conversation so far:\nSo far.")],
        ),
        (item("agent_message", content=[{"type": "output_text", "text": "Hm"}]), [("user", "Hm")]),
        (item("of_tomorrow", output={"text": "new"}), [("user", "new")]),
        (RESULT, [("user", "Result of a tool call:\n2")]),
        (item("message", role="critic", content="x"), [("user", "x")]),
        (item("message", role="user", content=[FILE]), [("user", "a.txt:\nhi\n")]),
        (
            item("message", role="assistant", content=[{"type": "refusal", "refusal": "No."}]),
            [("assistant", "No.")],
        ),
    ],
)
def test_items_of_another_provider_are_shown_if_they_have_text(
    foreign: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    shown = chat_of([foreign]).messages
    assert [(it["role"], it["content"]) for it in shown] == messages


TEXTLESS = [
    item("web_search_call", id="ws", status="completed", action={"type": "search", "query": "q"}),
    item("image_generation_call", id="ig", result="AAAA", status="completed"),
    item("mcp_list_tools", id="l", server_label="s", tools=[{"name": "x", "input_schema": {}}]),
    item("mcp_approval_response", approval_request_id="a", approve=True),
    item("reasoning", id="rs", summary=[], encrypted_content="x"),
    item("compaction", id="cmp", encrypted_content="x"),
    item("compaction_trigger"),
    item("item_reference", id="msg_x"),
    {"id": "msg_y"},
    item("additional_tools", role="developer", tools=[]),
    item("of_tomorrow", number=3),
]


FOUND = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
SEARCHED = item("tool_search_output", call_id="s1", tools=[FOUND, {"type": "web_search"}, 5])
ADDED = item("additional_tools", role="developer", tools=[{"type": "custom", "name": "sql"}])


def test_tools_defined_in_input_items_are_offered() -> None:
    first = [{"role": "user", "content": "x"}, SEARCHED, ADDED]
    checked = checked_of(input=first, tools=[ADD | {"name": "look"}])
    assert [tool["function"]["name"] for tool in chat_of(first).tools] == ["look", "sql"]
    assert checked.fields["parameter_types"] == {"look": {}, "sql": {"input": ("string",)}}
    named = ("input[1].tools[1]", "input[1].tools[2]")
    assert checked.ignored == named
    assert checked_of(input=first).ignored == (*named, "input[1].tools[0].strict")
    assert open_kept(checked.kept).kinds == {"sql": "custom"}


def test_a_continued_conversation_keeps_the_tools_found_by_search() -> None:
    first = checked_of(input=[SEARCHED, ADDED])
    for asked, names in [({}, ["look", "sql"]), ({"tool_choice": "none"}, [])]:
        more = checked_of(input="y", previous_response_id="resp_1", **asked)
        goes_on = openai_responses.go_on(first.kept, b"[]", more, {})
        (chat,) = msgspec.msgpack.decode(goes_on.packed, type=tuple[Chat])
        assert [tool["function"]["name"] for tool in chat.tools] == names
        assert list(goes_on.fields["parameter_types"]) == names
        assert open_kept(goes_on.kept).kinds == ({"sql": "custom"} if names else {})


RESPONSE_ID = "resp_" + "ab" * 16


def test_items_of_earlier_responses_take_the_place_of_references_to_them() -> None:
    first = checked_of(input="x")
    output = encode([THOUGHT | {"id": f"rs_{'ab' * 16}o0"}])
    (asked,) = json.loads(openai_responses.input_items(first.kept, RESPONSE_ID, 9, True, ""))[
        "data"
    ]
    unknown = item("item_reference", id=f"msg_{'ab' * 16}o7")
    sent = [{"id": asked["id"]}, item("item_reference", id=f"rs_{'ab' * 16}o0"), unknown, RESULT]
    checked = checked_of(input=sent, instructions="Be brief.")
    assert checked.fields["referenced"] == tuple(it["id"] for it in sent[:3])
    assert "item_ids" not in checked.fields
    assert checked.ignored == ("input[0]", "input[1]", "input[2]")
    others = {RESPONSE_ID: (first.kept, output)}
    whole = openai_responses.go_on(openai_responses.NO_ITEMS, b"[]", checked, others)
    assert whole.ignored == ("input[2]",) and "referenced" not in whole.fields
    given = checked_of(input=[asked, THOUGHT, RESULT], instructions="Be brief.")
    assert whole.packed == given.packed
    kept = json.loads(open_kept(whole.kept).items)
    assert [it["id"] for it in kept[:3]] == [asked["id"], sent[1]["id"], unknown["id"]]


def test_the_newest_client_item_ids_are_indexed() -> None:
    texts = [{"role": "user", "content": "x", "id": f"msg_{i}"} for i in range(1010)]
    odd = [texts[0] | {"id": id} for id in ("with blanks", "", "x" * 129, "é", None)]
    referred = [item("item_reference", id="msg_of_another")]
    checked = checked_of(input=[*texts, texts[-1], *odd, *referred])
    assert checked.fields["item_ids"] == tuple(f"msg_{i}" for i in range(10, 1010))
    assert checked.fields["referenced"] == ("msg_of_another",)


def test_an_image_that_another_provider_stores_is_skipped_and_named() -> None:
    content = [item("input_text", text="x"), item("input_image", file_id="file_1", detail="auto")]
    checked = checked_of(input=[item("message", role="user", content=content)])
    assert checked.ignored == ("input[0].content[1]",)


def test_items_without_text_are_skipped_but_returned_as_sent() -> None:
    said = item("message", role="user", content=[item("input_text", text="x", own=1)])
    checked = checked_of(input=[*TEXTLESS, said])
    assert checked.ignored == tuple(f"input[{i}]" for i in range(len(TEXTLESS)))
    assert chat_of([*TEXTLESS, said]).messages == ({"role": "user", "content": "x"},)
    (page,) = [json.loads(openai_responses.input_items(checked.kept, "resp_1", 100, True, ""))]
    for given, found in zip([*TEXTLESS, said], page["data"], strict=True):
        assert given.items() <= found.items()
    whole = openai_responses.go_on(checked.kept, b"[]", checked_of(input="y"), {})
    assert len(json.loads(open_kept(whole.kept).items)) == len(TEXTLESS) + 2
