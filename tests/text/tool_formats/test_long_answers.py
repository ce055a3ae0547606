"""Answers that are no calls, or not yet, cost time in proportion to their length."""

import time

import pytest

from headrace.text.tool_formats import gemma4, glm, json_calls, qwen3_coder

LIMIT_S = 3.0  # generous; without a bound these take minutes


@pytest.mark.parametrize(
    "text",
    [
        "f" + "<arg_key>a</arg_key><arg_value>" * 1000,
        "f" + "<arg_key>" * 10_000,
        "f" + " " * 20_000 + "<arg_key>",
    ],
    ids=["no value ends", "no key ends", "spaces"],
)
def test_a_call_of_glm_that_never_ends_is_given_up_soon(text: str) -> None:
    started = time.thread_time()
    calls = glm.FORMAT.make(lambda name, key: False)
    calls.feed(text + "</tool_call>")
    calls.flush()
    assert time.thread_time() - started < LIMIT_S


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
def test_a_call_of_gemma_4_that_is_damaged_is_given_up_soon(text: str) -> None:
    started = time.thread_time()
    calls = gemma4.FORMAT.make(lambda name, key: False)
    calls.feed("call:f{" + text + "<tool_call|>")
    calls.flush()
    assert time.thread_time() - started < LIMIT_S


def test_a_call_whose_name_comes_last_is_scanned_once() -> None:
    calls = json_calls.JsonCalls(json_calls.OBJECT, ("}",))
    started = time.thread_time()
    deltas = calls.feed('{"arguments": {"a": "')
    for _ in range(10_000):
        deltas += calls.feed(" word")
    deltas += calls.feed('"}, "name": "f"}')
    assert time.thread_time() - started < LIMIT_S
    assert deltas[0].name == "f" and deltas[1].arguments.count("word") == 10_000


def test_a_call_of_qwen_that_forgets_its_ends_is_parsed_soon() -> None:
    started = time.thread_time()
    calls = qwen3_coder.FORMAT.make(lambda name, key: False)
    calls.feed("<function=f>" + "<parameter=a>\n" * 5_000 + "</tool_call>")
    assert time.thread_time() - started < LIMIT_S
