"""Calls that can be parsed only when they are whole."""

import json
from collections.abc import Callable
from typing import Any

from headrace.text.tool_formats.format import Call, CallDelta


class WholeCalls:
    """Calls that are parsed once they are whole: up to `end`, or to the end of the answer."""

    def __init__(self, end: str, parse: Callable[[str], list[Call] | None]) -> None:
        self.rest: str | None = None
        self._end = end
        self._parse = parse
        self._text = ""

    def feed(self, text: str) -> list[CallDelta]:
        self._text += text
        if self.rest is not None or not self._end:
            return []
        body, end, rest = self._text.partition(self._end)
        return self._calls(body, end + rest, rest) if end else []

    def flush(self) -> list[CallDelta]:
        return self._calls(self._text, "", "") if self.rest is None else []

    def _calls(self, body: str, tail: str, rest: str) -> list[CallDelta]:
        calls = self._parse(body)
        if not calls:
            self.rest = body + tail
            return []
        self.rest = rest
        return [
            delta
            for name, arguments in calls
            for delta in (
                CallDelta(name, ""),
                CallDelta("", json.dumps(arguments, ensure_ascii=False)),
            )
        ]


def value_of(text: str, is_text: bool) -> Any:
    """An argument that stands in tags: JSON, unless its tool declares a string."""
    if is_text:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
