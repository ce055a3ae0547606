"""The threads that write and read runs beside the step loop, which waits for neither.

The writer copies what it was offered, asks whether that was overwritten meanwhile, writes, and
rests as long as that took. The reader answers one wish after another. A disk that hangs takes a
thread with it, and nothing else.
"""

import contextlib
import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace_common.config.settings import PrefixCacheConfig
from headrace_common.ids import SlotId
from headrace_common.prefix import DiskNews, PrefixRun, ReadRun, RunRead, RunsOnDisk
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.offers import Offer
from headrace_engine.prefixes.assembly import Assembly, RunToKeep
from headrace_engine.prefixes.folder import PrefixFolder, sweep
from headrace_engine.prefixes.format import Unusable

logger = logging.getLogger(__name__)

MAX_OFFERS = 256  # portions that wait for the writer; what is more is dropped
_POLL_S, _IDLE_POLL_S = 0.1, 1.0
_LISTED_EVERY_S, _SWEPT_EVERY_S, _TOUCHED_EVERY_S = 5.0, 60.0, 600.0
_SWEPT_SHARE = 0.05  # of the size allowed; a sweep is due once so much was written
_PAUSE_S = 60.0  # after a write failed
_CLOSE_S = 2.0

Tell = Callable[[DiskNews], None]


class Numbers(Protocol):
    """The memory that holds the blocks; `get` copies them."""

    def get(self, block_ids: "array[int]", slot_id: SlotId | None) -> memoryview: ...


class Books(Protocol):
    """The knowledge whether blocks and states are what they were."""

    def still_holds(self, block_ids: Iterable[int], takings: Iterable[int]) -> bool: ...

    def still_saved(self, slot_id: SlotId, taking: int) -> bool: ...


class DiskSite(NamedTuple):
    """The folder, and what may be in it."""

    folder: PrefixFolder
    limits: PrefixCacheConfig
    disk: DiskPrefixes  # the keeper's own view, as large as the scheduler's
    has_states: bool

    @property
    def root(self) -> Path:
        return self.folder.path.parent


