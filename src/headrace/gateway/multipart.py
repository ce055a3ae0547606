"""Forms with a file, read piece by piece: nothing of the file is kept here."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from headrace.core.errors import RequestError

_MAX_HEADERS = 16 << 10
_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r"[\x20-\x7e]{1,70}")
_PARAMETER = re.compile(  # possessive, so that no input is gone over twice
    r";[ \t]*+(?:([^\s;=\"]++)[ \t]*+=[ \t]*+(?:\"((?:[^\"\\]|\\.)*+)\"[ \t]*+|([^;\"]*+)))?+",
    re.DOTALL,
)
_ESCAPED = re.compile(r"\\([\"\\])")


class PartHead(NamedTuple):
    """The head of a part; `filename` is None for a field of text."""

    name: str
    filename: str | None


class PartEnd(NamedTuple):
    """The end of the part that began last."""


PartNews = PartHead | bytes | PartEnd


def boundary_of(content_type: str) -> bytes:
    """RequestError unless the body is a form with parts."""
    value, parameters = _taken_apart(content_type) or ("", {})
    boundary = parameters.get("boundary", "") if value == _TYPE else ""
    if not _BOUNDARY.fullmatch(boundary):
        message = "Send a form, Content-Type: multipart/form-data with a boundary; curl -F does."
        raise RequestError("unsupported_media_type", message)
    return boundary.encode()


class MultipartParser:
    """Feed it the body; it gives heads, data and ends. `is_done` once the last boundary came."""

    def __init__(self, boundary: bytes) -> None:
        self.is_done = False
        self._mark = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")
        self._state = "preamble"

    def feed(self, data: bytes) -> Iterator[PartNews]:
        """RequestError `invalid_value` for what is no such form."""
        if self.is_done:
            return
        self._held += data
        while not self.is_done:
            if self._state in ("preamble", "data"):
                at = self._held.find(self._mark)
                whole = at if at >= 0 else max(0, len(self._held) - len(self._mark) + 1)
                if whole and self._state == "data":
                    yield bytes(self._held[:whole])
                del self._held[:whole]
                if at < 0:
                    return
                if self._state == "data":
                    yield PartEnd()
                del self._held[: len(self._mark)]
                self._state = "boundary"
            elif self._state == "boundary":
                if len(self._held) < 2:
                    return
                self._after_boundary()
            else:
                end = self._held.find(b"\r\n\r\n")
                if end < 0:
                    if len(self._held) > _MAX_HEADERS:
                        raise _bad("a part has too many headers")
                    return
                yield _head(bytes(self._held[: end + 2]))
                del self._held[: end + 4]
                self._state = "data"

    def _after_boundary(self) -> None:
        if self._held[:2] == b"--":
            self.is_done = True
        elif self._held[:2] == b"\r\n":
            del self._held[:2]
            self._state = "head"
        else:
            raise _bad("a boundary does not end its line")


def _head(raw: bytes) -> PartHead:
    lines = (line.partition(":") for line in raw.decode("utf-8", "replace").split("\r\n"))
    headers = {name.lower(): value for name, _, value in lines}
    found = _taken_apart(headers.get("content-disposition", ""))
    if found is None:
        raise _bad("the parameters of a part's Content-Disposition are malformed")
    _, parameters = found
    if "name" not in parameters:
        raise _bad("a part has no name")
    return PartHead(parameters["name"], parameters.get("filename"))


def _taken_apart(header: str) -> tuple[str, dict[str, str]] | None:
    """A header's value and its parameters, the first of each name; None if they are malformed.

    Linear in its length. RFC 2231's `name*` is another name, as RFC 7578 has it.
    """
    value, semicolon, rest = header.partition(";")
    rest, at = semicolon + rest, 0
    parameters: dict[str, str] = {}
    while at < len(rest):
        if (found := _PARAMETER.match(rest, at)) is None:
            return None
        name, quoted, token = found.groups()
        if name:
            text = token.strip() if quoted is None else _ESCAPED.sub(r"\1", quoted)
            parameters.setdefault(name.lower(), text)
        at = found.end()
    return value.strip().lower(), parameters


def _bad(why: str) -> RequestError:
    return RequestError("invalid_value", f"The form cannot be read: {why}.")
