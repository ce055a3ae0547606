from typing import Any

import pytest

from headrace.protocols.anthropic import messages as anthropic_messages
from headrace.protocols.fields import structure
from headrace_common.errors import RequestError
from headrace_common.request import Chat
from tests.gateway.builders import parsed

ASKED = {
    "model": "headrace-mini",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 16,
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
ADD = {"name": "add", "input_schema": {"type": "object"}}


def read(*tools: dict[str, Any], **body: Any) -> dict[str, Any]:
    return anthropic_messages.read(ASKED | {"tools": list(tools)} | body)


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    (chat,) = parsed(anthropic_messages, ASKED | {"tools": [tool]}).prompts
    assert isinstance(chat, Chat)
    found: dict[str, Any] = chat.tools[0]["function"]
    return found


TYPED = [
    ("bash_20241022", "bash", ["command", "restart"], []),
    ("bash_20250124", "bash", ["command", "restart"], []),
    ("bash_20300101", "bash", ["command", "restart"], []),
    (
        "text_editor_20241022",
        "str_replace_editor",
        ["command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"],
        ["view", "create", "str_replace", "insert", "undo_edit"],
    ),
    (
        "text_editor_20250429",
        "str_replace_based_edit_tool",
        ["command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"],
        ["view", "create", "str_replace", "insert"],
    ),
    (
        "text_editor_20250728",
        "str_replace_based_edit_tool",
        [
            *("command", "path", "view_range", "file_text", "old_str", "new_str"),
            *("insert_text", "insert_line"),
        ],
        ["view", "create", "str_replace", "insert"],
    ),
    (
        "memory_20250818",
        "memory",
        [
            *("command", "path", "view_range", "file_text", "old_str", "new_str"),
            *("insert_text", "insert_line", "old_path", "new_path"),
        ],
        ["view", "create", "str_replace", "insert", "delete", "rename"],
    ),
]


@pytest.mark.parametrize(("kind", "name", "parameters", "commands"), TYPED)
def test_a_client_tool_of_a_known_type_becomes_a_function(
    kind: str, name: str, parameters: list[str], commands: list[str]
) -> None:
    function = function_of({"type": kind, "name": name})
    properties = function["parameters"]["properties"]
    assert (function["name"], list(properties)) == (name, parameters)
    assert properties["command"].get("enum", []) == commands
    assert set(function["parameters"]["required"]) <= {"command", "path"}
    assert function_of({"type": kind})["name"] == name


def test_a_computer_tool_has_the_actions_of_its_version_and_its_screen_size() -> None:
    def actions(kind: str, **more: Any) -> list[str]:
        sized = {
            "type": kind,
            "name": "computer",
            "display_width_px": 800,
            "display_height_px": 600,
        }
        function = function_of(sized | more)
        assert "800 pixels wide and 600 pixels high" in function["description"]
        found: list[str] = function["parameters"]["properties"]["action"]["enum"]
        return found

    assert "scroll" not in actions("computer_20241022")
    assert {"scroll", "hold_key", "triple_click"} <= set(actions("computer_20250124"))
    assert "zoom" not in actions("computer_20251124")
    assert "zoom" in actions("computer_20251124", enable_zoom=True)


def test_an_unknown_tool_type_with_a_schema_becomes_a_function() -> None:
    function = function_of(ADD | {"type": "made_in_2030", "defer_loading": True})
    assert function == {"name": "add", "parameters": {"type": "object"}}


OTHERS = [
    SEARCH,
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
    {"type": "advisor_20260301", "name": "advisor", "model": "m"},
    {"type": "made_in_2030"},
]


@pytest.mark.parametrize("tool", OTHERS)
def test_a_tool_without_a_known_schema_is_left_out_and_named(tool: dict[str, Any]) -> None:
    fields = read(ADD, tool, ADD | {"name": "subtract"})
    assert [it["function"]["name"] for it in fields["tools"]] == ["add", "subtract"]
    assert fields["skipped"] == ("tools[1]",)


def test_such_a_tool_cannot_be_forced() -> None:
    for tool in (SEARCH, {"type": "made_in_2030", "name": "web_search"}):
        with pytest.raises(RequestError, match=f'a tool of type "{tool["type"]}"') as caught:
            read(ADD, tool, tool_choice={"type": "tool", "name": "web_search"})
        assert caught.value.code == "unsupported_parameter"
        assert caught.value.param == "tool_choice.name"
    with pytest.raises(RequestError, match="cannot offer any of the tools to the model"):
        read(SEARCH, tool_choice={"type": "any"})


def test_a_tool_that_the_client_runs_can_be_forced() -> None:
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    forced = {"type": "tool", "name": "str_replace_based_edit_tool"}
    wanted = structure.take(read(SEARCH, editor, tool_choice=forced))
    assert wanted and wanted.calls and wanted.calls.is_forced


def test_a_faulty_schema_is_named_by_its_place_among_all_tools() -> None:
    fields = read(SEARCH, ADD)
    assert fields["tool_paths"] == ["tools[1].function"]
    with pytest.raises(RequestError) as caught:
        read(SEARCH, ADD | {"name": "a b"})
    assert caught.value.param == "tools[1].name"


def test_a_name_may_have_128_characters() -> None:
    assert function_of(ADD | {"name": "a" * 128})["name"] == "a" * 128
    with pytest.raises(RequestError, match="1 to 128 letters"):
        read(ADD | {"name": "a" * 129})


@pytest.mark.parametrize("kind", ["adaptive", "between_tools"])
def test_newer_types_of_thinking_are_accepted(kind: str) -> None:
    config = {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 5}}
    fields = read(ADD, thinking={"type": kind, "display": "omitted"}, output_config=config)
    assert fields["chat_template_kwargs"] == {"enable_thinking": True}
