"""A made-up disk below the real assembly of runs: writes late, loses, damages, and answers late."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from headrace_common.layout import MemoryLayout
from headrace_common.prefix import DiskNews, PrefixRun, ReadRun, RunRead, RunsOnDisk
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.memory import Memory
from headrace_engine.prefixes.assembly import Assembly, RunToKeep

BLOCK_BYTES = 100
Block = tuple["array[int]", str]


@dataclass
class DiskFaults:
    """How long reads take, and how often things go wrong."""

    blocks_per_run: int
    read_s: float
    slow_read: float = 0.0  # these take a hundred times as long
    lost_read: float = 0.0  # the file is gone or damaged
    lost_write: float = 0.0


class FakeNumbers(NamedTuple):
    """The contents of blocks, and the state after them, as the fake runner keeps both."""

    blocks: list[Block]
    state: Block | None

    def __len__(self) -> int:
        return BLOCK_BYTES * len(self.blocks)


class FakeDisk:
    """Outlives engines; `connect` gives it another one."""

    def __init__(self, faults: DiskFaults, layout: MemoryLayout, seed: int) -> None:
        self._faults, self._layout = faults, layout
        self._rng = Random(seed)
        self._files: dict[bytes, tuple[PrefixRun, FakeNumbers]] = {}
        self._unwritten: list[RunToKeep] = []
        self._answers: list[tuple[float, RunRead]] = []

    def view(self) -> DiskPrefixes:
        """The runs that are there now, as a scheduler knows them."""
        view = DiskPrefixes(self._layout.block_size, self._faults.blocks_per_run, BLOCK_BYTES)
        view.know((run.name, run.first, run.end) for run, _ in self._files.values())
        return view

    def connect(self, memory: Memory, copy: Callable[[RunToKeep], FakeNumbers]) -> None:
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

    def ask(self, wish: ReadRun, now: float) -> None:
        seconds = self._faults.read_s * self._rng.uniform(0.5, 2)
        if self._rng.random() < self._faults.slow_read:
            seconds *= 100
        run, numbers = self._files.get(wish.run.name, (None, None))
        is_lost = self._rng.random() < self._faults.lost_read
        answer = RunRead(wish.number, numbers, seconds)  # type: ignore[arg-type]
        if is_lost or not self.is_wanted(run, wish):
            answer = RunRead(wish.number, None, seconds, "gone")
        self._answers.append((now + seconds, answer))

    def is_wanted(self, run: PrefixRun | None, wish: ReadRun) -> bool:
        """Whether a file is what its name says: a name alone is not trusted."""
        return run == wish.run

    def news(self, now: float) -> list[DiskNews]:
        """Reads that have ended, and runs that were written in the meantime."""
        come = [answer for at, answer in self._answers if at <= now]
        self._answers = [(at, answer) for at, answer in self._answers if at > now]
        written = [kept for kept in self._unwritten if self._rng.random() < 0.5]
        self._unwritten = [kept for kept in self._unwritten if kept not in written]
        runs = [run for kept in written if (run := self._write(kept)) is not None]
        return [*come, RunsOnDisk(tuple((r.name, r.first, r.end) for r in runs))]

    def _write(self, kept: RunToKeep) -> PrefixRun | None:
        is_there = self._memory.still_holds(kept.block_ids, kept.takings)
        if kept.state is not None:
            state = kept.state
            is_there = is_there and self._memory.still_saved(state.slot_id, state.taking)
        if not is_there or self._rng.random() < self._faults.lost_write:
            return None
        self._files[kept.run.name] = kept.run, self._copy(kept)
        self._kept.add(kept.run.name, kept.run.first, kept.run.end)
        return kept.run
