"""Tests that parsing an incomplete or damaged call takes linear time."""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.text.tool_formats import json_calls
from headrace.text.tool_formats.format import CallDelta
from headrace.text.tool_formats.table import format_of
from tests.text.test_output_splitter import splitter_of

LIMIT_S = 3.0  # generous; without a bound these take minutes


@pytest.fixture
def limited() -> Iterator[None]:
    started = time.thread_time()
    yield
    assert time.thread_time() - started < LIMIT_S


def parsed(name: str, *parts: str) -> list[CallDelta]:
    calls = format_of(name).make(lambda name, key: ())
    found = [delta for part in parts for delta in calls.feed(part)]
    return found + (calls.flush() if calls.rest is None else [])


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    "text",
    [
        "f" + "<arg_key>a</arg_key><arg_value>" * 1000,
        "f" + "<arg_key>" * 10_000,
        "f" + " " * 20_000 + "<arg_key>",
        "f<arg_key>a</arg_key><arg_value>" + "</tool_call>" * 20_000,
    ],
    ids=["no value ends", "no key ends", "spaces", "ends"],
)
def test_a_glm_call_that_never_ends_is_given_up_early(text: str) -> None:
    parsed("glm", text + "</tool_call>")


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    "text",
    [
        "a:<|" * 10_000,
        'a:<|"|>' * 5_001,
        'a:"' * 10_001,
        "{a:" * 10_000,
        "a" * 50_000,
        " " * 50_000,
    ],
    ids=["no quotes", "quotes", "no text ends", "deep", "a word", "spaces"],
)
def test_a_damaged_gemma_4_call_is_given_up_early(text: str) -> None:
    parsed("gemma4", "call:f{" + text + "<tool_call|>")


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    "text",
    [
        "x='" * 20_001,
        '"""' * 20_001,
        "\\" * 50_001,
        "x=[" * 20_000,
        "x=" * 20_000,
        "a" * 50_000,
        " " * 50_000,
        ",\n" * 20_000,
        "x='</function_calls>" * 5_000,
    ],
    ids=["quotes", "triples", "escapes", "deep", "keys", "a word", "spaces", "commas", "ends"],
)
@pytest.mark.parametrize("start", ["", "f(", "f(x='"])
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_a_damaged_olmo_3_call_is_given_up_early(start: str, text: str, size: int) -> None:
    whole = start + text + ")</function_calls>"
    parsed("olmo3", *(whole[at : at + size] for at in range(0, len(whole), size)))


@pytest.mark.usefixtures("limited")
def test_a_call_whose_name_comes_last_is_scanned_once() -> None:
    calls = json_calls.JsonCalls(json_calls.OBJECT, ("}",))
    deltas = calls.feed('{"arguments": {"a": "')
    for _ in range(10_000):
        deltas += calls.feed(" word")
    deltas += calls.feed('"}, "name": "f"}')
    assert deltas[0].name == "f" and deltas[1].arguments.count("word") == 10_000


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("text", ["\n", "[", '{"name": "' + "a" * 3_000, '{"name"' + " " * 3_000])
def test_a_start_of_a_call_that_goes_on_for_ever_is_matched_once(text: str) -> None:
    parsed("hermes", text, *"\n" * 3_000)


@pytest.mark.usefixtures("limited")
def test_a_qwen_call_without_end_tags_is_parsed_quickly() -> None:
    parsed("qwen3-coder", "<function=f>" + "<parameter=a>\n" * 5_000 + "</tool_call>")


@pytest.mark.usefixtures("limited")
def test_an_end_of_a_call_that_is_repeated_is_tried_a_few_times() -> None:
    parsed("qwen3-coder", "<function=f>\n<parameter=a>\n" + "</tool_call>" * 20_000)


UNITS = {
    "hermes": "<tool_call>{",
    "mistral": "[TOOL_CALLS]{",
    "phi4": "<|tool_call|>{",
    "llama3": "<|python_tag|>{",
    "deepseek": "<｜tool▁call▁begin｜>f{",
    "qwen3-coder": "<function=f><parameter=x>",
    "glm": "<tool_call>f<arg_key>",
    "gemma4": '<|tool_call>call:f{x:<|"|>',
    "olmo3": "<function_calls>f(x=",
    "pythonic": "<|python_start|>[f(x=",
}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("name", UNITS)
def test_a_marker_that_is_repeated_for_ever_is_text(name: str) -> None:
    text = "a" + UNITS[name] * 4_000
    splitter = splitter_of(name)
    pieces = splitter.feed(text) + splitter.flush()
    assert "".join(piece.text for piece in pieces if not piece.name) == text or name == "deepseek"


NESTED: dict[str, Callable[[str], str]] = {
    "gemma4": lambda value: f"call:f{{x:{value}}}",
    "olmo3": lambda value: f"f(x={value})",
    "glm": lambda value: f"f<arg_key>x</arg_key><arg_value>{value}</arg_value>",
    "qwen3-coder": lambda value: f"<function=f><parameter=x>{value}</parameter></function>",
    "pythonic": lambda value: f"[f(x={value})]",
    "hermes": lambda value: f'{{"arguments": {{"x": {value}}}, "name": "f"}}',
}


@pytest.mark.parametrize("name", NESTED)
def test_values_that_nest_too_deeply_are_text_at_any_depth(name: str) -> None:
    for depth in (*range(60, 1_000, 3), 5_000):
        for delta in parsed(name, NESTED[name]("[" * depth + "]" * depth)):
            assert delta.name == "f" or isinstance(json.loads(delta.arguments), dict)
