"""Translates Lark grammars without recursion into regular expressions.

Unlike a grammar, a regular expression can be enforced inside a JSON string.
"""

import json
import re
from collections.abc import Iterator, Mapping

_MAX_PATTERN = 1 << 16
_COMMON: Mapping[str, str] = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:(?:\r?\n)+)",
    "DIGIT": r"[0-9]",
    "INT": r"(?:[0-9]+)",
    "LETTER": r"[A-Za-z]",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"(?:[A-Za-z]+)",
    "CNAME": r"(?:[_A-Za-z][_A-Za-z0-9]*)",
    "WS": r"(?:[ \t\f\r\n]+)",
    "WS_INLINE": r"(?:[ \t]+)",
}
"""Terminals that a grammar may import from Lark's module `common`."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|//[^\n]*|\#[^\n]*|->[ ]*[a-z_]+|^[?!]+)
    |(?P<line>\n)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")(?![a-z.])
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/)(?![a-z])
    |(?P<import>%import[ ]+common\.(?P<imported>[A-Z_]+)(?=\s|$))
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<mark>[:|()\[\]?*+])""",
    re.VERBOSE | re.MULTILINE,
)
Token = tuple[str, str]


def lark_pattern(grammar: str) -> str:
    """Return a regular expression that matches the same texts as a Lark grammar.

    Return "" if the grammar's rules are recursive or contain something unsupported, such as
    `%ignore`.
    """
    try:
        return _Rules(grammar).pattern()
    except (_NotTranslated, RecursionError):
        return ""


class _NotTranslated(Exception):
    """Raised for a grammar that is recursive or uses unsupported syntax."""


class _Rules:
    """The rules and terminals of a grammar."""

    def __init__(self, grammar: str) -> None:
        self._imported = set[str]()
        self._bodies: dict[str, list[Token]] = {}
        # Rules that are being translated; a reference to such a rule would be recursive.
        self._open = set[str]()
        self._done: dict[str, str] = {}
        if len(grammar) > _MAX_PATTERN:
            raise _NotTranslated
        self._split(list(self._tokens(grammar)))

    def pattern(self) -> str:
        return self._pattern_of("start")

    def _tokens(self, grammar: str) -> Iterator[Token]:
        index = 0
        while index < len(grammar):
            found = _TOKEN.match(grammar, index)
            if found is None:
                raise _NotTranslated
            index = found.end()
            if imported := found["imported"]:
                self._imported.add(imported)
            elif found.lastgroup != "space":
                yield str(found.lastgroup), found[0]

    def _split(self, tokens: list[Token]) -> None:
        """Store the tokens of each rule; a line that begins with `|` continues the rule above."""
        body: list[Token] | None = None
        for number, (kind, text) in enumerate(tokens):
            following = tokens[number + 1] if number + 1 < len(tokens) else ("", "")
            if kind == "name" and following == ("mark", ":"):
                body = self._bodies.setdefault(text, [])
                if body:
                    raise _NotTranslated
            elif kind == "line" or (kind, text) == ("mark", ":"):
                continue
            elif body is None:
                raise _NotTranslated
            else:
                body.append((kind, text))

    def _pattern_of(self, name: str) -> str:
        """Return the pattern of a rule or of an imported terminal."""
        if name not in self._bodies:
            if name not in self._imported or name not in _COMMON:
                raise _NotTranslated
            return _COMMON[name]
        if name in self._open:
            raise _NotTranslated
        if name not in self._done:
            self._open.add(name)
            rest = self._bodies[name][::-1]
            self._done[name] = self._choice(rest)
            self._open.remove(name)
            if rest:
                raise _NotTranslated
        return self._done[name]

    def _choice(self, rest: list[Token]) -> str:
        """Return the pattern of all tokens up to a closing bracket; `rest` is in reverse order."""
        options, length = [""], 0
        while rest and rest[-1][1] not in (")", "]"):
            if rest[-1] == ("mark", "|"):
                rest.pop()
                options.append("")
                length += 1
            else:
                item = self._item(rest)
                options[-1] += item
                length += len(item)
            if length > _MAX_PATTERN:
                raise _NotTranslated
        return f"(?:{'|'.join(options)})"

    def _item(self, rest: list[Token]) -> str:
        kind, text = rest.pop()
        if kind == "literal":
            found = f"(?:{re.escape(_text_of(text))})"
        elif kind == "regex":
            found = "(?:" + text[1:-1].replace(r"\/", "/") + ")"
        elif kind == "name":
            found = self._pattern_of(text)
        elif text in ("(", "["):
            found = self._choice(rest)
            if not rest or rest.pop()[1] != {"(": ")", "[": "]"}[text]:
                raise _NotTranslated
            found += "?" if text == "[" else ""
        else:
            raise _NotTranslated
        if rest and rest[-1][0] == "mark" and rest[-1][1] in ("?", "*", "+"):
            found = f"(?:{found}{rest.pop()[1]})"
        return found


def _text_of(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise _NotTranslated from None
