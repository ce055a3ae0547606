"""A place in a stream as a client names it: `<stream id>:<seq>`, `<seq>`, either with `.<k>`."""

import re
from typing import NamedTuple

from headrace.core.errors import RequestError
from headrace.streams.record import Record

_CURSOR = re.compile(r"(?:(?P<id>[^:]+):)?(?P<seq>[0-9]{1,15})(?:\.(?P<part>[0-9]{1,6}))?")


class Cursor(NamedTuple):
    """Behind frame `part` of event `seq`; without a part, behind all its frames."""

    seq: int
    part: int | None = None


START = Cursor(-1)


def parse(text: str | None, record: Record, next_seq: int) -> Cursor:
    """RequestError `invalid_cursor` if it is malformed, of another stream, or beyond the log."""
    if not text:
        return START
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise _invalid("A cursor is <stream id>:<seq> or <seq>, as in the id of an event.")
    if found["id"] not in (None, record.id):
        raise _invalid("The cursor belongs to another stream.")
    seq = int(found["seq"])
    if seq >= next_seq:
        raise _invalid(f"The cursor is beyond event {next_seq - 1}, the last one.")
    return Cursor(seq, int(found["part"]) if found["part"] else None)


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_cursor", message, "after")
