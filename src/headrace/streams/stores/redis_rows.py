"""Decodes streams from Redis answers, and checks that the streams are undamaged."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.streams.events import AnyEvent
from headrace.streams.log import LogGone, LogUnsound
from headrace.streams.record import Record
from headrace_common.ids import StreamId

_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_events = msgspec.msgpack.Decoder(list[AnyEvent]).decode
UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)
"""Errors of decoding data that is damaged or from another version."""


class RedisRow(msgspec.Struct, frozen=True):
    """A stream's stored values, as one script read them."""

    stream_id: StreamId
    n: int
    next_seq: int
    has_ended: bool
    # The gateway that writes the stream, or that last wrote the stream.
    gateway: str
    epoch: int
    stop_code: str
    data: bytes

    @property
    def record(self) -> Record:
        """Decode the record.

        Raises LogUnsound if the record is damaged or its version is unknown.
        """
        with contextlib.suppress(*UNREADABLE):
            record = _decode_record(self.data)
            if record.id == self.stream_id:
                return record
        raise self.unsound("its record cannot be read")

    def unsound(self, reason: str) -> LogUnsound:
        return LogUnsound(self.n, self.stream_id, reason)


def row_of(answer: Sequence[Any]) -> RedisRow:
    id, n, next_seq, ended, gateway, epoch, stop, record = answer
    return RedisRow(
        stream_id=StreamId(id.decode()),
        n=int(n),
        next_seq=int(next_seq),
        has_ended=ended is not None,
        gateway=gateway.decode(),
        epoch=int(epoch),
        stop_code=(stop or b"").decode(),
        data=record,
    )


def events_of(data: bytes) -> list[AnyEvent]:
    """Decode the events of one append."""
    return _decode_events(data)


def open_page(row: RedisRow, answer: Any, after: int, num: int) -> list[AnyEvent]:
    """Return the `num` events that follow number `after`.

    Raises LogGone if the stream was deleted, and LogUnsound if the events are damaged.
    """
    if answer is None:
        raise LogGone
    try:
        events = _all(entries=answer[2])
    except UNREADABLE:
        raise row.unsound("its events cannot be read") from None
    wanted = [event for event in events if after < event.seq <= after + num]
    if [event.seq for event in wanted] != list(range(after + 1, after + 1 + num)):
        raise row.unsound("its events have a gap")
    return wanted


def _all(entries: Iterable[Any]) -> list[AnyEvent]:
    return [event for _, fields in entries for event in events_of(fields[1])]
