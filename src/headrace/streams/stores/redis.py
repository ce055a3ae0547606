"""Stores streams in Redis, where all gateways find the streams. A stream has one writer at a time.

Readers only see events that Redis has stored. Events of this gateway become visible when Redis
confirms the append. Events of other gateways become visible when Redis publishes them.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.streams.events import AnyEvent
from headrace.streams.log import LogConflict, LogUnsound, Tail
from headrace.streams.record import Record
from headrace.streams.store import (
    ByConversation,
    ById,
    ByItem,
    ByKey,
    ConversationLocked,
    Name,
    OnCommit,
    Retention,
    SeenGateway,
    Stored,
    StoreStalled,
    Totals,
    WriterRequest,
    ignore,
)
from headrace.streams.stores import redis_scripts as scripts
from headrace.streams.stores.redis_lease import GatewayLease
from headrace.streams.stores.redis_link import LOST, Link
from headrace.streams.stores.redis_rows import RedisRow, open_page, row_of
from headrace.streams.stores.redis_tails import LiveTails
from headrace.streams.stores.redis_writer import Appends
from headrace.streams.stores.sweep import Kept, choose
from headrace_common.ids import StreamId
from headrace_common.system.race import race

logger = logging.getLogger(__name__)

_EVICTED_AT_ONCE = 100
# A stream that this gateway does not know yet is looked up this many times, with this many seconds
# between two lookups.
_NUM_TRIES, _TRY_S = 20, 0.05
_NO_WRITER = 0
_TAKEN_OVER = -2
_TAKEN_MESSAGE = "Another server has taken over this stream; send the request again."

_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class RedisStore:
    """The store in Redis.

    Create the store with `open`, and call `close` before the event loop ends.
    """

    is_durable = True

    def __init__(self, link: Link, on_commit: OnCommit) -> None:
        self.gateway = secrets.token_hex(8)
        self.stalled = link.stalled
        self.writable = link.writable
        self.link = link
        self.tails = LiveTails(link, self._take_ask, self._ask_missed_stops)
        # The number of claims in progress.
        self._num_claims = 0
        # Streams that Redis assigns to this gateway but that this gateway does not know.
        self._unknown: set[StreamId] = set()
        # Streams that this gateway writes but that Redis assigns to another gateway.
        self._taken: set[StreamId] = set()
        # Ids of claims that Redis has not answered, by the dead gateway whose streams were claimed.
        self._unanswered: dict[str, str] = {}
        # Monotonic seconds at which each stream was last read, collected since the last sweep.
        self._read_at: dict[StreamId, float] = {}
        self._orphans: asyncio.Queue[list[Stored]] = asyncio.Queue()
        self._asks: asyncio.Queue[WriterRequest] = asyncio.Queue()
        self.appends = Appends(link, self.gateway, self.tails, on_commit)
        self._lease = GatewayLease(link, self.gateway, self._count, self._take_from, self._compare)
        loops = (self.appends.run(), self.tails.run(), self._lease.run())
        self._parts = [asyncio.create_task(work, name="redis") for work in loops]

    @classmethod
    async def open(cls, url: str, on_commit: OnCommit = ignore) -> "RedisStore":
        """Open the store; log the risks of the server's settings.

        Raises StateError if the server cannot be used.
        """
        link = Link(url)
        try:
            for risk in await link.check():
                logger.warning("%s", risk)
        except BaseException:
            await link.close()
            raise
        return cls(link, on_commit)

    def surely_writes(self, stream_id: StreamId) -> bool:
        return self._lease.is_held and stream_id not in self._taken

    async def close(self) -> None:
        """Commit all appends and leave the live streams to other gateways."""
        await self.appends.close()
        self.tails.close()
        while pending := [part for part in self._parts if not part.done()]:
            for part in pending:
                # The redis client may swallow a cancellation while connecting or reading, so
                # cancel again.
                part.cancel()
            await asyncio.wait(pending, timeout=_TRY_S)
        with contextlib.suppress(*LOST):
            await self.link.attempt(scripts.RELEASE, self.gateway)
        await self.link.close()

    # Methods that look up and claim names.

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        names = record.names
        with self._claiming():
            is_new, *found = await self.link.run(
                scripts.CREATE,
                *(record.id, names.owner, names.conversation or "", names.key or ""),
                *(_encode(record), replaces or "", self.gateway, secrets.token_hex(8)),
                *(" ".join(names.items), names.follows or ""),
            )
            if is_new == _TAKEN_OVER:
                raise StoreStalled(_TAKEN_MESSAGE)
            if not found:
                raise ConversationLocked
            row = row_of(found[0])
            if is_new:
                self.link.heard()
                return self._claimed(row, record, self.tails.create(record.id, row.epoch))
        existing = await self._stored(row)
        return (
            existing
            or await self._known(ById(row.stream_id))
            or await self.create(record, replaces)
        )

    async def find(self, name: Name) -> Stored | None:
        try:
            return await self._known(name)
        except LogUnsound:
            if isinstance(name, ByKey):
                return None
            raise

    async def _known(self, name: Name) -> Stored | None:
        """Find a stream; repeat the lookup for a short time if this gateway does not know the
        stream.

        A stream that Redis assigns to this gateway can be unknown here, because the stream was just
        created or has just ended.
        """
        for _ in range(_NUM_TRIES):
            answer = await self.link.run(scripts.FIND, *_as_arguments(name))
            if not answer:
                return None
            if (stored := await self._stored(row_of(answer[0]))) is not None:
                return stored
            await asyncio.sleep(_TRY_S)
        raise StoreStalled("This stream is being opened; try again later.")

    async def find_family(self, name: ByConversation) -> list[Stored]:
        answer = await self.link.run(scripts.FAMILY, name.owner, name.conversation)
        found = []
        for row in map(row_of, answer):
            with contextlib.suppress(LogUnsound):
                stored = await self._stored(row) or await self._known(ById(row.stream_id))
                found += [stored] if stored else []
        return found

    async def forget(self, stream_id: StreamId) -> None:
        await self._delete([stream_id])

    async def unfinished(self) -> list[Stored]:
        with self._claiming():
            claim = secrets.token_hex(8)
            answer = await self.link.run(scripts.UNFINISHED, self.gateway, claim)
            return await self._adopted([row_of(one) for one in answer])

    async def sweep(self, retention: Retention, now: float) -> Totals:
        """Delete expired streams. The clock of Redis decides; `now` is ignored.

        All times are stored by the clock of Redis, so a gateway's wrong clock deletes nothing.
        """
        read_at, self._read_at = self._read_at, {}
        here = time.monotonic()
        pairs = [part for id, at in read_at.items() for part in (repr(here - at), id)]
        await self.link.run(scripts.TOUCH, *pairs)
        there, *lists = await self.link.run(scripts.KEPT)
        sizes, read, ended = map(_by_id, lists)
        kept = [Kept(id, int(size), read.get(id, 0.0), ended.get(id)) for id, size in sizes.items()]
        evicted, totals = choose(kept, retention, float(there))
        for start in range(0, len(evicted), _EVICTED_AT_ONCE):
            await self._delete(evicted[start : start + _EVICTED_AT_ONCE])
        return totals

    def tell(self, about: Callable[[], bytes]) -> None:
        self._lease.tell(about)

    async def gateways(self) -> list[SeenGateway]:
        answer = await self.link.run(scripts.GATEWAYS)
        return [SeenGateway(num, about, id.decode() == self.gateway) for id, about, num in answer]

    async def orphans(self) -> list[Stored]:
        return await self._unless_lost(self._orphans.get())

    async def asked(self) -> WriterRequest:
        return await self._unless_lost(self._asks.get())

    async def _stored(self, row: RedisRow) -> Stored | None:
        """Return a stream for a reader.

        Returns None if Redis assigns the stream to this gateway but this gateway does not know the
        stream.
        """
        record = row.record
        self._read_at[row.stream_id] = time.monotonic()
        if row.has_ended:
            ended = Tail(row.next_seq, has_ended=True)
            return Stored(record, _RedisLog(self, row, ended, _NO_WRITER))
        if row.gateway != self.gateway:
            tail = await self.tails.follow(row)
            log = _RedisLog(self, row, tail, _NO_WRITER)
            return Stored(record, log, _RemoteWriter(self, row.stream_id, tail))
        if row.stream_id not in self.tails.own:
            return None
        return Stored(record, _RedisLog(self, row, self.tails.of(row.stream_id), _NO_WRITER))

    def _claimed(self, row: RedisRow, record: Record, tail: Tail) -> Stored:
        """Return a stream that this gateway has claimed, with a log for its writer."""
        self._taken.discard(row.stream_id)
        log = _RedisLog(self, row, tail, row.epoch)
        return Stored(record, log, stop_code=row.stop_code)

    async def _adopted(self, rows: Sequence[RedisRow]) -> list[Stored]:
        """Return the streams that this gateway has just claimed. The streams' readers stay
        connected.
        """
        adopted = []
        for row in sorted(rows, key=lambda row: row.n):
            try:
                record = row.record
            except LogUnsound as unsound:
                logger.warning(
                    "The stream number %d cannot be continued: %s", row.n, unsound.reason
                )
                continue
            adopted.append(self._claimed(row, record, await self.tails.adopt(row)))
        return adopted

    async def _delete(self, stream_ids: list[StreamId]) -> None:
        await self.link.run(scripts.FORGET, *stream_ids)
        for stream_id in stream_ids:
            self.tails.gone(stream_id)

    # Methods that decide which gateway writes a stream.

    def _take_ask(self, words: list[str]) -> None:
        what, *details, id = words
        # A stream that is being claimed may soon belong to this gateway.
        is_claimed = what == "stop" and self._num_claims > 0
        if StreamId(id) in self.tails.own or is_claimed:
            interval_s = float(details[1]) if what == "beat" else 0.0
            self._asks.put_nowait(WriterRequest(StreamId(id), what, details[0], interval_s))

    async def _ask_missed_stops(self) -> None:
        """Apply the stops that were published while this gateway was not connected."""
        own = list(self.tails.own)
        codes = await self.link.run(scripts.STOPS, *own, is_patient=True)
        for id, code in zip(own, codes, strict=True):
            if code is not None:
                self._asks.put_nowait(WriterRequest(id, "stop", code.decode()))

    @contextlib.contextmanager
    def _claiming(self) -> Iterator[None]:
        """Count a claim in progress: Redis may assign a stream before this gateway knows of it."""
        self._num_claims += 1
        try:
            yield
        finally:
            self._num_claims -= 1

    def _count(self) -> int | None:
        return None if self._num_claims else len(self.tails.own)

    async def _take_from(self, gateway: str) -> None:
        """Take over part of the streams of a dead gateway.

        Each running gateway takes an equal fraction of the remaining streams.

        The answer of Redis can be lost after the streams were moved. So the claim id is kept
        until an answer arrives. A repeated script also returns the streams that already have this
        claim id.
        """
        is_again = gateway in self._unanswered
        claim = self._unanswered.setdefault(gateway, secrets.token_hex(8))
        arguments = (self.gateway, gateway, claim)
        with self._claiming():
            answer = await self.link.attempt(scripts.TAKE, *arguments, is_again=int(is_again))
            del self._unanswered[gateway]
            self._adopt_soon([row_of(one) for one in answer])

    async def _compare(self) -> None:
        """Compare this gateway's streams with the streams that Redis assigns to this gateway.

        A stream that this gateway writes but Redis does not assign was taken over by another
        gateway. So the stream's writer must check the log.

        A stream that Redis assigns but this gateway does not write has no writer, for example
        because the answer to a claim was lost. If the next comparison finds the same stream, the
        stream is claimed again.
        """
        answer = await self.link.attempt(scripts.OWNED, self.gateway)
        owned = {StreamId(id.decode()) for id in answer}
        self._taken = self.tails.own.keys() - owned
        for id in sorted(self._taken):
            self._asks.put_nowait(WriterRequest(id, "look"))
        unknown = owned - self.tails.own.keys() if not self._num_claims else set()
        if still_unknown := unknown & self._unknown:
            with self._claiming():
                arguments = (self.gateway, secrets.token_hex(8), *still_unknown)
                answer = await self.link.attempt(scripts.RECLAIM, *arguments)
                self._adopt_soon([row_of(one) for one in answer])
        self._unknown = unknown

    def _adopt_soon(self, rows: list[RedisRow]) -> None:
        if rows:
            logger.info("Continuing %d streams of a dead gateway", len(rows))
            self._num_claims += 1
            self.tails.spawn(self._hand_over(rows))

    async def _hand_over(self, rows: list[RedisRow]) -> None:
        try:
            self._orphans.put_nowait(await self._adopted(rows))
        finally:
            self._num_claims -= 1

    # A method that watches the tasks of the store.

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. If a task of the store fails first, raise the task's error."""
        async with race(work, *self._parts) as (working, *parts):
            for part in parts:
                if part.done() and not part.cancelled():
                    part.result()
            result: T = await working
            return result


