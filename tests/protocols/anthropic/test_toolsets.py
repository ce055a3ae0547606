"""Tests toolsets: entries of `tools` that contain several client tools."""

from typing import Any

import pytest

from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.fields import structure
from headrace_common.errors import RequestError
from headrace_common.request import Chat
from tests.gateway.builders import parsed

COMPUTER = {"type": "computer_toolset_20260801"}
BROWSER = {"type": "browser_toolset_20260801"}
ASKED: dict[str, Any] = {
    "model": "headrace-mini",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 16,
}


def functions(*tools: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the functions that the model is offered for these tools, by name."""
    (chat,) = parsed(anthropic_messages, ASKED | {"tools": list(tools)}).prompts
    assert isinstance(chat, Chat)
    return {tool["function"]["name"]: tool["function"] for tool in chat.tools}


def test_a_toolset_is_replaced_by_its_members() -> None:
    found = functions(COMPUTER)
    assert len(found) == 17 and set(found) >= {"computer__zoom", "computer__left_click"}
    scroll = found["computer__scroll"]["parameters"]
    assert list(scroll["properties"]) == [
        *("scroll_direction", "scroll_amount", "coordinate", "text")
    ]
    assert scroll["required"] == ["scroll_direction", "scroll_amount"]
    assert found["computer__screenshot"]["parameters"]["properties"] == {}


def test_members_that_need_to_be_enabled_are_off_by_default() -> None:
    off = {"file_upload", "read_console", "read_network", "javascript_exec"}
    assert len(functions(BROWSER)) == 27
    assert not {f"browser__{name}" for name in off} & set(functions(BROWSER))
    on = BROWSER | {"configs": {name: {"enabled": True} for name in off}}
    assert len(functions(on)) == 31
    fewer = BROWSER | {"configs": {"zoom": {"enabled": False}, "find": None, "wait": {}}}
    assert set(functions(BROWSER)) - set(functions(fewer)) == {"browser__zoom"}


def test_two_toolsets_may_have_members_of_the_same_name() -> None:
    found = functions(COMPUTER, BROWSER, {"name": "screenshot", "input_schema": {}})
    assert {"computer__screenshot", "browser__screenshot", "screenshot"} <= set(found)
    target = found["browser__left_click"]["parameters"]["properties"]["target"]
    assert [it["required"] for it in target["anyOf"]] == [["type", "x", "y"], ["type", "ref"]]


def test_a_member_can_be_forced_by_its_own_name() -> None:
    for tools, name in (([COMPUTER], "screenshot"), ([BROWSER, COMPUTER], "navigate")):
        choice = {"type": "tool", "name": name}
        fields = anthropic_messages.read(ASKED | {"tools": tools, "tool_choice": choice})
        wanted = structure.take(fields)
        assert wanted and wanted.calls and wanted.calls.is_forced
        (flat,) = fields["tool_choice"]
        assert flat.endswith(f"__{name}")
    with pytest.raises(RequestError, match="browser__screenshot") as caught:
        both = {"tools": [BROWSER, COMPUTER], "tool_choice": choice | {"name": "screenshot"}}
        anthropic_messages.read(ASKED | both)
    assert caught.value.code == "invalid_value"


def test_a_call_in_a_history_has_the_name_shown_to_the_model() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "screenshot", "toolset_name": "computer"}
    result = {"type": "tool_result", "tool_use_id": "t1", "toolset_name": "computer"}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": [call | {"input": {}}]},
        {"role": "user", "content": [result | {"content": "a desktop"}]},
    ]
    (chat,) = parsed(anthropic_messages, ASKED | {"messages": turns, "tools": [COMPUTER]}).prompts
    assert isinstance(chat, Chat)
    (shown,) = chat.messages[1]["tool_calls"]
    assert shown["function"]["name"] == "computer__screenshot" == chat.messages[2]["name"]


@pytest.mark.parametrize(
    ("configs", "path"),
    [
        ([], "tools[0].configs"),
        ({"zoom": True}, "tools[0].configs.zoom"),
        ({"zoom": {"enabled": "no"}}, "tools[0].configs.zoom.enabled"),
    ],
)
def test_wrong_configs_are_named_by_their_path(configs: Any, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        functions(COMPUTER | {"configs": configs})
    assert (caught.value.code, caught.value.param) == ("invalid_type", path)
