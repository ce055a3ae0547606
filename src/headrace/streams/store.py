"""Defines the store that keeps all logs.

The store claims names atomically, finds streams and deletes old streams.
"""

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.streams.events import AnyEvent
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId


class ById(msgspec.Struct, frozen=True):
    stream_id: StreamId


class ByConversation(msgspec.Struct, frozen=True):
    """Names the newest stream of a conversation. Two owners may use the same conversation name."""

    owner: str
    conversation: str


class ByKey(msgspec.Struct, frozen=True):
    owner: str
    key: str


class ByItem(msgspec.Struct, frozen=True):
    """Names the newest stream whose request contained an item with this id."""

    owner: str
    item: str


Name = ById | ByConversation | ByKey | ByItem


class RemoteWriter(Protocol):
    """The writer of a live stream, in another server with the same store."""

    async def stop(self, code: str) -> None:
        """Ask the writer to end the stream with this code.

        The request is kept even if the writer's server has died: the next writer gets the request.
        """

    def beat(self, form: str, interval_s: float) -> None:
        """Ask the writer to append a heartbeat to the log. The writer may ignore the request."""

    def recent(self) -> list[AnyEvent]:
        """Return the log's newest events, as far as they are in memory."""


class Stored(msgspec.Struct, frozen=True):
    """A stream as its store returns it.

    Only the writer that created or last claimed the stream can append to the log.
    """

    record: Record
    log: Log
    # Set while another server writes the stream.
    elsewhere: RemoteWriter | None = None
    # A stop request's code, if the request arrived while the stream had no writer; else empty.
    stop_code: str = ""


class WriterRequest(msgspec.Struct, frozen=True):
    """A request from another server about a stream that this server writes.

    `what` is "stop" (`detail` is the code), "beat" (`detail` is the heartbeat's form), or "look"
    (another server may have claimed the stream).
    """

    stream_id: StreamId
    what: str
    detail: str = ""
    interval_s: float = 0.0


class Retention(msgspec.Struct, frozen=True):
    """Limits on the age, number and size of ended streams; live streams are always kept."""

    keep_s: float = math.inf
    max_streams: int = sys.maxsize
    max_bytes: int = sys.maxsize


class Totals(msgspec.Struct, frozen=True):
    num_live: int
    num_streams: int
    num_bytes: int


class StoreStalled(RequestError):
    """Raised when the store cannot make data durable now: the disk is full, fails or takes too
    long.
    """

    def __init__(self, message: str) -> None:
        super().__init__("storage_unavailable", message, retry_after_s=5)


class ConversationLocked(RequestError):
    """Raised if the stream `follows` is not the newest of its conversation, or has not ended."""

    def __init__(self) -> None:
        message = "Another process is currently operating on this conversation. "
        message += "Please retry in a few seconds."
        super().__init__("conversation_locked", message, "conversation")


class SeenGateway(msgspec.Struct, frozen=True):
    """A running server of a shared store. `about` is the data that the server published with
    `tell`.
    """

    # The number of streams that the server writes.
    num_streams: int
    about: bytes
    is_this: bool


OnCommit = Callable[[float], None]
"""Receives the seconds that a write took to become durable."""


def ignore(seconds: float) -> None:
    """Ignore the time of a commit."""


class Store(Protocol):
    """Keeps the logs of all streams. One test suite checks every implementation.

    While commits fail, `stalled` is set and `writable` is cleared, so that clients waiting for an
    uncommitted event can be informed. An append keeps waiting while the store retries. Every
    other write raises StoreStalled. An append raises StoreStalled too if the buffer is full.
    """

    # Whether streams survive a restart of the server.
    is_durable: bool
    stalled: asyncio.Event
    writable: asyncio.Event

    def surely_writes(self, stream_id: StreamId) -> bool:
        """Return whether this server certainly still writes its stream `stream_id`.

        If not, another server may have taken over the stream.
        """

    async def close(self) -> None:
        """Make every append durable and release the store's resources."""

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        """Create a stream, or return the stream that already holds one of its names.

        The stream id, the idempotency key and the conversation are checked in this order, as one
        atomic operation. A new stream takes over a conversation whose stream has ended or is
        `replaces`. If the returned record has another id, an existing stream holds the name.

        A stream whose names have `follows` only takes over a conversation of which that stream is
        the newest and has ended. Otherwise ConversationLocked is raised.
        """

    async def find(self, name: Name) -> Stored | None:
        """Return the live or ended stream with this name, or None; this counts as reading the
        stream.

        Raises LogUnsound if the stream is damaged. A lookup by key returns None if the key is free
        again. A key becomes free if its stream is damaged, or if its stream ended with an error
        that allows a retry.
        """

    async def find_family(self, name: ByConversation) -> list[Stored]:
        """Return the streams of this conversation and of the conversations
        `<conversation>::<anything>`.

        The order is arbitrary and damaged streams are omitted. This counts as reading the streams.
        """

    async def forget(self, stream_id: StreamId) -> None:
        """Delete a stream and its names; ignore unknown ids. The stream's readers get LogGone."""

    async def unfinished(self) -> list[Stored]:
        """Claim all streams without a terminal event, oldest first; the caller becomes their
        writer.

        A damaged stream is ended instead of returned, and a later lookup of the stream raises
        LogUnsound.
        """

    async def orphans(self) -> list[Stored]:
        """Wait for the death of another server; take over and return streams of the dead server."""

    async def asked(self) -> WriterRequest:
        """Wait for the next request of another server and return the request."""

    async def sweep(self, retention: Retention, now: float) -> Totals:
        """Delete ended streams that are too old.

        While a limit is exceeded, also delete the ended streams that were read least recently.
        `now` is in unix seconds. Returns the totals of the remaining streams. Only live streams
        can make the totals exceed a limit.
        """

    def tell(self, about: Callable[[], bytes]) -> None:
        """Publish the result of `about` to the other servers of the store once a second."""

    async def gateways(self) -> list[SeenGateway]:
        """Return the running servers of a shared store, this server included.

        Returns an empty list if the store is not shared.
        """


class Unshared:
    """Default methods for a store that belongs to one server only."""

    def surely_writes(self, stream_id: StreamId) -> bool:
        return True

    async def orphans(self) -> list[Stored]:
        await asyncio.Event().wait()
        return []

    async def asked(self) -> WriterRequest:
        await asyncio.Event().wait()
        raise AssertionError("no other server can send a request")

    def tell(self, about: Callable[[], bytes]) -> None:
        """Do nothing: no other server reads this store."""

    async def gateways(self) -> list[SeenGateway]:
        return []
