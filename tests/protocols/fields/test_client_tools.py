"""Tests client tools that become functions, and formats that cannot be enforced."""

from typing import Any

import pytest

from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.openai import responses as openai_responses
from headrace.protocols.requests import pack
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import CheckedBody
from tests.gateway.builders import parsed

LARK = "start: word+\nword: /[a-z]+/"
RECURSIVE = 'start: "(" start? ")"'


def sql(format: Any = None) -> dict[str, Any]:
    tool = {"type": "custom", "name": "sql", "description": "Runs SQL."}
    return tool | ({"format": format} if format else {})


def grammar(syntax: str, definition: str) -> dict[str, str]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def read(*tools: Any, **body: Any) -> CheckedBody:
    whole = {"input": "hi", "tools": list(tools)} | body
    return pack(openai_responses, openai_responses.read(whole))  # type: ignore[arg-type]


def function_of(*tools: Any) -> dict[str, Any]:
    request = parsed(openai_responses, {"input": "hi", "tools": list(tools)})  # type: ignore[arg-type]
    function: dict[str, Any] = request.prompts[0].tools[0]["function"]  # type: ignore[union-attr]
    return function


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    function = function_of(sql())
    assert (function["name"], function["description"]) == ("sql", "Runs SQL.")
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert read(sql()).ignored == read(sql({"type": "text"})).ignored == ()


def test_regular_expressions_and_lark_grammars_without_recursion_are_enforced() -> None:
    function = function_of(sql(grammar("regex", "^a+$")))
    assert function["parameters"]["properties"]["input"]["pattern"] == "^(?:a+)$"
    assert read(sql(grammar("regex", "a+"))).ignored == ()
    function = function_of(sql(grammar("lark", LARK)))
    assert (
        function["parameters"]["properties"]["input"]["pattern"] and LARK in function["description"]
    )
    assert read(sql(grammar("lark", LARK))).ignored == ()
    assert RECURSIVE in function_of(sql(grammar("lark", RECURSIVE)))["description"]
    assert read(sql(grammar("lark", RECURSIVE))).ignored == ("tools[0].format",)


@pytest.mark.parametrize(
    ("format", "param"),
    [
        (grammar("regex", "("), "tools[0].format.definition"),
        (grammar("lark", "start: ("), "tools[0].format.definition"),
        (grammar("ebnf", "x"), "tools[0].format.syntax"),
        ({"type": "grammar"}, "tools[0].format"),
        ({"type": "xml"}, "tools[0].format"),
        (5, "tools[0].format"),
    ],
)
def test_a_broken_format_is_refused_only_where_its_tool_is_forced(format: Any, param: str) -> None:
    assert read(sql(format)).ignored == ("tools[0].format",)
    with pytest.raises(RequestError) as refused:
        read(sql(format), tool_choice={"type": "custom", "name": "sql"})
    assert refused.value.param == param


@pytest.mark.parametrize("kind", ["apply_patch", "local_shell", "shell"])
def test_a_fixed_tool_can_be_offered_forced_and_allowed(kind: str) -> None:
    tool, other = {"type": kind}, {"type": "web_search"}
    assert function_of(tool)["name"] == kind
    assert read(tool, tool_choice={"type": kind}).ignored == ()
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [tool, other]}
    assert read(tool, other, tool_choice=allowed).ignored == ("tools[1]",)


def test_a_provider_s_tool_is_skipped_and_refused_where_it_is_forced() -> None:
    with pytest.raises(RequestError) as refused:
        read({"type": "web_search"}, tool_choice={"type": "web_search"})
    assert refused.value.param == "tool_choice.type" and "web_search" in refused.value.message
    assert read({"type": "web_search"}, {"type": "mcp"}).ignored == ("tools[0]", "tools[1]")


def chat(**body: Any) -> CheckedBody:
    whole = {"messages": [{"role": "user", "content": "hi"}]} | body
    return pack(openai_chat, openai_chat.read(whole))  # type: ignore[arg-type]


def test_chat_takes_custom_tools_and_skips_those_of_other_types() -> None:
    own = {"name": "sql", "format": {"type": "grammar", "grammar": grammar("lark", RECURSIVE)}}
    tools = [{"type": "web_search"}, {"type": "custom", "custom": own}]
    checked = chat(tools=tools, tool_choice={"type": "custom", "custom": {"name": "sql"}})
    assert checked.ignored == ("tools[0]", "tools[1].custom.format")
    assert checked.fields["tool_kinds"] == {"sql": "custom"}
    allowed = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "sql"}}]}
    chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    with pytest.raises(RequestError) as refused:
        chat(tools=[{"type": "custom", "custom": {"name": "?"}}])
    assert refused.value.param == "tools[0].custom.name"