class _RedisLog:
    """Gives a reader or writer access to a stream's log. Each new writer gets a higher epoch."""

    __slots__ = ("_epoch", "_row", "_store", "_tail")

    def __init__(self, store: RedisStore, row: RedisRow, tail: Tail, epoch: int) -> None:
        self._store = store
        self._row = row
        self._tail = tail
        self._epoch = epoch

    @property
    def next_seq(self) -> int:
        return self._tail.next_seq

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        if self._epoch == _NO_WRITER:
            raise LogConflict("append through a log that was opened for reading")
        if events:
            publish = partial(self._store.tails.extend, self._row.stream_id, list(events))
            id = self._row.stream_id
            await self._store.appends.append(id, self._epoch, expected_seq, events, publish)

    async def settle(self) -> None:
        await self._store.appends.settle(self._row.stream_id)

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        self._store._read_at[self._row.stream_id] = time.monotonic()
        events = self._tail.read(after, limit)
        if events is None:
            num = min(limit, self._tail.next_seq - after - 1)
            events = open_page(self._row, await self._stored(after, num), after, num)
        return events, self._tail.ends_with(after + len(events))

    async def _stored(self, after: int, num: int) -> Any:
        """Read from Redis; wait a short time for events that a failover has taken back.

        The writer stores such events again at its next append.
        """
        link, id = self._store.link, self._row.stream_id
        for _ in range(_NUM_TRIES):
            answer = await link.run(scripts.READ, id, after, num)
            if answer is None or int(answer[0]) > after + num:
                return answer
            await asyncio.sleep(_TRY_S)
        raise StoreStalled("The store has lost events of this stream; try again later.")

    async def wait(self, after: int) -> None:
        await self._tail.wait(after)


