"""Where logs live: names claimed atomically, streams found again, old ones swept."""

from typing import Protocol

import msgspec

from headrace.core.ids import StreamId
from headrace.streams.log import Log
from headrace.streams.record import Record


class ById(msgspec.Struct, frozen=True):
    stream_id: StreamId


class ByConversation(msgspec.Struct, frozen=True):
    """The newest stream of this name; names belong to their owner."""

    owner: str
    conversation: str


class ByKey(msgspec.Struct, frozen=True):
    owner: str
    key: str


Name = ById | ByConversation | ByKey


class Stored(msgspec.Struct, frozen=True):
    """A stream as its store has it. The log's writer is whoever created or claimed it last."""

    record: Record
    log: Log


class Retention(msgspec.Struct, frozen=True):
    """How long and how much of what has ended is kept; live streams always are."""

    keep_s: float = 24 * 3600.0
    max_streams: int = 10_000
    max_bytes: int = 1 << 30


class Totals(msgspec.Struct, frozen=True):
    num_live: int
    num_streams: int
    num_bytes: int


class Store(Protocol):
    """One test suite holds for every store."""

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        """A new stream, or the one that holds one of its names.

        Atomic over the stream id, the conversation and the idempotency key. A conversation whose
        stream has ended, or is `replaces`, is taken over; a key only from a stream that ended in
        a retryable error. Whose record comes back tells who holds the names.
        """

    async def find(self, name: Name) -> Stored | None:
        """The stream of that name; reading it counts as a use for eviction."""

    async def forget(self, stream_id: StreamId) -> None:
        """Removes a stream with its names; unknown ones are ignored."""

    async def unfinished(self) -> list[Stored]:
        """Streams without a terminal event, oldest first, claimed for this process to write."""

    async def sweep(self, retention: Retention, now: float) -> Totals:
        """Removes ended streams that are too old, then the least recently read beyond the caps.

        `now` is unix seconds. Returns what is left.
        """
