"""Calls whose arguments stand as JSON in the text: they go out as they come."""

import json
import re

from headrace.text.tool_formats.format import CallDelta

_NAME = r'"name"\s*:\s*("(?:[^"\\]|\\.)*")'
_ARGUMENTS = r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
OBJECT = rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?{_NAME}{_ARGUMENTS}'
"""The opening of a call that is an object with name and arguments."""


class JsonCalls:
    """Calls whose arguments are a JSON object in the text: opening, arguments, closing; again."""

    def __init__(
        self, opening: str, closing: tuple[str, ...], again: str = "", has_header: bool = False
    ) -> None:
        """`opening` matches up to the arguments; its one group that matches is the name.

        `closing`: literals that may follow the arguments, in this order, white space between them.
        `again` begins another call. `has_header`: words may precede the first brace.
        """
        self._has_header = has_header
        self.rest: str | None = None
        self._opening = re.compile(opening)
        self._closing = closing
        self._again = again
        self._text = ""
        self._at = 0  # all before it was given out, or is of no more use
        self._has_name = False
        self._scan: _ObjectScan | None = None  # while in arguments

    def feed(self, text: str) -> list[CallDelta]:
        if self.rest is not None:
            self.rest += text
            return []
        self._text += text
        deltas: list[CallDelta] = []
        while self._advance(deltas, is_last=False):
            pass
        return deltas

    def flush(self) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while self.rest is None and self._advance(deltas, is_last=True):
            pass
        if self.rest is None:
            self.rest = ""
        return deltas

    def _advance(self, deltas: list[CallDelta], is_last: bool) -> bool:
        """Takes one part off the text; False if more of it is needed."""
        if self._scan is not None:
            return self._take_arguments(deltas)
        if self._has_name:
            return self._take_closing(is_last)
        return self._take_opening(deltas, is_last)

    def _take_opening(self, deltas: list[CallDelta], is_last: bool) -> bool:
        found = self._opening.match(self._text, self._at)
        if found:
            name = next(filter(None, found.groups()))
            deltas.append(CallDelta(json.loads(name) if name.startswith('"') else name, ""))
            self._at, self._has_name, self._scan = found.end(), True, _ObjectScan()
            return True
        whole = self._whole_object(is_last)
        if whole is None:
            return False
        call, end = whole
        if call is None:
            self.rest = self._text[self._at :]
            return False
        deltas += [CallDelta(call[0], ""), CallDelta("", call[1])]
        self._at, self._has_name = end, True
        return True

    def _whole_object(self, is_last: bool) -> tuple[tuple[str, str] | None, int] | None:
        """A call whose keys stand in another order; None while it is not whole."""
        start = self._text.find("{", self._at)
        header = self._text[self._at : start if start >= 0 else None].strip(" \n\r\t[,")
        if header and (start >= 0 or not self._has_header):
            return None, self._at
        if start < 0:
            return (None, self._at) if is_last else None
        scan = _ObjectScan()
        end = scan.feed(self._text, start)
        if not scan.is_over:
            return (None, self._at) if is_last else None
        try:
            value = json.loads(self._text[start:end])
        except ValueError:
            return None, self._at
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = value.get("name")
        if not isinstance(name, str) or not arguments.startswith("{"):
            return None, self._at
        return (name, arguments), end - 1  # its last brace is the first literal of the closing

    def _take_arguments(self, deltas: list[CallDelta]) -> bool:
        assert self._scan is not None
        end = self._scan.feed(self._text, self._at)
        if end > self._at:
            deltas.append(CallDelta("", self._text[self._at : end]))
            self._at = end
        if self._scan.is_over:
            self._scan = None
            return True
        return False

    def _take_closing(self, is_last: bool) -> bool:
        at = self._at
        for literal in self._closing:
            at = _skip_space(self._text, at)
            left = self._text[at : at + len(literal)]
            if left == literal:
                at += len(literal)
            elif literal.startswith(left) and not is_last:
                return False
        if not self._again:
            self.rest = self._text[at:]
            return False
        tail = self._text[at:].lstrip()
        if tail.startswith(self._again):
            self._at, self._has_name = at, False
            return True
        if not is_last and self._again.startswith(tail):
            return False
        self.rest = tail.removeprefix("]")
        return False


class _ObjectScan:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str, start: int) -> int:
        """How far the object goes in `text`, counted from its beginning."""
        for place in range(start, len(text)):
            character = text[place]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