class _RemoteWriter:
    """The writer of a stream in another gateway."""

    def __init__(self, store: RedisStore, stream_id: StreamId, tail: Tail) -> None:
        self._store = store
        self._stream_id = stream_id
        self._tail = tail

    async def stop(self, code: str) -> None:
        await self._store.link.run(scripts.STOP, self._stream_id, code)

    def beat(self, form: str, interval_s: float) -> None:
        self._store.tails.spawn(self._ask(f"beat {form} {interval_s:g} {self._stream_id}"))

    async def _ask(self, words: str) -> None:
        link = self._store.link
        with contextlib.suppress(*LOST):
            await link.command("PUBLISH", link.key("ask"), words)

    def recent(self) -> list[AnyEvent]:
        return list(self._tail.events)


def _as_arguments(name: Name) -> tuple[str, str, str]:
    if isinstance(name, ById):
        return "id", "", name.stream_id
    if isinstance(name, ByKey):
        return "key", name.owner, name.key
    if isinstance(name, ByItem):
        return "item", name.owner, name.item
    return "conversation", name.owner, name.conversation


def _by_id(pairs: list[bytes]) -> dict[StreamId, float]:
    return {
        StreamId(id.decode()): float(score)
        for id, score in zip(pairs[::2], pairs[1::2], strict=True)
    }
