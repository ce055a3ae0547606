"""Chooses ended streams to delete.

Expired streams are deleted first. While a limit is exceeded, the least recently read streams are
deleted too.
"""

from collections.abc import Iterable

import msgspec

from headrace.streams.store import Retention, Totals
from headrace_common.ids import StreamId


class Kept(msgspec.Struct, frozen=True):
    """The values of one stream that a sweep needs.

    Times are in unix seconds; `ended_at` is None for a live stream.
    """

    stream_id: StreamId
    num_bytes: int
    read_at: float
    ended_at: float | None


def choose(kept: Iterable[Kept], retention: Retention, now: float) -> tuple[list[StreamId], Totals]:
    """Return the streams to delete, in order, and the totals of the remaining streams."""
    live: list[Kept] = []
    ended: list[Kept] = []
    for stream in kept:
        (live if stream.ended_at is None else ended).append(stream)
    num_streams = len(live) + len(ended)
    num_bytes = sum(stream.num_bytes for stream in live + ended)
    oldest = now - retention.keep_s
    evicted = []
    for stream in sorted(ended, key=lambda stream: (not _is_old(stream, oldest), stream.read_at)):
        is_over = num_streams > retention.max_streams or num_bytes > retention.max_bytes
        if not is_over and not _is_old(stream, oldest):
            break
        evicted.append(stream.stream_id)
        num_streams -= 1
        num_bytes -= stream.num_bytes
    return evicted, Totals(len(live), num_streams, num_bytes)


def _is_old(stream: Kept, oldest: float) -> bool:
    return stream.ended_at is not None and stream.ended_at < oldest
