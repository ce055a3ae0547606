"""The store, where logs live: names claimed atomically, streams found again, old ones swept."""

import asyncio
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
    """The newest stream of this name; names belong to their owner."""

    owner: str
    conversation: str


class ByKey(msgspec.Struct, frozen=True):
    owner: str
    key: str


Name = ById | ByConversation | ByKey


class RemoteWriter(Protocol):
    """The writer of a live stream in another server of the same store."""

    async def stop(self, code: str) -> None:
        """Asks it to end the stream with this code; it counts even if that server has gone."""

    def beat(self, form: str, interval_s: float) -> None:
        """Asks it for a heartbeat in the log, which may come or not."""

    def recent(self) -> list[AnyEvent]:
        """The newest events of the log, as far as they are in memory."""


class Stored(msgspec.Struct, frozen=True):
    """A stream as its store has it.

    Only the writer that created the stream, or has claimed it since, can append to its log; all
    others only read it.
    """

    record: Record
    log: Log
    elsewhere: RemoteWriter | None = None  # set while another server writes it
    stop_code: str = ""  # somebody asked to end it with this code while it had no writer


class Ask(msgspec.Struct, frozen=True):
    """A wish of another server about a stream that is written here.

    `what`: stop, `detail` being the code; beat, with the form; look, for somebody else may write
    it now.
    """

    stream_id: StreamId
    what: str
    detail: str = ""
    interval_s: float = 0.0


class Retention(msgspec.Struct, frozen=True):
    """How long, and how many, ended streams are kept; live ones always are."""

    keep_s: float = 24 * 3600.0
    max_streams: int = 10_000
    max_bytes: int = 1 << 30


class Totals(msgspec.Struct, frozen=True):
    num_live: int
    num_streams: int
    num_bytes: int


class StoreStalled(RequestError):
    """The store cannot make this durable now: the disk is full, fails, or takes too long."""

    def __init__(self, message: str) -> None:
        super().__init__("storage_unavailable", message, retry_after_s=5)


class SeenGateway(msgspec.Struct, frozen=True):
    """A server of a shared store, and what it told `about` itself."""

    num_streams: int  # that it writes
    about: bytes
    is_this: bool


Hear = Callable[[float], None]
"""Takes how many seconds a write took to be durable."""


def nobody_hears(seconds: float) -> None:
    """The default hearer of a store's times."""


class Store(Protocol):
    """All stores pass one test suite.

    While commits fail, `stalled` is set and `writable` is not, so that a client who waits for an
    uncommitted event can be told. An append goes on waiting while the store goes on trying;
    everything else raises StoreStalled, and so does an append that finds the buffer full.
    """

    is_durable: bool  # whether it survives the server
    stalled: asyncio.Event
    writable: asyncio.Event
    on_commit: Hear

    async def close(self) -> None:
        """Makes durable what was appended, and gives back what it holds."""

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        """A new stream, or the one that holds one of its names.

        Atomic over the stream id, the idempotency key and the conversation, looked up in this
        order. A conversation whose stream has ended, or is `replaces`, is taken over. The record
        that comes back is the one that holds the names.
        """

    async def find(self, name: Name) -> Stored | None:
        """The stream of that name, live or ended; counts as reading it.

        LogUnsound if it is damaged. A key finds nothing once it is free: its stream is damaged, or
        ended in an error after which the request may run again.
        """

    async def find_family(self, name: ByConversation) -> list[Stored]:
        """The stream of that conversation, and those of `<conversation>::<anything>`.

        In any order, without unsound ones; counts as reading them.
        """

    async def forget(self, stream_id: StreamId) -> None:
        """Removes a stream with its names; unknown ones are ignored. Its readers get LogGone."""

    async def unfinished(self) -> list[Stored]:
        """Streams without a terminal event, oldest first, claimed for the caller to write.

        Unsound ones are set aside instead: they end here, and finding them raises LogUnsound.
        """

    async def orphans(self) -> list[Stored]:
        """Streams whose server has gone, claimed for the caller to write; waits until there are."""

    async def asked(self) -> Ask:
        """The next wish of another server; waits until there is one."""

    async def sweep(self, retention: Retention, now: float) -> Totals:
        """Removes ended streams that are too old, then the least recently read beyond the caps.

        `now` is unix seconds. Returns what is left: beyond a cap only if live streams fill it.
        """

    def tell(self, about: Callable[[], bytes]) -> None:
        """Has the other servers of the store told this, once a second."""

    async def gateways(self) -> list[SeenGateway]:
        """The living servers of a shared store, this one too; none if it is not shared."""


class Unshared:
    """Part of a store that one server has to itself: no other has streams in it."""

    async def orphans(self) -> list[Stored]:
        await asyncio.Event().wait()
        return []

    async def asked(self) -> Ask:
        await asyncio.Event().wait()
        raise AssertionError("nobody asks")

    def tell(self, about: Callable[[], bytes]) -> None:
        """There is nobody to tell."""

    async def gateways(self) -> list[SeenGateway]:
        return []
