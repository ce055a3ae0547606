import json
from typing import Any

import pytest

from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.fields import structure
from headrace_common.errors import RequestError
from headrace_common.request import Chat, Request
from tests.gateway.builders import FakeModel, parsed

USER = {"role": "user", "content": "hi"}
ASKED = {"model": "headrace-mini", "messages": [USER], "max_tokens": 16}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}


def parse(**body: Any) -> Request:
    return parsed(anthropic_messages, ASKED | body)


def refusal(**body: Any) -> tuple[str, str | None]:
    """Return the code and the path of the error that the client receives."""
    with pytest.raises(RequestError) as caught:
        parse(**body)
    shown = json.loads(anthropic_messages.ERRORS.body(caught.value))["error"]
    return shown["code"], shown["param"]


def chat_of(**body: Any) -> Chat:
    (chat,) = parse(**body).prompts
    assert isinstance(chat, Chat)
    return chat


def messages_of(*turns: dict[str, Any], **body: Any) -> tuple[dict[str, Any], ...]:
    return chat_of(messages=list(turns), **body).messages


def test_a_message_becomes_a_chat_request() -> None:
    request = parse(stop_sequences=["x", "y"], temperature=0.5, top_k=3, stream=True)
    assert (request.route, request.model) == ("/v1/messages", "headrace-mini")
    assert request.stop == ("x", "y")
    assert (request.sampling.max_tokens, request.sampling.top_k) == (16, 3)
    assert request.response_options.stream and request.response_options.heartbeat


def test_max_tokens_may_be_zero() -> None:
    assert parse(max_tokens=0).sampling.max_tokens == 0


@pytest.mark.parametrize("name", ["model", "messages", "max_tokens"])
def test_a_missing_required_field_is_named(name: str) -> None:
    assert refusal(**{name: None}) == ("missing_required_parameter", name)


def test_the_system_prompt_is_the_first_message() -> None:
    blocks = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    for system in ("Be brief.", blocks):
        assert messages_of(USER, system=system) == (
            {"role": "system", "content": "Be brief."},
            USER,
        )


def test_a_tool_loop_becomes_calls_and_results_in_order() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    hidden = {"type": "redacted_thinking", "data": "x"}
    other = CALL | {"id": "toolu_2", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True}
    assert messages_of(
        USER,
        {"role": "assistant", "content": [thought, hidden, CALL, other]},
        {"role": "user", "content": [RESULT, failed, {"type": "text", "text": "Go on."}]},
    ) == (
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}},
                },
                {
                    "id": "toolu_2",
                    "type": "function",
                    "function": {"name": "add", "arguments": {}},
                },
            ],
        },
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Error: ", "name": "add", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "Go on."},
    )


def test_consecutive_turns_of_one_role_are_joined() -> None:
    said = {"role": "assistant", "content": "a"}
    assert messages_of(USER, USER, said, {"role": "assistant", "content": [CALL]}, _user(RESULT))[
        :2
    ] == (
        {"role": "user", "content": "hi\nhi"},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 1}},
                }
            ],
        },
    )


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = chat_of(messages=[USER, {"role": "assistant", "content": "1, 2"}])
    assert begun.continue_final_message and not begun.add_generation_prompt
    empty = chat_of(messages=[USER, {"role": "assistant", "content": ""}])
    assert empty.messages == (USER,)
    assert empty.add_generation_prompt
    called = chat_of(messages=[USER, {"role": "assistant", "content": [CALL]}])
    assert called.add_generation_prompt and not called.continue_final_message


def test_tools_reach_the_template_in_the_form_of_chat_completions() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    own = TOOL | {"cache_control": {"type": "ephemeral"}, "type": "custom"}
    assert chat_of(tools=[own]).tools == ({"type": "function", "function": function},)
    assert chat_of(tools=[own], tool_choice={"type": "none"}).tools == ()
    channels = parse(tools=[own]).channels
    assert channels and channels.tools == "hermes"


