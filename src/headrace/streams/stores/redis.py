"""Streams in Redis, where every gateway finds them, and one at a time writes each.

What a reader sees is decided on the event loop, after Redis has answered: for streams written here
once an append is answered, for others once it is published.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.streams.events import AnyEvent
from headrace.streams.log import LogConflict, LogUnsound, Tail
from headrace.streams.record import Record
from headrace.streams.store import (
    Ask,
    ByConversation,
    ById,
    ByKey,
    Hear,
    Name,
    Retention,
    SeenGateway,
    Stored,
    StoreStalled,
    Totals,
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
_NUM_TRIES, _TRY_S = 20, 0.05  # while what is found here is only about to be known here
_NO_WRITER = 0

_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class RedisStore:
    """Opened by `open`; `close` it before the event loop ends."""

    is_durable = True

    def __init__(self, link: Link) -> None:
        self.gateway = secrets.token_hex(8)
        self.stalled = link.stalled
        self.writable = link.writable
        self.link = link
        self.tails = LiveTails(link, self._take_ask, self._ask_missed_stops)
        self._num_claims = 0  # under way
        self._strays: set[StreamId] = set()  # said to be written here, and unknown here
        self._unanswered: dict[str, str] = {}  # claims, by the gateway that has gone
        self._read_at: dict[StreamId, float] = {}  # since the last sweep
        self._orphans: asyncio.Queue[list[Stored]] = asyncio.Queue()
        self._asks: asyncio.Queue[Ask] = asyncio.Queue()
        self.appends = Appends(link, self.tails.own.discard)
        self._lease = GatewayLease(link, self.gateway, self._count, self._take_from, self._compare)
        works = (self.appends.run(), self.tails.run(), self._lease.run())
        self._parts = [asyncio.create_task(work, name="redis") for work in works]

    @property
    def on_commit(self) -> Hear:
        return self.appends.on_commit

    @on_commit.setter
    def on_commit(self, hear: Hear) -> None:
        self.appends.on_commit = hear

    @classmethod
    async def open(cls, url: str) -> "RedisStore":
        """StateError says why the server cannot be used. Logs what its settings risk."""
        link = Link(url)
        try:
            for risk in await link.check():
                logger.warning("%s", risk)
        except BaseException:
            await link.close()
            raise
        return cls(link)

    async def close(self) -> None:
        """Commits what was appended, and leaves its live streams to other gateways."""
        await self.appends.close()
        self.tails.close()
        while pending := [part for part in self._parts if not part.done()]:
            for part in pending:
                part.cancel()  # a client that connects or reads just then may pass over one
            await asyncio.wait(pending, timeout=_TRY_S)
        with contextlib.suppress(*LOST):
            await self.link.attempt(scripts.RELEASE, self.gateway)
        await self.link.close()

    # names

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        names = record.names
        self._num_claims += 1
        try:
            is_new, found = await self.link.run(
                scripts.CREATE,
                *(record.id, names.owner, names.conversation or "", names.key or ""),
                *(_encode(record), replaces or "", self.gateway, secrets.token_hex(8)),
            )
            row = row_of(found)
            if is_new:
                return self._claimed(row, record, self.tails.create(record.id))
        finally:
            self._num_claims -= 1
        held = await self._stored(row)
        return held or await self._known(ById(row.stream_id)) or await self.create(record, replaces)

    async def find(self, name: Name) -> Stored | None:
        try:
            return await self._known(name)
        except LogUnsound:
            if isinstance(name, ByKey):
                return None
            raise

    async def _known(self, name: Name) -> Stored | None:
        """Finds a stream; one written here may be known only in a moment, or just have ended."""
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
        self._num_claims += 1
        try:
            claim = secrets.token_hex(8)
            answer = await self.link.run(scripts.UNFINISHED, self.gateway, claim)
            return await self._adopted([row_of(one) for one in answer])
        finally:
            self._num_claims -= 1

    async def sweep(self, retention: Retention, now: float) -> Totals:
        read_at, self._read_at = self._read_at, {}
        pairs = [part for id, at in read_at.items() for part in (repr(at), id)]
        await self.link.run(scripts.TOUCH, *pairs)
        sizes, read, ended = map(_by_id, await self.link.run(scripts.KEPT))
        kept = [Kept(id, int(size), read.get(id, 0.0), ended.get(id)) for id, size in sizes.items()]
        evicted, totals = choose(kept, retention, now)
        for start in range(0, len(evicted), _EVICTED_AT_ONCE):
            await self._delete(evicted[start : start + _EVICTED_AT_ONCE])
        return totals

    def tell(self, about: Callable[[], bytes]) -> None:
        self._lease.about = about

    async def gateways(self) -> list[SeenGateway]:
        answer = await self.link.run(scripts.GATEWAYS)
        return [SeenGateway(num, about, id.decode() == self.gateway) for id, about, num in answer]

    async def orphans(self) -> list[Stored]:
        return await self._unless_lost(self._orphans.get())

    async def asked(self) -> Ask:
        return await self._unless_lost(self._asks.get())

    async def _stored(self, row: RedisRow) -> Stored | None:
        """A stream for a reader. None if it is written here, and not known here."""
        record = row.record
        self._read_at[row.stream_id] = time.time()
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
        """A stream for its writer."""
        log = _RedisLog(self, row, tail, row.epoch)
        return Stored(record, log, stop_code=row.stop_code)

    async def _adopted(self, rows: Sequence[RedisRow]) -> list[Stored]:
        """Streams that this gateway has just claimed; what was followed till now goes on."""
        adopted = []
        for row in sorted(rows, key=lambda row: row.n):
            try:
                record = row.record
            except LogUnsound as unsound:
                logger.warning("The stream number %d is left as it is: %s", row.n, unsound.reason)
                continue
            adopted.append(self._claimed(row, record, await self.tails.adopt(row)))
        return adopted

    async def _delete(self, stream_ids: list[StreamId]) -> None:
        await self.link.run(scripts.FORGET, *stream_ids)
        for stream_id in stream_ids:
            self.tails.gone(stream_id)

    # who writes what

    def _take_ask(self, words: list[str]) -> None:
        what, *details, id = words
        if StreamId(id) in self.tails.own:
            interval_s = float(details[1]) if what == "beat" else 0.0
            self._asks.put_nowait(Ask(StreamId(id), what, details[0], interval_s))

    async def _ask_missed_stops(self) -> None:
        """Applies the stops that were published while nothing was heard."""
        own = list(self.tails.own)
        codes = await self.link.run(scripts.STOPS, *own, is_patient=True)
        for id, code in zip(own, codes, strict=True):
            if code is not None:
                self._asks.put_nowait(Ask(id, "stop", code.decode()))

    def _count(self) -> int | None:
        return None if self._num_claims else len(self.tails.own)

    async def _take_from(self, gateway: str) -> None:
        """Takes a share of the streams of a gateway that has gone."""
        is_again = gateway in self._unanswered
        claim = self._unanswered.setdefault(gateway, secrets.token_hex(8))
        arguments = (self.gateway, gateway, claim)
        answer = await self.link.attempt(scripts.TAKE, *arguments, is_again=int(is_again))
        del self._unanswered[gateway]
        self._take_in([row_of(one) for one in answer])

    async def _compare(self) -> None:
        """Notices streams that were taken from here, and those that nobody here knows of."""
        answer = await self.link.attempt(scripts.OWNED, self.gateway)
        owned = {StreamId(id.decode()) for id in answer}
        for id in self.tails.own - owned:
            self._asks.put_nowait(Ask(id, "look"))
        strays = owned - self.tails.own if not self._num_claims else set()
        if lasting := strays & self._strays:
            claim = secrets.token_hex(8)
            answer = await self.link.attempt(scripts.RECLAIM, self.gateway, claim, *lasting)
            self._take_in([row_of(one) for one in answer])
        self._strays = strays

    def _take_in(self, rows: list[RedisRow]) -> None:
        if rows:
            logger.info("Goes on with %d streams of a gateway that has gone", len(rows))
            self._num_claims += 1
            self.tails.spawn(self._hand_over(rows))

    async def _hand_over(self, rows: list[RedisRow]) -> None:
        try:
            self._orphans.put_nowait(await self._adopted(rows))
        finally:
            self._num_claims -= 1

    # tasks

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`; raises the failure of a task that the store needs, if one fails."""
        async with race(work, *self._parts) as (working, *parts):
            for part in parts:
                if part.done() and not part.cancelled():
                    part.result()
            result: T = await working
            return result


class _RedisLog:
    """A stream's log as the writer of one epoch, or a reader, holds it."""

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
            raise LogConflict("append by a reader")
        if events:
            publish = partial(self._store.tails.extend, self._row.stream_id, list(events))
            id = self._row.stream_id
            await self._store.appends.append(id, self._epoch, expected_seq, events, publish)

    async def settle(self) -> None:
        await self._store.appends.settle(self._row.stream_id)

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        self._store._read_at[self._row.stream_id] = time.time()
        events = self._tail.read(after, limit)
        if events is None:
            num = min(limit, self._tail.next_seq - after - 1)
            link, id = self._store.link, self._row.stream_id
            answer = await link.run(scripts.READ, id, after, num)
            events = open_page(self._row, answer, after, num)
        return events, self._tail.ends_with(after + len(events))

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
    return "conversation", name.owner, name.conversation


def _by_id(pairs: list[bytes]) -> dict[StreamId, float]:
    return {
        StreamId(id.decode()): float(score)
        for id, score in zip(pairs[::2], pairs[1::2], strict=True)
    }
