"""Stores streams in memory, for the lifetime of the process."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from headrace.streams.events import AnyEvent, frees_key
from headrace.streams.log import LogConflict, MemoryLog
from headrace.streams.record import Record
from headrace.streams.store import (
    ByConversation,
    ById,
    ByItem,
    ByKey,
    ConversationLocked,
    Name,
    Retention,
    Stored,
    Totals,
    Unshared,
)
from headrace.streams.stores.sweep import Kept, choose
from headrace_common.ids import StreamId

_NO_WRITER = 0
# Measured size of an event's objects in memory, relative to its msgpack encoding.
_BYTES_PER_ENCODED = 6

_encode = msgspec.msgpack.Encoder().encode


class MemoryStore(Unshared):
    """The simplest store, which never stalls.

    The memory store is the reference for the other stores, and replaces the other stores in tests.
    """

    is_durable = False

    def __init__(self) -> None:
        self.stalled = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self._entries: dict[StreamId, _Entry] = {}  # oldest first
        self._names: dict[Name, _Entry] = {}
        self._items: dict[ByItem, dict[StreamId, _Entry]] = {}  # oldest first

    async def close(self) -> None:
        """Do nothing: nothing outlives this store."""

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        if (holder := self._holder(record, replaces)) is not None:
            return holder.as_reader()
        entry = _Entry(record, self._names)
        self._entries[record.id] = entry
        self._names.update(dict.fromkeys(_names(record), entry))
        for item in _items(record):
            self._items.setdefault(item, {})[record.id] = entry
        return entry.claim()

    async def find(self, name: Name) -> Stored | None:
        if isinstance(name, ByItem):
            entry = next(reversed(self._items.get(name, {}).values()), None)
        else:
            entry = self._names.get(name)
        return entry.as_reader() if entry else None

    async def find_family(self, name: ByConversation) -> list[Stored]:
        return [
            entry.as_reader()
            for other, entry in self._names.items()
            if isinstance(other, ByConversation)
            and other.owner == name.owner
            and (other == name or other.conversation.startswith(f"{name.conversation}::"))
        ]

    async def forget(self, stream_id: StreamId) -> None:
        if (entry := self._entries.pop(stream_id, None)) is not None:
            entry.log.tail.forget()
            for name in _names(entry.record):
                entry.drop(name)
            for item in _items(entry.record):
                del self._items[item][stream_id]
                if not self._items[item]:
                    del self._items[item]

    async def unfinished(self) -> list[Stored]:
        return [entry.claim() for entry in self._entries.values() if entry.ended_at is None]

    async def sweep(self, retention: Retention, now: float) -> Totals:
        kept = (entry.as_kept() for entry in self._entries.values())
        evicted, totals = choose(kept, retention, now)
        for stream_id in evicted:
            await self.forget(stream_id)
        return totals

    def _holder(self, record: Record, replaces: StreamId | None) -> "_Entry | None":
        for name in _names(record):
            entry = self._names.get(name)
            follows = record.names.follows if isinstance(name, ByConversation) else None
            ended_id = entry.record.id if entry and entry.ended_at is not None else None
            if follows is not None and ended_id != follows:
                raise ConversationLocked
            if entry is None:
                continue
            is_free = entry.ended_at is not None or entry.record.id == replaces
            if not (isinstance(name, ByConversation) and is_free):
                return entry
        return None


class _Entry:
    """One stream: its log, its current writer, and the values that a sweep needs."""

    __slots__ = ("_names", "ended_at", "epoch", "log", "num_bytes", "read_at", "record")

    def __init__(self, record: Record, names: dict[Name, "_Entry"]) -> None:
        self.record = record
        self.log = MemoryLog()
        self.epoch = _NO_WRITER
        self.num_bytes = len(_encode(record))
        self.read_at = time.time()
        self.ended_at: float | None = None
        self._names = names

    def claim(self) -> Stored:
        self.epoch += 1
        return Stored(self.record, _Log(self, self.epoch))

    def as_reader(self) -> Stored:
        self.read_at = time.time()
        return Stored(self.record, _Log(self, _NO_WRITER))

    def as_kept(self) -> Kept:
        return Kept(self.record.id, self.num_bytes, self.read_at, self.ended_at)

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Count appended events, and record the stream's end if the last event is terminal."""
        self.num_bytes += len(_encode(events)) * _BYTES_PER_ENCODED
        if self.log.tail.has_ended and self.ended_at is None:
            self.ended_at = self.read_at = time.time()
            names = self.record.names
            if names.key is not None and frees_key(events[-1]):
                self.drop(ByKey(names.owner, names.key))

    def drop(self, name: Name) -> None:
        """Release a name, unless another stream has taken over the name."""
        if self._names.get(name) is self:
            del self._names[name]


class _Log:
    """Gives a reader or writer access to a stream's log. Each new writer gets a higher epoch."""

    __slots__ = ("_entry", "_epoch")

    def __init__(self, entry: _Entry, epoch: int) -> None:
        self._entry = entry
        self._epoch = epoch

    @property
    def next_seq(self) -> int:
        return self._entry.log.next_seq

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        if self._epoch != self._entry.epoch:
            raise LogConflict("append by a writer that does not hold the log")
        await self._entry.log.append(expected_seq, events)
        self._entry.take(events)

    async def settle(self) -> None:
        """Do nothing: an append to memory is never pending."""

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        self._entry.read_at = time.time()
        return await self._entry.log.read(after, limit)

    async def wait(self, after: int) -> None:
        await self._entry.log.wait(after)


def _names(record: Record) -> list[Name]:
    """Return the names in lookup order."""
    names = record.names
    found: list[Name] = [ById(record.id)]
    if names.key is not None:
        found.append(ByKey(names.owner, names.key))
    if names.conversation is not None:
        found.append(ByConversation(names.owner, names.conversation))
    return found


def _items(record: Record) -> set[ByItem]:
    return {ByItem(record.names.owner, item) for item in record.names.items}
