"""Calls whose arguments stand as JSON in the text: they go out as they come, slips mended."""

import json
import re

from headrace.text.tool_formats.format import CallDelta
from headrace.text.tool_formats.json_scan import ObjectScan

_NAME = r'"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})+")'
_ARGUMENTS = r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
OBJECT = (
    r"\s*(?:```(?:json)?)?[\s\[,;]*"
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?{_NAME}{_ARGUMENTS}'
)
"""The opening of a call that is an object with name and arguments, fenced or in an array or not."""
_BETWEEN = " \n\r\t,;"  # calls
_BEFORE = _BETWEEN + "["


class JsonCalls:
    """Calls whose arguments are a JSON object in the text: opening, arguments, closing; again."""

    def __init__(
        self, opening: str, closing: tuple[str, ...], again: str = "{", has_header: bool = False
    ) -> None:
        """`opening` matches up to the arguments; its one group that matches is the name.

        `closing`: literals that may follow the arguments, in this order, white space between them.
        `again` begins another call, if the last of them has not come. `has_header`: words may
        precede the first brace.
        """
        self._has_header = has_header
        self.rest: str | None = None
        self._opening = re.compile(opening)
        self._closing = closing
        self._again = again
        self._text = ""
        self._at = 0  # all before it was given out, or is of no more use
        self._has_name = False
        self._scan: ObjectScan | None = None  # while in arguments
        # a call in another form of object, as far as it has been scanned, and up to where
        self._object: tuple[ObjectScan, list[str]] | None = None
        self._scanned = 0

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
            left = self._scan.flush() if self._scan else ""
            deltas += [CallDelta("", left)] if left else []
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
            self._at, self._has_name, self._scan = found.end(), True, ObjectScan()
            self._object = None
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
        """A call in another form of object; None while it is not whole."""
        start = self._text.find("{", self._at)
        header = self._text[self._at : start if start >= 0 else None].strip(_BEFORE)
        is_fence = header in ("", "```", "```json") if start >= 0 else "```json".startswith(header)
        if not is_fence and (start >= 0 or not self._has_header):
            return None, self._at
        if start < 0:
            return (None, self._at) if is_last else None
        if self._object is None:
            self._object, self._scanned = (ObjectScan(), []), start
        scan, mended = self._object
        self._scanned, piece = scan.feed(self._text, self._scanned)
        mended.append(piece)
        if not scan.is_over:
            return (None, self._at) if is_last else None
        self._object = None
        call = _call_in("".join(mended))
        # its last brace is the first literal of the closing
        return (call, self._scanned - 1) if call else (None, self._at)

    def _take_arguments(self, deltas: list[CallDelta]) -> bool:
        assert self._scan is not None
        self._at, arguments = self._scan.feed(self._text, self._at)
        if arguments:
            deltas.append(CallDelta("", arguments))
        if self._scan.is_over:
            self._scan = None
            return True
        return False

    def _take_closing(self, is_last: bool) -> bool:
        at, has_ended = self._at, False
        for literal in self._closing:
            place = _skip(self._text, at, "," if literal == "}" else "")
            left = self._text[place : place + len(literal)]
            has_ended = left == literal
            if has_ended:
                at = place + len(literal)
            elif literal.startswith(left) and not is_last:
                return False
        at = _skip(self._text, at)
        tail = self._text[at:].lstrip(_BETWEEN)
        if self._again and not has_ended:
            if tail.startswith(self._again):
                self._at, self._has_name = at, False
                return True
            if not is_last and self._again.startswith(tail):
                return False
        self.rest = self._text[at:]
        return False


def _call_in(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object with keys in any order; its arguments may be a string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value.get("name") or value.get("function"), value.get("arguments")
    if arguments is None:
        arguments = value.get("parameters")
    if isinstance(arguments, str):
        arguments = _mended(arguments.strip()) if arguments.strip() else "{}"
    else:
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    is_name = isinstance(name, str) and name and name.isprintable()
    return (name, arguments) if is_name and arguments.startswith("{") else None


def _mended(text: str) -> str:
    """An object that is the whole text; "" if it is something else."""
    scan = ObjectScan()
    end, mended = scan.feed(text, 0)
    return mended if scan.is_over and end == len(text) else ""


def _skip(text: str, at: int, also: str = "") -> int:
    """The first place from there on that is neither white space nor one of `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at
