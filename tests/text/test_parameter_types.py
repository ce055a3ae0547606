"""Tests parameter types, and arguments in formats that write strings without quotes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headrace.protocols.openai import chat as openai_chat
from headrace.text.output_splitter import make_splitting
from headrace.text.parameter_types import parameter_types
from headrace.text.tool_formats.values import value_of
from headrace_common.request import Channels
from tests.gateway.builders import FakeModel, parsed
from tests.text.test_output_splitter import joined

STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DEFINED: dict[str, Any] = {
    "text": STRING,
    "maybe": {"anyOf": [{"$ref": "#/$defs/text"}, NULL]},
    "tree": {"anyOf": [STRING, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
    "round": {"anyOf": [STRING, {"$ref": "#/$defs/round"}]},
}
CASES: list[tuple[Any, str, Any]] = [
    ({"anyOf": [STRING, NULL]}, "12", "12"),
    ({"anyOf": [STRING, NULL]}, "true", "true"),
    ({"anyOf": [STRING, NULL]}, '{"a": 1}', '{"a": 1}'),
    ({"anyOf": [STRING, NULL]}, '"12"', '"12"'),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "None", None),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string"]}, "12", "12"),
    (STRING, "null", "null"),
    (STRING | {"nullable": True}, "null", None),
    (STRING | {"nullable": True}, "12", "12"),
    ({"type": ["string", "integer"]}, "12", 12),
    ({"type": ["string", "integer"]}, "1.0", "1.0"),
    ({"type": ["string", "integer"]}, "007", "007"),
    ({"type": ["string", "integer"]}, "null", "null"),
    ({"type": ["string", "number"]}, "12", 12),
    ({"type": ["string", "number"]}, "1.5", 1.5),
    ({"oneOf": [STRING, {"type": "array", "items": STRING}]}, '["12"]', ["12"]),
    ({"oneOf": [STRING, {"type": "array", "items": STRING}]}, "12", "12"),
    ({"allOf": [STRING, {"minLength": 1}]}, "12", "12"),
    ({"allOf": [{"type": ["string", "integer"]}, {"anyOf": [STRING, NULL]}]}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["1", None]}, "1", "1"),
    ({"enum": ["1", None]}, "null", None),
    ({"enum": ["auto", 1]}, "1", 1),
    ({"anyOf": [{"const": "1"}, NULL]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"$ref": "#/$defs/text"}, "12", "12"),
    ({"$ref": "#/$defs/maybe"}, "12", "12"),
    ({"$ref": "#/$defs/maybe"}, "null", None),
    ({"$ref": "#/$defs/tree"}, "12", "12"),
    ({"$ref": "#/$defs/round"}, "12", "12"),
    ({"allOf": [{"$ref": "#/$defs/text"}], "default": "x"}, "12", "12"),
    ({"$ref": "#/$defs/missing"}, "12", 12),
    ({"description": "anything"}, "12", 12),
    ({"description": "anything"}, '"12"', "12"),
    ({}, "a", "a"),
    (True, "12", 12),
    (INTEGER, "12", 12),
    (INTEGER, "a", "a"),
    ({"anyOf": [INTEGER, NULL]}, "null", None),
    ({"type": "boolean"}, "True", True),
]  # fmt: skip
WRITTEN = {
    "qwen3-coder": "<function=f><parameter=x>\n{}\n</parameter></function>",
    "glm": "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>",
}


def argument_of(name: str, parameters: dict[str, Any], text: str) -> Any:
    """Return the argument x of a call in this format, for a request with the tool f."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    channels = parsed(openai_chat, body, FakeModel(tool_format=name)).channels  # type: ignore[arg-type]
    assert channels
    splitter = make_splitting(channels, "", lambda marker: None).splitter
    assert splitter
    ((_, called, arguments),) = joined(splitter, [WRITTEN[name].format(text)])
    assert called == "f"
    return json.loads(arguments)["x"]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("schema, text, expected", CASES)
def test_an_unquoted_argument_gets_a_type_of_its_schema(
    name: str, schema: Any, text: str, expected: Any
) -> None:
    found = argument_of(name, {"properties": {"x": schema}, "$defs": DEFINED}, text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/own", "$defs": {"own": {"properties": {"x": STRING}}}},
        {"allOf": [{"properties": {"y": INTEGER}}, {"properties": {"x": STRING}}]},
        {"oneOf": [{"properties": {"x": STRING}}, {"properties": {"x": NULL}}]},
    ],
)
def test_the_parameters_of_a_tool_may_be_declared_in_parts(parameters: dict[str, Any]) -> None:
    assert argument_of("glm", parameters, "12") == "12"


def test_a_key_of_glm_may_have_white_space_around_it() -> None:
    text = "12</arg_value><arg_key> y </arg_key><arg_value>12"
    properties = {"x": INTEGER, "y": STRING}
    types = {"f": parameter_types({"properties": properties})}
    splitter = make_splitting(Channels("glm", "", types), "", lambda marker: None).splitter
    assert splitter
    ((_, _, arguments),) = joined(splitter, [WRITTEN["glm"].format(text)])
    assert json.loads(arguments) == {"x": 12, "y": "12"}


def test_a_long_chain_of_references_and_one_with_many_paths_are_read() -> None:
    for links in (1, 2):
        below = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * links} for i in range(9_000)}
        root = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": below | {"d9000": STRING}}
        assert parameter_types(root) in ({}, {"x": ("string",)})


SCALARS = st.none() | st.booleans() | st.integers(0, 12) | st.sampled_from(["a", "12", "null", "x"])
NAMES = ("null", "boolean", "integer", "number", "string", "array", "object")
BASES = st.one_of(
    st.sampled_from(
        [{}, True, *({"$ref": f"#/$defs/{name}"} for name in ("text", "maybe", "tree"))]
    ),
    st.fixed_dictionaries({"type": st.sampled_from(NAMES)}),
    st.fixed_dictionaries({"type": st.lists(st.sampled_from(NAMES), min_size=1, unique=True)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(["a", "12", "x"]), min_size=1)}),
    st.fixed_dictionaries({"const": st.sampled_from(["a", "12"])}),
)
SCHEMAS = st.recursive(
    BASES,
    lambda below: st.fixed_dictionaries({"anyOf": st.lists(below, min_size=1, max_size=3)}),
    max_leaves=6,
)
TEXTS = ["a", "12", "1.5", "true", "None", "null", '["a"]', '{"a": 1}', '"a"', "", "x"]


@settings(deadline=None, max_examples=100)
@given(SCHEMAS, st.sampled_from(TEXTS))
def test_an_argument_is_read_as_a_type_that_fits_its_schema(schema: Any, text: str) -> None:
    types = parameter_types({"properties": {"x": schema}, "$defs": DEFINED}).get("x", ())
    is_valid = Draft202012Validator({"allOf": [schema], "$defs": DEFINED}).is_valid
    # JSON's quotes are part of a string.
    readings = [text] if text == '"a"' else [text, value_of(text, ())]
    assert is_valid(value_of(text, types)) or not any(map(is_valid, readings))


KEYWORDS = st.sampled_from(["type", "anyOf", "allOf", "enum", "$ref", "properties", "const", "x"])
JUNK = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYWORDS, below),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(JUNK)
def test_a_parameter_with_an_invalid_schema_may_be_a_string(schema: Any) -> None:
    for names in parameter_types({"properties": {"x": schema}, "allOf": [schema]}).values():
        assert "string" in names and set(names) < set(NAMES)
