"""Runs the two threads that write and read cached prefixes; the step loop waits for neither.

The writer copies offered blocks and checks that the blocks were not overwritten meanwhile. Then
the writer saves the copies, and pauses for as long as it worked. The reader answers one request
after another. If the disk hangs, only these two threads hang.
"""

import contextlib
import logging
import queue
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace_common.config.settings import PrefixCacheConfig
from headrace_common.ids import SlotId
from headrace_common.prefix import DiskNews, PrefixSegment, ReadSegment, SegmentRead, SegmentsOnDisk
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.offers import Offer
from headrace_engine.prefixes.assembly import Assembly, SegmentToSave
from headrace_engine.prefixes.folder import PrefixFolder, sweep
from headrace_engine.prefixes.format import Unusable
from headrace_engine.prefixes.place import AUTO, size_limit

logger = logging.getLogger(__name__)

# How many lists of offers may wait for the writer. Additional lists are dropped.
MAX_OFFERS = 256
_POLL_S, _IDLE_POLL_S = 0.1, 1.0
_LISTED_EVERY_S, _SWEPT_EVERY_S, _TOUCHED_EVERY_S = 5.0, 60.0, 600.0
# A sweep is due after this fraction of the size limit has been written.
_SWEPT_SHARE = 0.05
# Nothing is written for this many seconds after a failed write.
_PAUSE_S = 60.0
_CLOSE_S = 2.0
_UNUSABLE = {
    "damaged": "is damaged",
    "older": "has the format of another version",
    "foreign": "belongs to another prompt or model",
}

SendNews = Callable[[DiskNews], None]


class BlockData(Protocol):
    """Reads the memory that contains the blocks. `get` returns a copy of the blocks."""

    def get(self, block_ids: "array[int]", slot_id: SlotId | None) -> memoryview: ...


class BlockStatus(Protocol):
    """Answers whether blocks and states are unchanged since the offer."""

    def still_holds(self, block_ids: Iterable[int], take_counts: Iterable[int]) -> bool: ...

    def still_saved(self, slot_id: SlotId, taking: int) -> bool: ...


class DiskSite(NamedTuple):
    """Holds the folder, the folder's limits, and the keeper's list of segments in the folder."""

    folder: PrefixFolder
    limits: PrefixCacheConfig
    # The keeper's list of segments, separate from the scheduler's list.
    disk: DiskPrefixes
    has_states: bool

    @property
    def root(self) -> Path:
        return self.folder.path.parent


