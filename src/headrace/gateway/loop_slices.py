"""Slices of the event loop for long logs and forms, and an index of the bytes of bodies."""

import asyncio
import weakref
from array import array
from collections import OrderedDict, deque

from headrace.generation.registry import Found
from headrace.protocols.dialect import WireFrames
from headrace.streams.events import is_terminal
from headrace.streams.log import Log, LogGone
from headrace.streams.record import Record
from headrace.workers.job_line import OWNER
from headrace_common.ids import StreamId

SLICE_S = 0.005
_MAX_STREAMS = 256
_PAGE = 256


async def slice_of_loop() -> None:
    """Return when the caller may do its next small piece of work.

    Returns at once while a slice lasts. After it, one caller continues in each turn of the loop, so
    a turn takes a slice and one piece, however many callers wait. Keys take turns; the caller that
    has waited longest continues for its key.
    """
    loop = asyncio.get_running_loop()
    slices = _of_loop.get(loop)
    if slices is None:
        slices = _of_loop[loop] = _Slices()
    if loop.time() >= slices.ends_at:
        await slices.next()


class _Slices:
    def __init__(self) -> None:
        self.ends_at = 0.0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By key; the key whose turn is next comes first."""
        self._is_due = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(OWNER.get(), deque()).append(future)
        self._ask()
        await future
        self.ends_at = loop.time() + SLICE_S

    def _ask(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_due = False
        while self._waiting:
            owner, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[owner] = futures
            if not future.done():  # else it has left
                future.set_result(None)
                break
        self._ask()


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slices] = (
    weakref.WeakKeyDictionary()
)


class BodyIndex:
    """The streams that were asked for last. Who waits does the counting; if all leave, it stops."""

    def __init__(self) -> None:
        self._counts: OrderedDict[StreamId, _Counts] = OrderedDict()

    async def num_bytes(self, found: Found) -> int:
        """The length of the body so far."""
        counts = self._of(found.record)
        await counts.extend(found.log, found.log.next_seq)
        return counts.num_bytes

    async def num_frames(self, found: Found, seq: int) -> int:
        """The number of frames that the body has of one event, which must be in the log."""
        counts = self._of(found.record)
        await counts.extend(found.log, seq + 1)
        return counts.num_frames[seq]

    def _of(self, record: Record) -> "_Counts":
        counts = self._counts.get(record.id)
        if counts is None:
            counts = self._counts[record.id] = _Counts(record)
        self._counts.move_to_end(record.id)
        if len(self._counts) > _MAX_STREAMS:
            self._counts.popitem(last=False)
        return counts


class _Counts:
    """The counts of one body, and the state of its rendering until the log has ended."""

    def __init__(self, record: Record) -> None:
        self.num_bytes = 0
        self.num_frames = array("H")  # by seq
        self._frames: WireFrames | None = WireFrames(record)
        self._counting = asyncio.Lock()

    async def extend(self, log: Log, next_seq: int) -> None:
        """Counts what lies before `next_seq`."""
        async with self._counting:
            while len(self.num_frames) < next_seq:
                await self._count_page(log)

    async def _count_page(self, log: Log) -> None:
        page, _ = await log.read(len(self.num_frames) - 1, _PAGE)
        if not page:
            raise LogGone
        for event in page:
            await slice_of_loop()
            assert self._frames, "nothing follows the end of a log"
            frames = self._frames.render(event)
            self.num_bytes += sum(map(len, frames))
            self.num_frames.append(len(frames))
            if is_terminal(event):
                self._frames = None
