"""Calls that can be parsed only when they are whole."""

import json
from collections.abc import Callable
from typing import Any

from headrace.text.tool_formats.format import Call, CallDelta


class WholeCalls:
    """Calls that are parsed once they are whole: up to `end`, or to the end of the answer."""

    def __init__(
        self,
        end: str,
        parse: Callable[[str], list[Call] | None],
        value: tuple[str, str] = ("", ""),
    ) -> None:
        """`value`: markers around an argument, in which `end` is text."""
        self.rest: str | None = None
        self._end = end
        self._parse = parse
        self._value = value
        self._text = ""
        self._at = 0  # no end that counts lies before

    def feed(self, text: str) -> list[CallDelta]:
        self._text += text
        return self._look(is_last=False) if self._end else []

    def flush(self) -> list[CallDelta]:
        return self._look(is_last=True) if self.rest is None else []

    def _look(self, is_last: bool) -> list[CallDelta]:
        while (place := self._text.find(self._end, self._at) if self._end else -1) >= 0:
            self._at = place + len(self._end)
            body = self._text[:place]
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
    """An argument that stands in tags: JSON, unless its tool declares a string."""
    if is_text:
        return text
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_LITERALS = {"True": True, "False": False, "None": None}  # as Python writes them
