"""Structured output and forced calls of a trained model, whose template knows no tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from headrace import LLM

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "is_river": {"type": "boolean"},
    },
    "required": ["name", "year", "is_river"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}}
CITY |= {"required": ["city"], "additionalProperties": False}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "time", "parameters": CITY}},
]


@pytest.fixture(scope="module")
def llm(smollm2_file: Path) -> Iterator[LLM]:
    with LLM.load(str(smollm2_file), threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_follows_its_schema(llm: LLM, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA}}
    answer = llm.chat("Tell me of the Rhine, as JSON.", response_format=wanted, seed=seed)
    validate(json.loads(answer.text), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_is_one_that_its_tool_takes(llm: LLM, choice: Any, seed: int) -> None:
    question = "What is the weather in Paris?"
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = llm.chat(question, seed=seed, max_tokens=200, **asked)
    (call,) = (one["function"] for one in answer.tool_calls)
    assert call["name"] in (["weather", "time"] if choice == "required" else ["time"])
    validate(json.loads(call["arguments"]), CITY)


def test_several_calls_are_each_one_that_its_tool_takes(llm: LLM) -> None:
    question = "What are weather and time in Paris and in Rome?"
    answer = llm.chat(question, tools=TOOLS, tool_choice="required", seed=1, max_tokens=400)
    assert answer.tool_calls
    for call in answer.tool_calls[: -1 if answer.finish_reason == "length" else None]:
        validate(json.loads(call["function"]["arguments"]), CITY)
