"""Parses calls that can only be parsed when they are complete."""

from collections.abc import Callable

from headrace.text.tool_formats.format import Call, CallDelta
from headrace.text.tool_formats.values import deltas_of

# How many of the markers `end` may turn out not to end the calls. Each try parses the whole text,
# so the number limits the time if an answer repeats the marker.
_MAX_TRIES = 32


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
        self._num_tries = 0

    def feed(self, text: str) -> list[CallDelta]:
        self._text += text
        return self._find_calls(is_last=False) if self._end else []

    def flush(self) -> list[CallDelta]:
        return self._find_calls(is_last=True) if self.rest is None else []

    def _find_calls(self, is_last: bool) -> list[CallDelta]:
        while (index := self._next_end()) >= 0:
            self._at = index + len(self._end)
            self._num_tries += 1
            body = self._text[:index]
            if calls := self._calls_in(body):
                return self._found(calls, self._text[self._at :])
            begin, end = (body.rfind(marker) for marker in self._value)
            if begin <= end:
                return self._found([], self._text)
        if not is_last:
            return []
        calls = self._calls_in(self._text)
        return self._found(calls, "" if calls else self._text)

    def _next_end(self) -> int:
        is_tried = self._end and self._num_tries < _MAX_TRIES
        return self._text.find(self._end, self._at) if is_tried else -1

    def _calls_in(self, body: str) -> list[CallDelta]:
        try:
            return [delta for call in self._parse(body) or () for delta in deltas_of(call)]
        # Values that nest too deeply, or that JSON cannot represent.
        except (ValueError, RecursionError):
            return []

    def _found(self, calls: list[CallDelta], rest: str) -> list[CallDelta]:
        self.rest = rest
        return calls
