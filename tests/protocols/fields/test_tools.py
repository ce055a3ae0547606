"""Tests `tool_choice` and allowed tools."""

from typing import Any

import pytest

from headrace.protocols.fields import structure
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.openai.response_events import open_kept
from headrace_common.errors import RequestError
from headrace_common.request import Chat
from tests.gateway.builders import parsed


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = [tool("add"), tool("sub"), tool("mul")]
ASKED = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def flat_allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def names_in(chat: Any) -> list[str]:
    assert isinstance(chat, Chat)
    return [tool["function"]["name"] for tool in chat.tools]


def test_only_allowed_tools_are_offered_and_may_be_called() -> None:
    body = ASKED | {"tool_choice": allowed("auto", "mul", "sub")}
    request = parsed(openai_chat, body)  # type: ignore[arg-type]
    assert names_in(request.prompts[0]) == ["sub", "mul"]
    assert request.channels and set(request.channels.parameter_types) == {"sub", "mul"}


def test_one_of_the_allowed_tools_may_be_required_and_paths_stay_those_of_the_body() -> None:
    body = ASKED | {"tool_choice": allowed("required", "mul")}
    found = structure.take(openai_chat.read(body))
    assert found and found.calls and found.calls.is_forced
    assert [tool.path for tool in found.calls.tools] == ["tools[2].function.parameters"]


def test_responses_restrict_tools_but_return_them_as_sent() -> None:
    tools = [{"type": "web_search"}, *({"type": "function", **t["function"]} for t in TOOLS)]
    choice = flat_allowed("required", "sub")
    body = {"input": "hi", "tools": tools, "tool_choice": choice}
    fields = openai_responses.read(dict(body))
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["sub"]
    found = structure.take(fields)
    assert found and found.calls and found.calls.tools[0].path == "tools[2].parameters"
    shown = open_kept(openai_responses.read(dict(body))["kept"]).shown
    assert b'"mode":"required"' in shown and shown.count(b'"name":') == 4


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        (allowed("auto", "div"), "invalid_value", "tool_choice.allowed_tools.tools[0]"),
        (allowed("any", "add"), "invalid_value", "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "invalid_value", "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools"}, "invalid_type", "tool_choice.allowed_tools"),
        ({"type": "web_search"}, "unsupported_parameter", "tool_choice.type"),
        ({"type": "tool", "name": "add"}, "invalid_value", "tool_choice"),
    ],
)
def test_an_invalid_tool_choice_is_named_by_its_path(choice: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        openai_chat.read(ASKED | {"tool_choice": choice})
    assert (refused.value.code, refused.value.param) == (code, param)
