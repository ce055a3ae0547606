"""Tests structured outputs of headrace-mini at temperature 1.

`make test-structure` runs 500 schemas; here are the first few.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headrace import LLM, RequestFailed
from tests.schemas import Schema, bounded, endless

NUM_SCHEMAS = int(os.environ.get("SCHEMAS", "10"))
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.load("headrace-mini", threads=1) as loaded:
        yield loaded


def by_schema(schema: Schema, **fields: Any) -> dict[str, Any]:
    described = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": described}, **fields}


def test_every_answer_validates_or_ends_by_length(llm: LLM) -> None:
    ends: dict[str, int] = {"stop": 0, "length": 0}

    @settings(
        max_examples=NUM_SCHEMAS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.booleans(), st.integers(0, 1 << 40), st.data())
    def check(is_bounded: bool, seed: int, data: st.DataObject) -> None:
        schema = data.draw(bounded if is_bounded else endless)
        asked = by_schema(schema, n=4, temperature=1, seed=seed, max_tokens=400)
        for choice in llm.chat("Hi", **asked).choices:
            if is_bounded:
                ends[choice.finish_reason] += 1
            if choice.finish_reason == "stop":
                Draft202012Validator(schema).validate(json.loads(choice.text))

    check()
    print(f"bounded schemas: {ends}")
    assert ends["length"] <= 0.1 * ends["stop"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"grammar": 'root ::= "x" [0-9]{2}'}, "x[0-9]{2}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"json_schema": {"const": 7}}, "7"),
        ({"guided_json": '{"type": "null"}'}, "null"),
    ],
)
def test_every_field_constrains(llm: LLM, fields: dict[str, Any], pattern: str) -> None:

    for choice in llm.chat("Hi", n=4, temperature=1, seed=1, **fields).choices:
        assert re.fullmatch(pattern, choice.text), choice.text


def test_a_complete_answer_ends_despite_min_tokens_and_ignore_eos(llm: LLM) -> None:
    asked = {"ignore_eos": True, "min_tokens": 40, "max_tokens": 50, "temperature": 0}
    answer = llm.chat("Hi", guided_choice=["yes"], **asked)
    assert (answer.text, answer.finish_reason) == ("yes", "stop")


def test_text_completions_take_the_same_fields(llm: LLM) -> None:
    text = llm.generate("One, two,", guided_regex=" (three|four)", temperature=0).text
    assert text in (" three", " four")


def test_a_forced_tool_is_called(llm: LLM) -> None:
    def call(choice: Any) -> Any:
        return llm.chat("Hi", tools=TOOLS, tool_choice=choice, temperature=1, seed=3)

    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        assert call(choice).finish_reason == "tool_calls"


def test_a_forced_call_has_no_arguments_that_its_tool_does_not_declare(llm: LLM) -> None:
    declared = {k: v for k, v in ADD.items() if k not in ("additionalProperties", "required")}
    tool = {"type": "function", "function": {"name": "add", "parameters": declared}}
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    for seed in range(4):
        answer = llm.chat("Hi", tools=[tool], temperature=2, seed=seed, **fields)
        (call,) = answer.choices[0].tool_calls
        assert json.loads(call["function"]["arguments"]).keys() <= {"a"}


def test_a_strict_tool_leaves_the_answer_free(llm: LLM) -> None:
    answer = llm.chat("Hi", tools=TOOLS, temperature=0)
    assert answer.finish_reason == "stop" and answer.text.startswith("Hello")


def test_reasoning_comes_before_the_grammar(llm: LLM) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
    answer = llm.chat("What is 3 + 4?", guided_regex="[0-9]+", **fields)
    assert answer.text.isdigit() and answer.usage["completion_tokens"] > 5


def test_a_cached_prompt_and_a_seed_give_the_same_again(llm: LLM) -> None:
    asked = by_schema(ADD, temperature=1, seed=5)
    assert llm.chat("Hi", **asked).text == llm.chat("Hi", **asked).text


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "path", "word"),
    [
        (by_schema({"properties": {"x": {"not": {}}}}), f"{SCHEMA}.properties.x.not", "not"),
        (by_schema({"anyOf": [{"type": "nul"}]}), f"{SCHEMA}.anyOf[0].type", "nul"),
        (
            by_schema({"type": "object", "minProperties": 2}),
            f"{SCHEMA}.minProperties",
            "above the number of required properties",
        ),
        (
            by_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            f"{SCHEMA}.oneOf",
            "use anyOf",
        ),
        (
            by_schema({"items": {"$ref": "#/$defs/q"}, "$defs": {"q": {"uniqueItems": True}}}),
            f"{SCHEMA}.$defs.q.uniqueItems",
            "uniqueItems",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"grammar": "root ::= ("}, "grammar", "GBNF"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "exclude"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "force"),
        (by_schema({"enum": ["x" * 300_000]}), SCHEMA, "262144"),
    ],
)
def test_an_unenforceable_schema_is_refused_by_its_path(
    llm: LLM, fields: dict[str, Any], path: str, word: str
) -> None:
    with pytest.raises(RequestFailed) as refused:
        llm.chat("Hi", **fields)
    assert refused.value.param == path and word in str(refused.value)


def test_an_invalid_schema_of_a_strict_tool_is_named(llm: LLM) -> None:
    bad = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"not": {}}}}}
    with pytest.raises(RequestFailed) as refused:
        llm.chat("Hi", tools=[{"type": "function", "function": bad}])
    assert refused.value.param == "tools[0].function.parameters.properties.x.not"
    bad["strict"] = False
    forced = {"type": "function", "function": {"name": "f"}}
    tools = [{"type": "function", "function": bad}]
    answer = llm.chat("Hi", tools=tools, tool_choice=forced, temperature=0, max_tokens=9)
    assert answer.finish_reason in ("tool_calls", "length")


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"items": {"propertyNames": {}}},
        {"not": False, "properties": {"not": {"type": "null"}}},
    ],
)
def test_a_keyword_without_effect_is_accepted(llm: LLM, idle: Schema) -> None:
    schema = {"const": [1], **idle}
    assert json.loads(llm.chat("Hi", **by_schema(schema)).text) == [1]
