"""Joins the blocks that memory offers into segments for the disk; does no I/O.

A segment is complete when it ends at a multiple of `blocks_per_segment`. The rest of a prompt
becomes a shorter segment after a delay. For a model with recurrent states, a segment ends only
where a state was saved.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.ids import SlotId
from headrace_common.prefix import PrefixSegment
from headrace_engine.memory.disk import DiskPrefixes
from headrace_engine.memory.offers import FullBlocks, Offer, SavedState
from headrace_engine.memory.prefix import NameChain

# How long the end of a prompt waits for more blocks, in seconds.
DELAY_S = 0.5
# A shorter prefix is not written, because processing its tokens again takes little time. The prefix
# waits for more blocks of its sequence. A later prompt that continues the prefix offers its blocks
# again.
MIN_TOKENS = 256
# If more segments than this are growing, the oldest is dropped.
MAX_GROWING = 64


@dataclass(slots=True)
class GrowingSegment:
    """Holds the consecutive blocks [first, end) of a segment that may still grow."""

    chain: NameChain
    token_ids: "array[int]"
    first: int
    block_ids: "array[int]"
    take_counts: list[int]
    since: float

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


@dataclass(slots=True, frozen=True)
class SegmentToSave:
    """Describes a complete segment and its blocks in memory.

    The blocks may have been overwritten since.
    """

    segment: PrefixSegment
    block_ids: "array[int]"
    take_counts: tuple[int, ...]
    state: SavedState | None

    @property
    def slot_id(self) -> SlotId | None:
        return None if self.state is None else self.state.slot_id


class Assembly:
    """Collects offered blocks into segments.

    `touch` is called for each offered segment that is already on disk.
    """

    def __init__(
        self, disk: DiskPrefixes, has_states: bool, touch: Callable[[PrefixSegment], None]
    ) -> None:
        self._disk, self._has_states, self._touch = disk, has_states, touch
        # Keyed by the name of the last block.
        self._growing: dict[bytes, GrowingSegment] = {}
        self._complete: list[SegmentToSave] = []

    @property
    def is_growing(self) -> bool:
        """Return whether a segment will be complete after the delay."""
        return any(not self._is_short(one.first, one.end) for one in self._growing.values())

    def _is_short(self, first: int, end: int) -> bool:
        fewest = min(MIN_TOKENS // self._disk.block_size, self._disk.blocks_per_segment)
        return first == 0 and end < fewest

    def add(self, offer: Offer, now: float) -> None:
        if isinstance(offer, SavedState):
            self._add_state(offer)
            return
        size, start = self._disk.blocks_per_segment, offer.first
        while start < offer.end:
            end = min(offer.end, (start // size + 1) * size)
            self._add_blocks(offer, self._known_until(offer, start, end), end, now)
            start = end

    def _known_until(self, offer: FullBlocks, start: int, end: int) -> int:
        """Return the end of the longest part [start, end) of these blocks that is on disk.

        Mark the segment with this part as used. Return `start` if no such part is on disk.
        """
        for known in range(end, start, -1):
            segment = self._disk.known_segment(offer.token_ids, offer.chain, start, known)
            if segment is not None:
                self._touch(segment)
                return known
        return start

    def _add_blocks(self, offer: FullBlocks, start: int, end: int, now: float) -> None:
        if start == end:
            return
        share = slice(start - offer.first, end - offer.first)
        block_ids, take_counts = offer.block_ids[share], list(offer.take_counts[share])
        segment = GrowingSegment(offer.chain, offer.token_ids, start, block_ids, take_counts, now)
        if start % self._disk.blocks_per_segment:
            before = offer.chain.name(offer.token_ids, start - 1)
            if (head := self._growing.pop(before, None)) is not None:
                # Name the joined blocks by the new offer. The head may come from another sequence,
                # whose tokens can differ after the head.
                segment.first, segment.since = head.first, head.since
                segment.block_ids = head.block_ids + block_ids
                segment.take_counts = head.take_counts + take_counts
        if end % self._disk.blocks_per_segment == 0 and not self._has_states:
            self._complete.append(self._kept(segment, segment.end, None))
            return
        self._growing[segment.chain.name(segment.token_ids, segment.end - 1)] = segment
        if len(self._growing) > MAX_GROWING:
            del self._growing[next(iter(self._growing))]

    def _add_state(self, state: SavedState) -> None:
        """Complete the segment that contains block number `state.end` - 1 and end it there."""
        if self._is_short(0, state.end):
            return
        for last, segment in self._growing.items():
            is_within = segment.first < state.end <= segment.end
            if is_within and segment.chain.name(segment.token_ids, state.end - 1) == state.name:
                self._complete.append(self._kept(segment, state.end, state))
                del self._growing[last]
                return

    def _kept(self, segment: GrowingSegment, end: int, state: SavedState | None) -> SegmentToSave:
        num_blocks = end - segment.first
        described = self._disk.segment(segment.token_ids, segment.chain, segment.first, end)
        take_counts = tuple(segment.take_counts[:num_blocks])
        return SegmentToSave(described, segment.block_ids[:num_blocks], take_counts, state)

    def take(self, now: float, delay_s: float = DELAY_S) -> list[SegmentToSave]:
        """Return the complete segments, and the segments that have waited for `delay_s`."""
        if not self._has_states:
            for last, segment in list(self._growing.items()):
                is_due = now - segment.since >= delay_s
                if is_due and not self._is_short(segment.first, segment.end):
                    self._complete.append(self._kept(segment, segment.end, None))
                    del self._growing[last]
        taken, self._complete = self._complete, []
        return taken
