"""Tests that every call of the corpus is parsed correctly at any chunk boundaries."""

import json
from collections.abc import Iterable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.tool_formats.table import format_of
from headrace_common.config.settings import ToolFormatName
from headrace_common.pieces import REASONING, TOOL
from tests.text.test_output_splitter import TAGS, joined, pieces_of, splitter_of
from tests.text.tool_calls.corpus import CORPUS, Call, Expected, Thought

CASES = [
    pytest.param(name, text, expected, id=f"{name}: {what} ({number})")
    for name, cases in CORPUS.items()
    for number, (what, text, expected) in enumerate(cases)
]


def found(name: str, parts: Iterable[str]) -> Expected:
    pieces: Expected = []
    for channel, called, text in joined(splitter_of(name), list(parts)):
        assert (called + text).encode(), "half a surrogate pair cannot be sent"
        if channel == TOOL:
            try:
                pieces.append(Call(called, json.loads(text)))
            except ValueError:
                pieces.append(Call(called, text))
        else:
            pieces.append(Thought(text) if channel == REASONING else text)
    return pieces


def test_every_format_has_its_cases() -> None:
    assert set(CORPUS) == set(get_args(ToolFormatName))


@pytest.mark.parametrize("name, text, expected", CASES)
def test_every_call_of_the_corpus_is_parsed_at_any_chunk_boundaries(
    name: str, text: str, expected: Expected
) -> None:
    assert found(name, [text]) == expected
    assert found(name, text) == expected, "letter by letter"
    for place in range(1, len(text)):
        assert found(name, [text[:place], text[place:]]) == expected, place


SCRAPS = [
    *('{"name": "f", "arguments": {', '"x": ', "'", '"', "\\", ",", "{", "}", "[", "]", ":", ";"),
    *("True", "Tr", "1", " ", "\n", "```", "```json", "f", "(x=", ")", "<", "word", *TAGS),
    *("<parameter=x>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "</tool_call>", "[ARGS]", "<|python_end|>", "**", '"""', "f(", "x=", "1e999"),
    *(r"\ud800", "NaN", "call:f{", '"name": "f"'),
]


@pytest.mark.parametrize("name", CORPUS)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), cuts=st.sets(st.integers(1, 150)))
def test_random_call_fragments_do_not_depend_on_chunk_boundaries(
    name: str, data: st.DataObject, cuts: set[int]
) -> None:
    made = format_of(name)
    scraps = [*made.starts, *made.ends, *made.starts, *SCRAPS]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=16)))
    assert found(name, pieces_of(text, cuts)) == found(name, [text])
