"""Tests answers that follow the schemas of the JSON Schema test suite, draft 2020-12.

`make test-structure` gets the suite and says where it lies; without it there is nothing to run.
"""

import json
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace import LLM, RequestFailed

SUITE = os.environ.get("SCHEMA_SUITE", "")
pytestmark = pytest.mark.skipif(not SUITE, reason="run by make test-structure")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.load("headrace-mini", threads=1) as loaded:
        yield loaded


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas that are objects and do not refer to other documents."""
    for path in sorted(Path(SUITE).glob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict) and "localhost:1234" not in json.dumps(schema):
                yield f"{path.stem}: {group['description']}", schema


def faults(schema: dict[str, Any], text: str) -> list[str]:
    """Check with exact decimals: 5.3 is a multiple of 0.0001, but not in floats."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    value = json.loads(text, parse_float=Decimal)
    return [error.message for error in Draft202012Validator(exact).iter_errors(value)]


def test_answers_follow_accepted_schemas_and_others_are_refused_by_path(llm: LLM) -> None:
    refused: dict[str, str] = {}
    ends = {"stop": 0, "length": 0}
    wrong: list[str] = []
    for seed, (name, schema) in enumerate(schemas()):
        described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        asked = {"n": 4, "temperature": 1, "seed": seed, "max_tokens": 200}
        try:
            answer = llm.chat("Hi", response_format=described, **asked)
        except RequestFailed as error:
            refused[name] = str(error)
            if "response_format.json_schema.schema" not in str(error):
                wrong.append(f"{name}: refused without a path: {error}")
            continue
        for choice in answer.choices:
            ends[choice.finish_reason] += 1
            if choice.finish_reason == "stop":
                wrong += [f"{name}: {choice.text!r}: {it}" for it in faults(schema, choice.text)]
    print(f"{len(refused)} refused, answers {ends}")
    for name, message in refused.items():
        print(f"  {name}: {message}")
    assert ends["stop"]
    assert not wrong, "\n".join(wrong)
