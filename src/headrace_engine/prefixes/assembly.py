"""Makes runs of the blocks that memory offers, in whatever portions it does; does no I/O.

A run is whole when it ends at a multiple of the blocks in one. What is left of a prompt becomes a
run of its own a little later. Where a state belongs to it, a run ends where a state was saved, and
nowhere else.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.ids import SlotId
from headrace_common.prefix import PrefixRun
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.offers import FullBlocks, Offer, SavedState
from headrace_engine.memory.prefix import NameChain

DELAY_S = 0.5  # that the end of a prompt waits for more
MAX_GROWING = 64  # runs; the oldest is dropped


@dataclass(slots=True)
class GrowingRun:
    """Blocks [first, end) that follow one another."""

    chain: NameChain
    token_ids: "array[int]"
    first: int
    block_ids: "array[int]"
    takings: list[int]
    since: float

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


@dataclass(slots=True, frozen=True)
class RunToKeep:
    """A run, and where in memory its numbers are, if they are there still."""

    run: PrefixRun
    block_ids: "array[int]"
    takings: tuple[int, ...]
    state: SavedState | None

    @property
    def slot_id(self) -> SlotId | None:
        return None if self.state is None else self.state.slot_id


class Assembly:
    """Runs that grow. `touch` hears of those that are on disk and were used again."""

    def __init__(
        self, disk: DiskPrefixes, has_states: bool, touch: Callable[[PrefixRun], None]
    ) -> None:
        self._disk, self._has_states, self._touch = disk, has_states, touch
        self._growing: dict[bytes, GrowingRun] = {}  # by the name of the last block
        self._whole: list[RunToKeep] = []

    @property
    def is_growing(self) -> bool:
        """Whether a run waits for more blocks."""
        return bool(self._growing)

    def add(self, offer: Offer, now: float) -> None:
        if isinstance(offer, SavedState):
            self._add_state(offer)
            return
        size, start = self._disk.blocks_per_run, offer.first
        while start < offer.end:
            end = min(offer.end, (start // size + 1) * size)
            self._add_blocks(offer, self._known_until(offer, start, end), end, now)
            start = end

    def _known_until(self, offer: FullBlocks, start: int, end: int) -> int:
        """How far of [start, end) is on disk already."""
        for known in range(end, start, -1):
            name = offer.chain.name(offer.token_ids, known - 1)
            if self._disk.reaches(name, start):
                self._touch(self._disk.run_of(offer.token_ids, offer.chain, name, known))
                return known
        return start

    def _add_blocks(self, offer: FullBlocks, start: int, end: int, now: float) -> None:
        if start == end:
            return
        share = slice(start - offer.first, end - offer.first)
        block_ids, takings = offer.block_ids[share], list(offer.takings[share])
        run = GrowingRun(offer.chain, offer.token_ids, start, block_ids, takings, now)
        if start % self._disk.blocks_per_run:
            before = offer.chain.name(offer.token_ids, start - 1)
            if (head := self._growing.pop(before, None)) is not None:
                # the head may be another sequence's, which goes on otherwise
                run.first, run.since = head.first, head.since
                run.block_ids, run.takings = head.block_ids + block_ids, head.takings + takings
        if end % self._disk.blocks_per_run == 0 and not self._has_states:
            self._whole.append(self._kept(run, run.end, None))
            return
        self._growing[run.chain.name(run.token_ids, run.end - 1)] = run
        if len(self._growing) > MAX_GROWING:
            del self._growing[next(iter(self._growing))]

    def _add_state(self, state: SavedState) -> None:
        """The run that has this boundary, at its end or within, is whole up to there."""
        for last, run in self._growing.items():
            is_within = run.first < state.end <= run.end
            if is_within and run.chain.name(run.token_ids, state.end - 1) == state.name:
                self._whole.append(self._kept(run, state.end, state))
                del self._growing[last]
                return

    def _kept(self, run: GrowingRun, end: int, state: SavedState | None) -> RunToKeep:
        num_blocks = end - run.first
        described = self._disk.run(run.token_ids, run.chain, run.first, end)
        block_ids, takings = run.block_ids[:num_blocks], tuple(run.takings[:num_blocks])
        return RunToKeep(described, block_ids, takings, state)

    def take(self, now: float, delay_s: float = DELAY_S) -> list[RunToKeep]:
        """The runs that are whole, and those that have waited long enough for more."""
        if not self._has_states:
            for last, run in list(self._growing.items()):
                if now - run.since >= delay_s:
                    self._whole.append(self._kept(run, run.end, None))
                    del self._growing[last]
        taken, self._whole = self._whole, []
        return taken
