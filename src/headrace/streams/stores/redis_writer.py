"""Sends appends to Redis in order; one script sends many waiting appends."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from headrace.streams.events import AnyEvent, frees_key, is_terminal
from headrace.streams.log import LogConflict, LogTaken
from headrace.streams.store import OnCommit, StoreStalled
from headrace.streams.stores import redis_scripts as scripts
from headrace.streams.stores.redis_link import ANSWER_S, Link
from headrace_common.ids import StreamId

MAX_WAITING_BYTES = 64 << 20
# The maximum number of appends per script. Redis runs nothing else during a script.
_MAX_AT_ONCE = 256

_encode = msgspec.msgpack.Encoder().encode


class _Append:
    __slots__ = ("arguments", "began", "done", "num_bytes", "publish", "stream_id")

    def __init__(
        self,
        stream_id: StreamId,
        arguments: tuple[str | bytes | int, ...],
        num_bytes: int,
        publish: Callable[[], object],
    ) -> None:
        self.stream_id = stream_id
        self.arguments = arguments
        self.num_bytes = num_bytes
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
        else:
            self.done.set_exception(LogConflict(f"append that does not continue a log: {outcome}"))


class Appends:
    """Collects appends and sends them; `run` is its task.

    Redis syncs its disk once for all appends of a script.
    """

    def __init__(
        self, link: Link, on_taken: Callable[[StreamId], None], on_commit: OnCommit
    ) -> None:
        self._link = link
        self._on_taken = on_taken
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
        data, last = _encode(events), events[-1]
        waiting = self._num_waiting_bytes
        if self._is_closed:
            raise StoreStalled("The stream store is closed.")
        if waiting and waiting + len(data) > MAX_WAITING_BYTES:
            raise StoreStalled(
                f"{waiting} bytes are waiting to be stored; the limit is {MAX_WAITING_BYTES}."
            )
        ends = (int(is_terminal(last)), int(frees_key(last)))
        arguments = (stream_id, epoch, expected_seq, len(events), data, *ends)
        append = _Append(stream_id, arguments, len(data), publish)
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
        arguments = [argument for append in batch for argument in append.arguments]
        outcomes = await self._link.run(scripts.APPEND, *arguments, is_patient=True)
        now = time.monotonic()
        for append, outcome in zip(batch, outcomes, strict=True):
            self._num_waiting_bytes -= append.num_bytes
            if outcome == b"taken":
                self._on_taken(append.stream_id)
            else:
                self._on_commit(now - append.began)
            append.settle(outcome.decode())

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
