"""Parses calls that can only be parsed when they are complete."""

import json
from collections.abc import Callable
from typing import Any

from headrace.text.tool_formats.format import Call, CallDelta


class WholeCalls:
    """Parses calls when they are complete: at the marker `end`, or at the end of the answer."""

    def __init__(
        self,
        end: str,
        parse: Callable[[str], list[Call] | None],
        value: tuple[str, str] = ("", ""),
    ) -> None:
        """`value` contains the markers around an argument; an `end` inside an argument is text."""
        self.rest: str | None = None
        self._end = end
        self._parse = parse
        self._value = value
        self._text = ""
        # Each `end` before this index turned out not to end the calls.
        self._at = 0

    def feed(self, text: str) -> list[CallDelta]:
        self._text += text
        return self._find_calls(is_last=False) if self._end else []

    def flush(self) -> list[CallDelta]:
        return self._find_calls(is_last=True) if self.rest is None else []

    def _find_calls(self, is_last: bool) -> list[CallDelta]:
        while (index := self._text.find(self._end, self._at) if self._end else -1) >= 0:
            self._at = index + len(self._end)
            body = self._text[:index]
            if calls := self._parse(body):
                return self._found(calls, self._text[self._at :])
            begin, end = (body.rfind(marker) for marker in self._value)
            if begin <= end:
                return self._found([], self._text)
        if not is_last:
            return []
        calls = self._parse(self._text)
        return self._found(calls or [], "" if calls else self._text)

    def _found(self, calls: list[Call], rest: str) -> list[CallDelta]:
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
    """Parse an argument that stood between tags: as JSON, unless the tool declares a string."""
    if is_text:
        return text
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# Models may write the literals of Python.
_LITERALS = {"True": True, "False": False, "None": None}