class OneTimeWarnings:
    """Logs each kind of problem only once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(message + " This warning is logged only once.", *values)


class PrefixKeeper:
    """Saves offered blocks to disk and reads segments for the scheduler, in two threads."""

    def __init__(self, site: DiskSite, numbers: BlockData, block_status: BlockStatus) -> None:
        warnings = OneTimeWarnings()
        self._writer = SegmentWriter(site, numbers, block_status, warnings)
        self._reader = SegmentReader(site, warnings)

    def start(self, send_news: SendNews) -> None:
        """Start both threads, which call `send_news` to report reads and stored segments."""
        self._writer.start(send_news)
        self._reader.start(send_news)

    def serve(self, offers: list[Offer], requests: list[ReadSegment]) -> None:
        """Queue these offers and read requests; never block."""
        for request in requests:
            self._reader.requests.put(request)
        if offers:
            self._writer.offer(offers)

    def close(self) -> None:
        """Write the blocks that are waiting to be saved, for at most two seconds."""
        self._reader.requests.put(None)
        self._writer.close()


class SegmentReader:
    """Reads one segment after another.

    A segment that could not be read is removed from the list of segments on disk. So the segment is
    written again after its tokens are processed.
    """

    def __init__(self, site: DiskSite, warnings: OneTimeWarnings) -> None:
        self.requests: queue.SimpleQueue[ReadSegment | None] = queue.SimpleQueue()
        self._folder, self._disk, self._warnings = site.folder, site.disk, warnings

    def start(self, send_news: SendNews) -> None:
        threading.Thread(
            target=self._run, args=(send_news,), name="prefix-reader", daemon=True
        ).start()

    def _run(self, send_news: SendNews) -> None:
        while (request := self.requests.get()) is not None:
            began = time.perf_counter()
            numbers, miss = self._read(request)
            if miss:
                self._disk.forget(request.segment.name)
            send_news(SegmentRead(request.number, numbers, time.perf_counter() - began, miss))

    def _read(self, request: ReadSegment) -> tuple[memoryview | None, str]:
        try:
            numbers = self._folder.read(request.segment, request.num_bytes)
            self._folder.touch(request.segment)
        except FileNotFoundError:
            return None, "gone"
        except Unusable as error:
            self._warnings.log_once(
                error.reason,
                "A file in %s %s. The prompts of this file are processed again.",
                self._folder.path,
                _UNUSABLE[error.reason],
            )
            if error.reason != "foreign":
                with contextlib.suppress(OSError):
                    self._folder.remove(request.segment)
            return None, error.reason
        except (OSError, MemoryError) as error:
            self._warnings.log_once(
                "read",
                "Cached prefixes cannot be read from %s (%s). Prompts are processed again.",
                self._folder.path,
                error,
            )
            return None, "failed"
        return numbers, ""


class SegmentWriter:
    """Writes one segment after another, and keeps the folder within the limits."""

    def __init__(
        self,
        site: DiskSite,
        numbers: BlockData,
        block_status: BlockStatus,
        warnings: OneTimeWarnings,
    ) -> None:
        self._site, self._numbers, self._block_status = site, numbers, block_status
        self._warnings = warnings
        self._offers: queue.SimpleQueue[list[Offer] | None] = queue.SimpleQueue()
        self._assembly = Assembly(site.disk, site.has_states, self._touch)
        # When each segment was last touched. A sweep removes entries that have expired.
        self._touched: dict[bytes, float] = {}
        self._listed_at, self._changed_at = time.monotonic(), 0.0
        self._swept_at, self._unswept_bytes = 0.0, 0
        # The largest size of the folder, as of the last sweep. Nothing is written if it is 0.
        self._max_bytes = sys.maxsize
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._send_news: SendNews

    def offer(self, offers: list[Offer]) -> None:
        if self._offers.qsize() < MAX_OFFERS:
            self._offers.put(offers)

    def start(self, send_news: SendNews) -> None:
        self._send_news = send_news
        self._thread.start()

    def close(self) -> None:
        self._offers.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        has_more = True
        self._maintain()
        while has_more:
            try:
                is_idle = not self._assembly.is_growing
                offers = self._offers.get(timeout=_IDLE_POLL_S if is_idle else _POLL_S)
                has_more = offers is not None
                for offer in offers or ():
                    self._assembly.add(offer, time.monotonic())
            except queue.Empty:
                pass
            delay = {} if has_more else {"delay_s": 0.0}
            for kept in self._assembly.take(time.monotonic(), **delay):
                began = time.monotonic()
                self._keep(kept)
                if has_more:
                    time.sleep(time.monotonic() - began)
            if has_more:
                self._maintain()

    def _keep(self, kept: SegmentToSave) -> None:
        segment, now = kept.segment, time.monotonic()
        if not self._max_bytes or now < self._paused_until:
            return
        if self._site.disk.reaches(segment.name, segment.first):
            return
        try:
            numbers = self._numbers.get(kept.block_ids, kept.slot_id)
        except MemoryError:
            return
        if not self._block_status.still_holds(kept.block_ids, kept.take_counts):
            # Another sequence has taken the blocks.
            return
        if kept.state and not self._block_status.still_saved(kept.state.slot_id, kept.state.taking):
            return
        try:
            self._write(segment, numbers)
        except OSError as error:
            self._paused_until = now + _PAUSE_S
            self._warnings.log_once(
                "write",
                "Cached prefixes cannot be written to %s (%s). Serving continues, and "
                "writing is tried again after %d s.",
                self._site.root,
                error,
                _PAUSE_S,
            )
            return
        self._unswept_bytes += len(numbers)
        self._site.disk.add(segment.name, segment.first, segment.end)
        self._send_news(
            SegmentsOnDisk(((segment.name, segment.first, segment.end),), num_bytes=len(numbers))
        )

    def _write(self, segment: PrefixSegment, numbers: memoryview) -> None:
        folder = self._site.folder
        if not folder.path.exists():
            # Another program has removed the folder, so create it again.
            folder.open()
        if not folder.has_room(len(numbers)):
            raise OSError("the disk is nearly full")
        folder.write(segment, numbers)

    def _touch(self, segment: PrefixSegment) -> None:
        """Mark a segment on disk as used, because its blocks were offered again."""
        now = time.monotonic()
        if now - self._touched.get(segment.name, -_TOUCHED_EVERY_S) < _TOUCHED_EVERY_S:
            return
        self._touched[segment.name] = now
        try:
            self._site.folder.touch(segment)
        except OSError:
            self._site.disk.forget(segment.name)

    def _maintain(self) -> None:
        now, limits = time.monotonic(), self._site.limits
        try:
            is_due = self._unswept_bytes > _SWEPT_SHARE * self._max_bytes
            if is_due or now - self._swept_at > _SWEPT_EVERY_S:
                self._swept_at, self._unswept_bytes = now, 0
                self._touched = {
                    name: at for name, at in self._touched.items() if now - at < _TOUCHED_EVERY_S
                }
                sweep(self._site.root, self._limit, limits.prefix_cache_disk_days)
            if now - self._listed_at > _LISTED_EVERY_S:
                self._listed_at = now
                self._list()
        except OSError as error:
            self._warnings.log_once(
                "list",
                "The folder of cached prefixes, %s, cannot be read (%s). Check its permissions.",
                self._site.root,
                error,
            )

    def _limit(self, free_bytes: int, used_bytes: int) -> int:
        limits, before = self._site.limits, self._max_bytes
        is_default = limits.prefix_cache_dir == AUTO
        given = limits.prefix_cache_disk_bytes
        self._max_bytes = size_limit(is_default, given, free_bytes, used_bytes)
        if before and not self._max_bytes:
            logger.info(
                "Cached prefixes are not stored while the disk of %s has only %.1f GiB of free "
                "space. Free some, or set --prefix-cache-disk-bytes.",
                self._site.root,
                (free_bytes + used_bytes) / (1 << 30),
            )
        return self._max_bytes

    def _list(self) -> None:
        """List the folder again if other processes have changed it."""
        changed_at = self._site.folder.changed_at()
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            segments = tuple(self._site.folder.stored())
            self._site.disk.set_segments(segments)
            self._send_news(SegmentsOnDisk(segments, is_all=True))
