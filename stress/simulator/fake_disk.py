"""A simulated disk for the real assembly of cache segments: slow, lost and damaged files."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from headrace_common.layout import MemoryLayout
from headrace_common.prefix import DiskNews, PrefixSegment, ReadSegment, SegmentRead, SegmentsOnDisk
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Memory
from headrace_engine.prefixes.assembly import Assembly, SegmentToSave

BLOCK_BYTES = 100
Block = tuple["array[int]", str]


@dataclass
class DiskFaults:
    """How long reads take, and how often faults happen."""

    blocks_per_segment: int
    read_s: float
    # The probability that a read takes a hundred times as long.
    slow_read: float = 0.0
    # The probability that a file is missing or damaged.
    lost_read: float = 0.0
    lost_write: float = 0.0


class FakeNumbers(NamedTuple):
    """The contents of blocks, and the state after them, in the fake runner's format."""

    blocks: list[Block]
    state: Block | None

    def __len__(self) -> int:
        return BLOCK_BYTES * len(self.blocks)


class FakeDisk:
    """A simulated disk that outlives engines; `connect` attaches the disk to a new engine."""

    def __init__(self, faults: DiskFaults, layout: MemoryLayout, seed: int) -> None:
        self._faults, self._layout = faults, layout
        self._rng = Random(seed)
        self._files: dict[bytes, tuple[PrefixSegment, FakeNumbers]] = {}
        self._unwritten: list[SegmentToSave] = []
        self._answers: list[tuple[float, SegmentRead]] = []

    def view(self) -> DiskPrefixes:
        """Return the index of the segments that exist now, as a scheduler holds it."""
        view = DiskPrefixes(self._layout.block_size, self._faults.blocks_per_segment, BLOCK_BYTES)
        view.set_segments((run.name, run.first, run.end) for run, _ in self._files.values())
        return view

    def connect(self, memory: Memory, copy: Callable[[SegmentToSave], FakeNumbers]) -> None:
        self._memory, self._copy = memory, copy
        self._kept = self.view()
        has_states = self._layout.num_slots > 0
        self._assembly = Assembly(self._kept, has_states, lambda run: None)
        self._unwritten.clear()
        self._answers.clear()

    @property
    def next_at(self) -> float | None:
        return min((at for at, _ in self._answers), default=None)

    def take_offers(self, now: float) -> None:
        assert self._memory.offers is not None
        for offer in self._memory.offers.take():
            self._assembly.add(offer, now)
        self._unwritten += self._assembly.take(now, self._rng.choice([0.0, 0.05, 0.5]))

    def ask(self, wish: ReadSegment, now: float) -> None:
        seconds = self._faults.read_s * self._rng.uniform(0.5, 2)
        if self._rng.random() < self._faults.slow_read:
            seconds *= 100
        run, numbers = self._files.get(wish.segment.name, (None, None))
        is_lost = self._rng.random() < self._faults.lost_read
        answer = SegmentRead(wish.number, numbers, seconds)  # type: ignore[arg-type]
        if is_lost or not self.is_wanted(run, wish):
            answer = SegmentRead(wish.number, None, seconds, "gone")
        self._answers.append((now + seconds, answer))

    def is_wanted(self, run: PrefixSegment | None, wish: ReadSegment) -> bool:
        """Return whether a file contains what was requested, without trusting the file's name."""
        return run == wish.segment

    def news(self, now: float) -> list[DiskNews]:
        """Return the reads that ended, and the segments that were written, since the last call."""
        come = [answer for at, answer in self._answers if at <= now]
        self._answers = [(at, answer) for at, answer in self._answers if at > now]
        written = [kept for kept in self._unwritten if self._rng.random() < 0.5]
        self._unwritten = [kept for kept in self._unwritten if kept not in written]
        runs = [run for kept in written if (run := self._write(kept)) is not None]
        return [*come, SegmentsOnDisk(tuple((r.name, r.first, r.end) for r in runs))]

    def _write(self, kept: SegmentToSave) -> PrefixSegment | None:
        is_there = self._memory.still_holds(kept.block_ids, kept.take_counts)
        if kept.state is not None:
            state = kept.state
            is_there = is_there and self._memory.still_saved(state.slot_id, state.taking)
        if not is_there or self._rng.random() < self._faults.lost_write:
            return None
        self._files[kept.segment.name] = kept.segment, self._copy(kept)
        self._kept.add(kept.segment.name, kept.segment.first, kept.segment.end)
        return kept.segment
