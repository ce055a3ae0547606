"""Parses calls with arguments as in Python, such as name(key="text", other=[1])."""

import json
import re
from collections.abc import Sequence
from typing import Any

from headrace.text.argument_rules import ArgumentNotation
from headrace.text.tool_formats.format import CallDelta, StringTypes
from headrace.text.tool_formats.values import (
    LITERAL,
    PYTHON_LITERALS,
    deltas_of,
    read_json,
    with_texts,
)

NOTATION = ArgumentNotation('"("', "=", '", "', '")"', '"(**" {} ")"')
_SPACE = re.compile(r"\s*+")
_BETWEEN = re.compile(r"[,;]?\s{0,8}+")
_HEAD = re.compile(r"([\w.-]{1,64}+)[ \t]{0,4}\(")
_HEAD_SO_FAR = re.compile(r"[\w.-]{0,64}+[ \t]{0,4}")
# Tokens that matter for the end of a call, outside of strings, and in strings by their quote.
_OUTSIDE = re.compile(r"""["]{1,3}|[']{1,3}|[()\[\]{}]""")
_INSIDE = {
    quote: re.compile(rf"\\.?|{quote[0]}{{1,{len(quote)}}}", re.DOTALL)
    for quote in ('"', "'", '"""', "'''")
}
_PIECE = re.compile(
    r'(?P<long>"""(?:[^"\\]++|\\.|"(?!""))*+"""' + r"|'''(?:[^'\\]++|\\.|'(?!''))*+''')"
    r'|(?P<text>"(?:[^"\\]++|\\.)*+"' + r"|'(?:[^'\\]++|\\.)*+')"
    r"|(?P<key>[\w.-]++)\s*+="
    r"|(?P<word>[\w.+-]++)"
    r"|(?P<mark>[\[\]{},:])"
    r"|(?P<space>\s++)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {
    character: character for character in "\"'\\/"
}


class PythonCalls:
    """Parses one call after the other, and returns the pieces of a call when it is complete.

    Each character is read twice: to find the end of the call, and to parse the call.
    """

    def __init__(self, types: StringTypes, opening: str, ends: Sequence[str]) -> None:
        """`opening` may precede the first call. One of `ends` follows the last call.

        If an end begins with another end, it must precede the other end.
        """
        self.rest: str | None = None
        self._types = types
        self._before = (
            re.compile(rf"(?:{re.escape(opening)})?+\s{{0,32}}+") if opening else _BETWEEN
        )
        self._ends = ends
        self._text = ""
        # The start of the current call, or of the text in which the next call may begin.
        self._start = 0
        self._name = ""
        # The start of the current call's arguments.
        self._body = 0
        # The text before this index has been searched for the end of the current call.
        self._at = 0
        # The number of open brackets; 0 between two calls.
        self._depth = 0
        # The quote that ends the current string; "" outside of strings.
        self._quote = ""
        self._has_call = False

    def feed(self, text: str) -> list[CallDelta]:
        self._text += text
        return self._take_calls(is_last=False)

    def flush(self) -> list[CallDelta]:
        found = self._take_calls(is_last=True) if self.rest is None else []
        if self.rest is None:
            self._end(self._start)
        return found

    def _take_calls(self, is_last: bool) -> list[CallDelta]:
        found: list[CallDelta] = []
        while (self._depth or self._begin(is_last)) and self._reaches_end():
            try:
                arguments = _arguments(self._text[self._body : self._at])
                found += deltas_of(with_texts(self._name, arguments, self._types))
            except (ValueError, RecursionError):
                self._end(self._start)
                break
            self._has_call, self._start = True, self._at
        return found

    def _begin(self, is_last: bool) -> bool:
        """Find the start of the next call; return False if no call has begun."""
        self._start = _end_of(_SPACE, self._text, self._start)
        before = _BETWEEN if self._has_call else self._before
        at = _end_of(before, self._text, self._start)
        if head := _HEAD.match(self._text, at):
            self._name, self._body, self._depth = head[1], head.end(), 1
            self._at = self._body
            return True
        ahead = self._text[at : at + 80]
        if not is_last and any(it.startswith(ahead) and it != ahead for it in self._ends):
            return False
        if end := next((it for it in self._ends if ahead.startswith(it)), ""):
            self._end(at + len(end))
        elif is_last or not _HEAD_SO_FAR.fullmatch(ahead):
            self._end(self._start)
        return False

    def _reaches_end(self) -> bool:
        """Search for the end of the call; return False if more text is needed."""
        while found := _INSIDE.get(self._quote, _OUTSIDE).search(self._text, self._at):
            token = found[0]
            is_quote = token[0] in "\"'"
            # The next text may continue the token.
            is_short = token == "\\" or (is_quote and len(token) < 3 and len(self._quote) != 1)
            if is_short and found.end() == len(self._text):
                self._at = found.start()
                return False
            self._at = found.end()
            if self._quote:
                self._quote = "" if token == self._quote else self._quote
            elif is_quote:
                # Two quotes are an empty string.
                self._quote = "" if len(token) == 2 else token
            else:
                self._depth += 1 if token in "([{" else -1
                if not self._depth:
                    return True
        self._at = len(self._text)
        return False

    def _end(self, at: int) -> None:
        self.rest = self._text[at:] if self._has_call else self._text


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments, given with the closing bracket. Raise ValueError for other text."""
    if not text.endswith(")"):
        raise ValueError("another bracket ends the call")
    inner = text[:-1].strip()
    written = _as_json(inner[2:]) if inner.startswith("**") else "{" + _as_json(inner) + "}"
    arguments = read_json(written)
    if not isinstance(arguments, dict):
        raise ValueError("not the arguments of a call")
    return arguments


def _as_json(text: str) -> str:
    """Return the JSON for arguments with values in Python or JSON.

    Raise ValueError for a piece of text that has no meaning.
    """
    found: list[str] = []
    at = depth = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        kind = piece.lastgroup if piece else None
        if piece is None or (kind == "key" and depth):
            raise ValueError("not a value")
        at, written = piece.end(), piece[0]
        if kind in ("long", "text"):
            length = 3 if kind == "long" else 1
            # json.dumps escapes both halves of a surrogate pair, and decoding joins them again.
            found.append(json.dumps(_ESCAPE.sub(_unescaped, written[length:-length])))
        elif kind == "key":
            found.append(f"{json.dumps(piece['key'])}:")
        elif kind == "word":
            literal = PYTHON_LITERALS.get(written, written)
            if not LITERAL.fullmatch(literal):
                raise ValueError("not a literal")
            found.append(literal)
        elif kind == "mark":
            if written in "]}":
                _drop_comma(found)
            depth += (written in "[{") - (written in "]}")
            found.append(written)
    _drop_comma(found)
    return "".join(found)


def _drop_comma(found: list[str]) -> None:
    """Remove a comma after the last value, which Python allows."""
    if len(found) > 1 and found[-1] == "," and found[-2] not in ("[", "{", ","):
        found.pop()


def _unescaped(escape: re.Match[str]) -> str:
    number = escape[1] or escape[2]
    return chr(int(number, 16)) if number else _ESCAPES.get(escape[3], escape[0])


def any_call(names: Sequence[str]) -> str:
    """Return a rule for a call of one of the tools."""
    return " | ".join(f"{json.dumps(name)} @arguments{i}" for i, name in enumerate(names))
