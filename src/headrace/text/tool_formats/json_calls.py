"""Parses calls with JSON arguments; repairs mistakes, and returns the arguments piece by piece."""

import json
import re
from typing import Any

from headrace.text.tool_formats.format import CallDelta
from headrace.text.tool_formats.json_scan import ObjectScan
from headrace.text.tool_formats.values import as_json, is_unicode, read_json

# The pattern is matched again with each piece of text, so no part of it may be matched twice.
_NAME = r'"name"\s*+:\s*+("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){1,256}+")'
_ARGUMENTS = r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
OBJECT = (
    r"\s*+(?:```(?:json)?)?+[\s\[,;]*+"
    rf'\{{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?{_NAME}{_ARGUMENTS}'
)
"""Matches the start of a call that is a JSON object, perhaps in a code fence or an array."""
# Characters that may separate two calls.
_BETWEEN = " \n\r\t,;"
_BEFORE = _BETWEEN + "["


class JsonCalls:
    """Parses calls that consist of an opening, a JSON object with the arguments, and a closing."""

    def __init__(
        self, opening: str, closing: tuple[str, ...], again: str = "{", has_header: bool = False
    ) -> None:
        """Set the patterns of the format.

        `opening` matches the text up to the arguments. Exactly one group of `opening` matches,
        and this group is the name. `closing` contains the literals that can follow the arguments,
        in order, with white space between the literals. `again` is the text that begins another
        call. Another call is only possible if the last literal of `closing` was missing. If
        `has_header` is set, text may precede the first brace.
        """
        self._has_header = has_header
        self.rest: str | None = None
        self._opening = re.compile(opening)
        self._closing = closing
        self._again = again
        self._text = ""
        # All text before this index has been processed.
        self._at = 0
        self._has_name = False
        # Set while the text is inside a call's arguments.
        self._scan: ObjectScan | None = None
        # The scan of a call that does not match `opening`, and the call's repaired text so far.
        # The scan continues at the index `_scanned`.
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
        """Process the next part of the text; return False if more text is needed."""
        if self._scan is not None:
            return self._take_arguments(deltas)
        if self._has_name:
            return self._take_closing(is_last)
        return self._take_opening(deltas, is_last)

    def _take_opening(self, deltas: list[CallDelta], is_last: bool) -> bool:
        found = self._opening.match(self._text, self._at)
        if found and (name := _decoded(next(filter(None, found.groups())))):
            deltas.append(CallDelta(name, ""))
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
        """Parse a call that does not match `opening`, such as one with its keys in another order.

        Returns None while more text is needed. Otherwise returns the call and the index where
        parsing continues. If the text is not a call, the first value is None.
        """
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
        # The object's last brace is also the first literal of the closing.
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
            index = _skip(self._text, at, "," if literal == "}" else "")
            left = self._text[index : index + len(literal)]
            has_ended = left == literal
            if has_ended:
                at = index + len(literal)
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
    """Return the name and the arguments of a call with any order of keys.

    In `text`, the arguments can be an object or a string.
    """
    try:
        return _call_of(read_json(text))
    except (ValueError, RecursionError):
        return None


def _call_of(value: dict[str, Any]) -> tuple[str, str] | None:
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name: Any = value.get("name") or value.get("function")
    arguments = value.get("arguments")
    if arguments is None:
        arguments = value.get("parameters")
    if isinstance(arguments, str):
        arguments = _mended(arguments.strip()) if arguments.strip() else "{}"
    else:
        arguments = as_json(arguments or {})
    is_name = isinstance(name, str) and name and name.isprintable()
    is_sound = arguments.startswith("{") and is_unicode(arguments)
    return (name, arguments) if is_name and is_sound else None


def _decoded(name: str) -> str:
    """Return a name that may be a JSON string; "" if it contains characters that no name has."""
    found = json.loads(name) if name.startswith('"') else name
    return found if found.isprintable() else ""


def _mended(text: str) -> str:
    """Repair a text that is one whole object; return "" for any other text."""
    scan = ObjectScan()
    end, mended = scan.feed(text, 0)
    return mended if scan.is_over and end == len(text) else ""


def _skip(text: str, at: int, also: str = "") -> int:
    """Return the first index from `at` on where the text is neither white space nor in `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at
