"""Tests the header that names ignored fields by their path."""

from typing import Any

import pytest

from headrace.protocols.fields.unknown import header_of, unknown_within
from headrace_common.request import Route

FUNCTION = {"name": "f", "parameters": {"x-own": 1}, "returns": {}}


@pytest.mark.parametrize(
    ("route", "body", "paths"),
    [
        (
            "/v1/chat/completions",
            {
                "response_format": {"type": "text", "grammar": "x"},
                "stream_options": {"include_usage": True, "x": 1, "y": None},
                "tools": [{"type": "function", "function": FUNCTION}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "", "z": 1}]}],
            },
            [
                "response_format.grammar",
                "stream_options.x",
                "tools[0].function.returns",
                "messages[0].content[0].z",
            ],
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "text", "x": 1}}, "input": [{"role": "user", "x": 1}]},
            ["text.format.x", "input[0].x"],
        ),
        (
            "/v1/messages",
            {
                "tools": [{"name": "f", "input_schema": {}, "defer_loading": True}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}],
            },
            ["tools[0].defer_loading", "messages[0].content[0].x"],
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "", "x": 1}]}, ["messages[0].x"]),
        (
            "/v1/chat/completions",
            {"messages": [{"tool_calls": [{"type": "custom", "custom": {"input": "", "x": 1}}]}]},
            ["messages[0].tool_calls[0].custom.x"],
        ),
        ("/v1/chat/completions", {"tools": 3, "messages": [3, {"content": 3}]}, []),
    ],
)
def test_an_unknown_field_is_named(route: Route, body: dict[str, Any], paths: list[str]) -> None:
    assert list(unknown_within(body, route)) == paths


def test_a_header_stays_small_and_plain() -> None:
    names = header_of(f"tools[{i}].{'日' * 50}\r\n, x" for i in range(1000))
    whole = ", ".join(names)
    assert len(whole) < 2048 and names[-1] == "..."
    assert whole.isascii() and whole.isprintable()
