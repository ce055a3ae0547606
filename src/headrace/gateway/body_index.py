"""Counts the bytes and frames of response bodies.

Clients that resume a stream at a byte or at a frame need these counts.
"""

import asyncio
from array import array
from collections import OrderedDict

from headrace.generation.registry import Found
from headrace.protocols.dialect import WireFrames
from headrace.streams.events import is_terminal
from headrace.streams.log import Log, LogGone
from headrace.streams.record import Record
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.ids import StreamId

_MAX_STREAMS = 256
_PAGE = 256


class BodyIndex:
    """Caches the numbers of bytes and frames of the streams that were requested most recently.

    A reader that needs a number counts the log's frames in its own task. So the counting stops
    when the reader leaves.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[StreamId, _Counts] = OrderedDict()

    async def num_bytes(self, found: Found) -> int:
        """Return the length of the body so far, in bytes."""
        counts = self._of(found.record)
        await counts.extend(found.log, found.log.next_seq)
        return counts.num_bytes

    async def num_frames(self, found: Found, seq: int) -> int:
        """Return the number of frames in which the body renders event `seq`.

        The log must already have the event.
        """
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
    """Counts one body, and keeps the rendering's state until the log has ended."""

    def __init__(self, record: Record) -> None:
        self.num_bytes = 0
        # The number of frames of each event. The index is the event's seq.
        self.num_frames = array("H")
        self._frames: WireFrames | None = WireFrames(record)
        self._counting = asyncio.Lock()

    async def extend(self, log: Log, next_seq: int) -> None:
        """Count the events before `next_seq`."""
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
