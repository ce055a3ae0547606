"""Sends appends to Redis in order; one script sends many waiting appends."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from headrace.streams.events import AnyEvent, frees_key, is_terminal
from headrace.streams.log import LogConflict, LogGone, LogTaken
from headrace.streams.store import OnCommit, StoreStalled
from headrace.streams.stores import redis_scripts as scripts
from headrace.streams.stores.redis_link import ANSWER_S, Argument, Link
from headrace.streams.stores.redis_tails import LiveTails
from headrace_common.ids import StreamId

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
# The maximum number of appends per script. Redis runs nothing else during a script.
_MAX_AT_ONCE = 256

_encode = msgspec.msgpack.Encoder().encode


class _Append:
    __slots__ = (
        "arguments",
        "began",
        "done",
        "epoch",
        "events",
        "num_bytes",
        "publish",
        "stream_id",
    )

    def __init__(
        self,
        stream_id: StreamId,
        epoch: int,
        events: Sequence[AnyEvent],
        publish: Callable[[], object],
    ) -> None:
        self.stream_id = stream_id
        self.epoch = epoch
        self.events = events
        data = _encode(events)
        self.arguments = _arguments(stream_id, epoch, events, data)
        self.num_bytes = len(data)
        self.publish = publish
        self.began = time.monotonic()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: str) -> None:
        """Set the outcome. The events are published even if nobody awaits the append."""
        if outcome == "ok":
            self.publish()
        if self.done.done():
            return
        if outcome == "ok":
            self.done.set_result(None)
        elif outcome == "taken":
            self.done.set_exception(LogTaken("another server writes this log now"))
        elif outcome == "gone":
            self.done.set_exception(LogGone())
        else:
            self.done.set_exception(LogConflict(f"append that does not continue a log: {outcome}"))


class Appends:
    """Collects appends and sends them; `run` is its task.

    Redis syncs its disk once for all appends of a script.

    If Redis has lost the last events of a log, for example in a failover to a replica, the writer
    of the log appends these events again. If they are no longer in memory, the log can only end.
    """

    def __init__(self, link: Link, gateway: str, tails: LiveTails, on_commit: OnCommit) -> None:
        self._link = link
        self._gateway = gateway
        self._tails = tails
        self._on_commit = on_commit
        self._waiting: deque[_Append] = deque()
        # Appends that Redis has not answered yet.
        self._sent: list[_Append] = []
        self._num_waiting_bytes = 0
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False

    async def append(
        self,
        stream_id: StreamId,
        epoch: int,
        expected_seq: int,
        events: Sequence[AnyEvent],
        publish: Callable[[], object],
    ) -> None:
        """Append events and call `publish` right after the commit."""
        if expected_seq != events[0].seq:
            raise LogConflict(f"append of event {events[0].seq} at {expected_seq}")
        append = _Append(stream_id, epoch, events, publish)
        waiting = self._num_waiting_bytes
        if self._is_closed:
            raise StoreStalled("The stream store is closed.")
        if waiting and waiting + append.num_bytes > MAX_WAITING_BYTES:
            raise StoreStalled(
                f"{waiting} bytes are waiting to be stored; the limit is {MAX_WAITING_BYTES}."
            )
        self._waiting.append(append)
        self._num_waiting_bytes += append.num_bytes
        self._is_idle.clear()
        self._has_work.set()
        await asyncio.shield(append.done)

    async def settle(self, stream_id: StreamId) -> None:
        """Wait for all appends to this stream, including cancelled appends."""
        under_way = (*self._sent, *self._waiting)
        if dones := [it.done for it in under_way if it.stream_id == stream_id]:
            await asyncio.wait(dones)

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._waiting:
                num = min(len(self._waiting), _MAX_AT_ONCE)
                self._sent = [self._waiting.popleft() for _ in range(num)]
                await self._commit(self._sent)
                self._sent = []
            self._is_idle.set()

    async def _commit(self, batch: list[_Append]) -> None:
        outcomes = await self._run([append.arguments for append in batch])
        for append, outcome in zip(batch, outcomes, strict=True):
            if outcome.startswith("behind "):
                outcome = await self._mend(append, int(outcome.split()[1]))
            self._num_waiting_bytes -= append.num_bytes
            if outcome == "taken":
                self._tails.lose(append.stream_id, append.epoch)
            elif outcome == "gone":
                self._tails.gone(append.stream_id)
            else:
                self._on_commit(time.monotonic() - append.began)
            append.settle(outcome)

    async def _run(self, appends: Sequence[tuple[Argument, ...]]) -> list[str]:
        words = [word for arguments in appends for word in arguments]
        outcomes = await self._link.run(scripts.APPEND, self._gateway, *words, is_patient=True)
        if b"ok" in outcomes:
            self._link.heard()
        return [outcome.decode() for outcome in outcomes]

    async def _mend(self, append: _Append, next_seq: int) -> str:
        """Repeat an append after the events that Redis has lost; return its outcome.

        `next_seq` is the number of the first event that Redis does not have.
        """
        id, epoch, events = append.stream_id, append.epoch, append.events
        missing = self._tails.recent(id, next_seq, events[0].seq)
        if missing is not None:
            logger.warning("Redis has lost %d events of a stream; storing them again", len(missing))
            before = _arguments(id, epoch, missing, _encode(missing))
            first, second = await self._run([before, append.arguments])
            return second if first == "ok" else first
        logger.warning("Redis has lost too many events of a stream, which now ends")
        if not is_terminal(events[-1]):
            return "conflict"
        end = [msgspec.structs.replace(events[-1], seq=next_seq)]
        (outcome,) = await self._run([_arguments(id, epoch, end, _encode(end))])
        return outcome

    async def close(self) -> None:
        """Wait a short time for pending appends, then fail the appends that are still waiting."""
        self._is_closed = True
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._is_idle.wait()
        except TimeoutError:
            pass
        for append in self._waiting:
            if not append.done.done():
                append.done.set_exception(StoreStalled("The stream store is closed."))


def _arguments(
    id: StreamId, epoch: int, events: Sequence[AnyEvent], data: bytes
) -> tuple[Argument, ...]:
    """Return one append as arguments of the script; `data` are the encoded events."""
    last = events[-1]
    ends = (int(is_terminal(last)), int(frees_key(last)))
    return (id, epoch, events[0].seq, len(events), data, *ends)
