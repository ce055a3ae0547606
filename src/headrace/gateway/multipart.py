"""Reads multipart forms with python-multipart, and limits the parts and their headers."""

import logging
import re
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace_common.errors import RequestError

STEP_BYTES = 4 << 10
"""Number of bytes to parse at a time, so that a step takes at most a few milliseconds.

The slowest bytes take a microsecond each.
"""

MAX_FIELDS = 16  # number of fields without the file
_MAX_HEADERS, _MAX_HEADER_BYTES, _MAX_PARAMETERS = 8, 2 << 10, 32
_MAX_CONTENT_TYPE = 1 << 10
_BOUNDARY = re.compile(r"[\x20-\x7e]{0,69}[\x21-\x7e]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# The library logs each form that it refuses, and a client could send any number of such forms.
logging.getLogger(MultipartParser.__module__).disabled = True


class PartHead(NamedTuple):
    """Holds the name of a part. `filename` is None for a text field."""

    name: str
    filename: str | None


PartNews = PartHead | bytearray


def boundary_of(content_type: str) -> bytes:
    """Return the boundary; raise RequestError if the header does not announce a multipart form."""
    is_short = len(content_type) <= _MAX_CONTENT_TYPE
    media_type, parameters = parse_options_header(content_type if is_short else "")
    boundary = parameters.get(b"boundary", b"")
    if media_type != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary.decode("latin-1")):
        raise RequestError(
            "unsupported_media_type",
            "Send a form: Content-Type: multipart/form-data with a boundary of 1 to 70 characters, "
            "as curl -F does.",
        )
    return boundary


class FormParser:
    """Parses a form piece by piece. `is_done` becomes true when the last boundary has arrived."""

    def __init__(self, boundary: bytes) -> None:
        self.is_done = False
        self._news: list[PartNews] = []
        self._num_parts = 0
        self._header_name = self._header_value = b""
        # The Content-Disposition of the part whose headers are being read.
        self._disposition: bytes | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._take_header_name,
                "on_header_value": self._take_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": lambda: self._news.append(_head(self._disposition or b"")),
                "on_part_data": self._take_data,
                "on_end": self._end,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> list[PartNews]:
        """Parse the next bytes of the form; return the heads and the data of parts in these bytes.

        Raise RequestError if the bytes are malformed.
        """
        self._news = []
        try:
            self._parser.write(data)
        except FormParserError:
            raise _malformed(
                "a boundary or the headers of a part are malformed. A part may have up to "
                f"{_MAX_HEADERS} headers of {_MAX_HEADER_BYTES} bytes each"
            ) from None
        return self._news

    def _begin_part(self) -> None:
        self._num_parts += 1
        self._disposition = None
        if self._num_parts > MAX_FIELDS + 1:
            text = f"The form has more than {MAX_FIELDS + 1} parts; send one file and at most "
            raise RequestError("invalid_value", f"{text}{MAX_FIELDS} fields.")

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header_name.lower(), self._header_value
        self._header_name = self._header_value = b""
        if name == b"content-disposition":
            if self._disposition is not None:
                raise _malformed("a part has two Content-Disposition headers; send one")
            self._disposition = value

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        # The library splits data at each place where a boundary could begin.
        if self._news and isinstance(self._news[-1], bytearray):
            self._news[-1] += data[start:end]
        else:
            self._news.append(bytearray(data[start:end]))

    def _end(self) -> None:
        self.is_done = True


def _head(disposition: bytes) -> PartHead:
    """Read the Content-Disposition of a part.

    RFC 7578 forbids `filename*` in forms, so only `filename` counts. If the value is a path, the
    last component is the file's name.
    """
    if disposition.count(b";") > _MAX_PARAMETERS:
        raise _malformed(f"a Content-Disposition has more than {_MAX_PARAMETERS} parameters")
    kind, parameters = parse_options_header(disposition)
    name, filename = parameters.get(b"name"), parameters.get(b"filename")
    if kind != b"form-data" or name is None:
        raise _malformed('a part needs the header Content-Disposition: form-data; name="…"')
    if filename is None:
        return PartHead(name.decode(errors="replace"), None)
    text = _CONTROLS.sub("", filename.decode(errors="replace"))
    return PartHead(name.decode(errors="replace"), re.split(r"[/\\]", text)[-1])


def _malformed(why: str) -> RequestError:
    return RequestError("invalid_value", f"The form cannot be read: {why}.")