class Warnings:
    """Says each kind of trouble once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def say(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(message + " This is told once.", *values)


class PrefixKeeper:
    """Keeps what memory offers, and reads what the scheduler wishes. Threads from `start` on."""

    def __init__(self, site: DiskSite, numbers: Numbers, books: Books) -> None:
        warnings = Warnings()
        self._writer = RunWriter(site, numbers, books, warnings)
        self._reader = RunReader(site, warnings)

    def start(self, tell: Tell) -> None:
        """`tell` gets the news, from either thread."""
        self._writer.start(tell)
        self._reader.start(tell)

    def serve(self, offers: list[Offer], wishes: list[ReadRun]) -> None:
        """Takes over; never waits."""
        for wish in wishes:
            self._reader.wishes.put(wish)
        if offers:
            self._writer.offer(offers)

    def close(self) -> None:
        """Writes what was offered, if that takes no longer than a moment."""
        self._reader.wishes.put(None)
        self._writer.close()


class RunReader:
    """Reads one run after another. A run that was a miss is written again once it is computed."""

    def __init__(self, site: DiskSite, warnings: Warnings) -> None:
        self.wishes: queue.SimpleQueue[ReadRun | None] = queue.SimpleQueue()
        self._folder, self._disk, self._warnings = site.folder, site.disk, warnings

    def start(self, tell: Tell) -> None:
        threading.Thread(target=self._run, args=(tell,), name="prefix-reader", daemon=True).start()

    def _run(self, tell: Tell) -> None:
        while (wish := self.wishes.get()) is not None:
            began = time.perf_counter()
            numbers, miss = self._read(wish)
            if miss:
                self._disk.forget(wish.run.name)
            tell(RunRead(wish.number, numbers, time.perf_counter() - began, miss))

    def _read(self, wish: ReadRun) -> tuple[memoryview | None, str]:
        try:
            numbers = self._folder.read(wish.run, wish.num_bytes)
            self._folder.touch(wish.run)
        except FileNotFoundError:
            return None, "gone"
        except Unusable as error:
            self._warnings.say(
                error.reason, "A cached prefix on disk is %s; it is computed instead.", error.reason
            )
            if error.reason != "foreign":
                with contextlib.suppress(OSError):
                    self._folder.remove(wish.run)
            return None, error.reason
        except (OSError, MemoryError) as error:
            self._warnings.say(
                "read", "Cached prefixes cannot be read from %s: %s.", self._folder.path, error
            )
            return None, "failed"
        return numbers, ""


class RunWriter:
    """Writes one run after another, and keeps the folder within its limits."""

    def __init__(self, site: DiskSite, numbers: Numbers, books: Books, warnings: Warnings) -> None:
        self._site, self._numbers, self._books = site, numbers, books
        self._warnings = warnings
        self._offers: queue.SimpleQueue[list[Offer] | None] = queue.SimpleQueue()
        self._assembly = Assembly(site.disk, site.has_states, self._touch)
        self._touched: dict[bytes, float] = {}
        self._listed_at, self._changed_at = time.monotonic(), 0.0
        self._swept_at, self._unswept_bytes = 0.0, 0
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._tell: Tell

    def offer(self, offers: list[Offer]) -> None:
        if self._offers.qsize() < MAX_OFFERS:
            self._offers.put(offers)

    def start(self, tell: Tell) -> None:
        self._tell = tell
        self._thread.start()

    def close(self) -> None:
        self._offers.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        has_more = True
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
                self._look_after()

    def _keep(self, kept: RunToKeep) -> None:
        run, now = kept.run, time.monotonic()
        if now < self._paused_until or self._site.disk.reaches(run.name, run.first):
            return
        try:
            numbers = self._numbers.get(kept.block_ids, kept.slot_id)
        except MemoryError:
            return
        if not self._books.still_holds(kept.block_ids, kept.takings):
            return  # others needed the blocks
        if kept.state and not self._books.still_saved(kept.state.slot_id, kept.state.taking):
            return
        try:
            self._write(run, numbers)
        except OSError as error:
            self._paused_until = now + _PAUSE_S
            self._warnings.say(
                "write",
                "Prefixes cannot be kept in %s: %s. Serving goes on without.",
                self._site.root,
                error,
            )
            return
        self._unswept_bytes += len(numbers)
        self._site.disk.add(run.name, run.first, run.end)
        self._tell(RunsOnDisk(((run.name, run.first, run.end),), num_bytes=len(numbers)))

    def _write(self, run: PrefixRun, numbers: memoryview) -> None:
        folder = self._site.folder
        if not folder.path.exists():
            folder.open()  # it was cleared
        if not folder.has_room(len(numbers)):
            raise OSError("the disk is nearly full")
        folder.write(run, numbers)

    def _touch(self, run: PrefixRun) -> None:
        """Notes that a run is in use, though memory has it: it stays on disk, too."""
        now = time.monotonic()
        if now - self._touched.get(run.name, -_TOUCHED_EVERY_S) < _TOUCHED_EVERY_S:
            return
        self._touched[run.name] = now
        try:
            self._site.folder.touch(run)
        except OSError:
            self._site.disk.forget(run.name)

    def _look_after(self) -> None:
        now, limits = time.monotonic(), self._site.limits
        try:
            most = limits.prefix_cache_disk_bytes
            is_due = self._unswept_bytes > _SWEPT_SHARE * most
            if is_due or now - self._swept_at > _SWEPT_EVERY_S:
                self._swept_at, self._unswept_bytes = now, 0
                sweep(self._site.root, most, limits.prefix_cache_disk_days)
            if now - self._listed_at > _LISTED_EVERY_S:
                self._listed_at = now
                self._list()
        except OSError as error:
            self._warnings.say("list", "%s cannot be read: %s.", self._site.root, error)

    def _list(self) -> None:
        """Others write there and remove, too."""
        changed_at = self._site.folder.changed_at()
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            runs = tuple(self._site.folder.stored())
            self._site.disk.know(runs)
            self._tell(RunsOnDisk(runs, is_all=True))
