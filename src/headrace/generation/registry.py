"""All streams there are: live ones with their writers, and behind them what a store keeps."""

import asyncio
from collections.abc import Iterator, Sequence

from headrace.core.errors import RequestError
from headrace.core.ids import StreamId
from headrace.generation.ended import Ended
from headrace.generation.stream import Stream
from headrace.streams.log import Log, LogGone
from headrace.streams.record import Names, Record
from headrace.streams.store import (
    ByConversation,
    ById,
    ByKey,
    Name,
    Store,
    Stored,
    StoreStalled,
)

Found = Stream | Ended


class Registry:
    """Names are resolved to stream ids here, once, at the door."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._live: dict[StreamId, Stream] = {}
        self._added = asyncio.Event()  # set, and made anew, with every stream that is added

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def add(self, stream: Stream) -> None:
        self._live[stream.record.id] = stream
        self._added.set()
        self._added = asyncio.Event()

    def remove(self, stream: Stream) -> None:
        """Unless another writer has taken its place."""
        if self._live.get(stream.record.id) is stream:
            del self._live[stream.record.id]

    async def find(self, owner: str, name: Name) -> Found | None:
        """The stream of that name, if it is this owner's."""
        if isinstance(name, ById) and (live := self._live.get(name.stream_id)):
            found: Found | None = live
        else:
            stored = await self.store.find(name)
            found = await self.wrap(stored) if stored else None
        return found if found and found.record.names.owner == owner else None

    async def find_conversations(self, owner: str, names: Sequence[str]) -> list[Found]:
        """The newest stream of each of these conversations, and of those named `<name>::…`."""
        found: dict[StreamId, Found] = {}
        for name in names:
            for stored in await self.store.find_family(ByConversation(owner, name)):
                found[stored.record.id] = await self.wrap(stored)
        return list(found.values())

    async def find_equal(self, names: Names, may_take_over: bool) -> Found | None:
        """The stream that this request would only repeat.

        By its idempotency key, whatever its state; without opt-in, one that lingers unread.
        RequestError `idempotency_key_reused` if the key stands for another request.
        """
        if names.key is not None:
            found = await self.find(names.owner, ByKey(names.owner, names.key))
            if found is not None:
                check_same(found.record, names)
            return found
        if names.is_opted_in or not may_take_over:
            return None
        for stream in self._live.values():
            theirs = stream.record.names
            is_same = (theirs.owner, theirs.digest) == (names.owner, names.digest)
            if is_same and stream.audience.is_lingering:
                return stream
        return None

    async def claim(self, record: Record) -> Stored:
        """A place in the store under the record's names; a live conversation is replaced.

        If another request has just taken the key, that one's stream is returned.
        """
        replaced = None
        while True:
            try:
                stored = await self.store.create(record, replaced)
            except StoreStalled as error:
                raise RequestError("storage_unavailable", str(error), retry_after_s=5) from None
            if stored.record.id == record.id:
                self._replace(replaced)
                return stored
            if record.names.key is not None and stored.record.names.key == record.names.key:
                check_same(stored.record, record.names)
                return stored
            replaced = stored.record.id

    async def forget(self, found: Found) -> None:
        """Removes a stream and its names; a live one is stopped first."""
        await self.stop(found)
        await self.store.forget(found.record.id)

    async def stop(self, found: Found) -> None:
        """Ends a stream; returns once its memory in the engine is free. Idempotent."""
        found.stop(RequestError("cancelled", "The stream was stopped."))
        if isinstance(found, Stream):
            await found.ended.wait()

    async def wrap(self, stored: Stored) -> Found:
        """The live stream with its writer, if it has not ended.

        One without a writer is just being opened, or taken up from an earlier server, and is
        waited for: taken for an ended one, it could not be stopped and would have no heartbeat.
        """
        while (live := self._live.get(stored.record.id)) is None:
            added = self._added
            if await _has_ended(stored.log):
                return Ended(stored.record, stored.log)
            await added.wait()
        return live

    def _replace(self, stream_id: StreamId | None) -> None:
        if stream_id is not None and (old := self._live.get(stream_id)) is not None:
            old.stop(RequestError("replaced", "A newer request of this conversation replaced it."))


def check_same(record: Record, names: Names) -> None:
    if record.names.digest != names.digest:
        raise RequestError(
            "idempotency_key_reused",
            "This Idempotency-Key was used for another request; send a fresh key.",
        )


async def _has_ended(log: Log) -> bool:
    try:
        _, has_ended = await log.read(log.next_seq - 1, 1)
    except LogGone:
        return True
    return has_ended