@pytest.mark.parametrize(
    ("choice", "known"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "add"}, ("add",)),
    ],
)
def test_tool_choice_becomes_that_of_chat_completions(choice: dict[str, Any], known: Any) -> None:
    fields = anthropic_messages.read(ASKED | {"tools": [TOOL], "tool_choice": choice})
    assert fields["tool_choice"] == known


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, thinks: bool) -> None:
    thinking = {"type": kind, "budget_tokens": 1024}
    assert chat_of(thinking=thinking).template_kwargs == {"enable_thinking": thinks}
    assert chat_of().template_kwargs == {}
    effort = chat_of(output_config={"effort": "max"}, thinking={"type": "adaptive"})
    assert effort.template_kwargs == {"reasoning_effort": "high", "enable_thinking": True}


WRONG = [
    ({"tools": [{"type": 5}]}, "invalid_type", "tools[0].type"),
    ({"tools": [TOOL | {"name": "a b"}]}, "invalid_value", "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "missing_required_parameter", "tools[0].input_schema"),
    ({"tools": [TOOL | {"input_schema": []}]}, "invalid_type", "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "must"}}, "invalid_value", "tool_choice.type"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
        "invalid_value",
        "tool_choice.name",
    ),
    ({"thinking": {"type": "deep"}}, "invalid_value", "thinking.type"),
    ({"chat_template_kwargs": 1}, "invalid_type", "chat_template_kwargs"),
    ({"system": 1}, "invalid_type", "system"),
    ({"stop_sequences": ["x" * 1001]}, "invalid_value", "stop_sequences[0]"),
    ({"temperature": "hot"}, "invalid_type", "temperature"),
    (
        {"output_config": {"format": {"type": "text"}}},
        "invalid_value",
        "output_config.format.type",
    ),
    ({"messages": [{"role": 5, "content": ""}]}, "invalid_type", "messages[0].role"),
    ({"messages": [{"content": ""}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [RESULT | {"tool_use_id": 5}]}]},
        "invalid_type",
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "invalid_type",
        "messages[0].content[0].text",
    ),
]


@pytest.mark.parametrize(("body", "code", "path"), WRONG)
def test_an_invalid_field_is_named_by_its_path(body: dict[str, Any], code: str, path: str) -> None:
    assert refusal(**body) == (code, path)


def test_other_fields_that_clients_send_are_accepted() -> None:
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    request = parse(
        messages=[_user(cached)],
        system=[cached],
        metadata={"user_id": "x"},
        context_management={"edits": []},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        betas=["x"],
        mcp_servers=[{"type": "url", "url": "http://x", "name": "x"}],
        container="c",
        speed="fast",
        inference_geo="eu",
        effort="low",
    )
    assert request.prompts == parse(system="hi").prompts


def test_count_tokens_counts_the_prompt_of_the_same_message() -> None:
    body = {"system": "Be brief.", "tools": [TOOL], "thinking": {"type": "enabled"}}
    counted = {k: v for k, v in (ASKED | body).items() if k != "max_tokens"}
    fields = anthropic_messages.read_counted(counted)
    assert anthropic_messages.to_prompts(fields) == parse(**body).prompts


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_a_model_may_lack_tools() -> None:
    model = FakeModel(tool_format="")
    assert parsed(anthropic_messages, ASKED | {"tools": [TOOL]}, model).route == "/v1/messages"


def test_output_formats_and_forced_tools_become_grammar_fields() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": asked}}, {"output_format": asked}):
        wanted = structure.take(anthropic_messages.read(ASKED | body))
        assert wanted and wanted.wanted and wanted.wanted.value == schema
    one = {"type": "any", "disable_parallel_tool_use": True}
    wanted = structure.take(anthropic_messages.read(ASKED | {"tools": [TOOL], "tool_choice": one}))
    assert wanted and wanted.calls
    assert (wanted.calls.is_forced, wanted.calls.most) == (True, 1)
