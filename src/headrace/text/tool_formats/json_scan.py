"""Extracts a JSON object from a text that arrives in pieces, and repairs common mistakes.

Valid JSON passes unchanged. Models sometimes write Python's quotes and literals, commas before a
closing bracket, line breaks within strings, and backslashes before any letter.
"""

from headrace.text.tool_formats.values import PYTHON_LITERALS

_ESCAPED = frozenset('"\\/bfnrtu')
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class ObjectScan:
    """Finds the end of a JSON object, and returns the object's repaired text."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        # The quote that ends the current string; "" outside of strings.
        self._quote = ""
        self._is_escaped = False
        # Text that is held back outside of strings: a word, or a comma and the following
        # white space.
        self._held = ""

    def feed(self, text: str, start: int) -> tuple[int, str]:
        """Return the index after the last processed character of `text`, and the object's text."""
        out: list[str] = []
        for index in range(start, len(text)):
            step = self._in_string if self._quote else self._outside
            out.append(step(text[index]))
            if self.is_over:
                return index + 1, "".join(out)
        return len(text), "".join(out)

    def flush(self) -> str:
        """Return the rest of an object that ended too early."""
        held, self._held = self._held, ""
        return held + "\\" * self._is_escaped

    def _in_string(self, character: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
            if character in _ESCAPED:
                return "\\" + character
            if character == "'":
                return character
            return _CONTROL.get(character) or "\\\\" + character
        if character == "\\":
            self._is_escaped = True
            return ""
        if character == self._quote:
            self._quote = ""
            return '"'
        if character == '"':
            return '\\"'
        if character < " ":
            return _CONTROL.get(character) or f"\\u{ord(character):04x}"
        return character

    def _outside(self, character: str) -> str:
        if character.isalpha() and (not self._held or self._held.isalpha()):
            self._held += character
            return ""
        if character.isspace() and self._held[:1] == ",":
            self._held += character
            return ""
        before = PYTHON_LITERALS.get(self._held, self._held)
        self._held = ""
        if character in "}]":
            self._depth -= 1
            self.is_over = self._depth == 0
            before = before.removeprefix(",")
        elif character in "{[":
            self._depth += 1
        elif character in "\"'":
            self._quote, character = character, '"'
        elif character == "," or character.isalpha():
            self._held, character = character, ""
        return before + character
