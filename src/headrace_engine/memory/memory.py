"""Leases the blocks and slots of a lane's memory to sequences. Handles ids, never tensors."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace_common.ids import BlockId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import NO_SLOT, BlockCopy, SlotCopy
from headrace_engine.memory.blocks import BlockPool
from headrace_engine.memory.offers import FullBlocks, Offers, SavedState
from headrace_engine.memory.prefix import NameChain
from headrace_engine.memory.slots import SlotPool
from headrace_engine.memory.snapshots import SnapshotPool


@dataclass(slots=True, eq=False)
class Lease:
    """Holds the memory of a running sequence.

    `block_ids` grows in place, because plans in flight refer to it.
    """

    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    slot_id: SlotId = NO_SLOT
    # How many of the first blocks were published to the prefix index.
    num_published: int = 0
    # How many of the first blocks were offered for saving to disk.
    num_offered: int = 0
    # The slot with the state from before a guess, which is restored if the guess is wrong.
    kept_slot_id: SlotId = NO_SLOT


@dataclass(slots=True, frozen=True)
class Match:
    """Lists the public (cached) blocks with a sequence's first tokens. Does not hold the blocks."""

    block_ids: "array[int]"
    num_tokens: int
    # The name of the snapshot with the recurrent state after these blocks.
    snapshot: bytes | None = None


NO_MATCH = Match(array("i"), 0)


class Memory:
    """Tracks all blocks, slots and snapshots of one lane."""

    def __init__(self, layout: MemoryLayout, offers: Offers | None = None) -> None:
        """`offers` collects full blocks and saved states; None if nothing is saved to disk."""
        self.offers = offers
        self.layout = layout
        self._blocks = BlockPool(layout.num_blocks)
        self._slots = SlotPool(layout.num_slots)
        self._snapshots = SnapshotPool(layout.num_slots, layout.num_snapshots)
        self._leases: set[Lease] = set()

    @property
    def num_available(self) -> int:
        """Return how many blocks a lease can take now."""
        return self._blocks.num_available

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def has_slot(self) -> bool:
        return not self.layout.num_slots or self._slots.num_free > 0

    def chain(self, salt: str, marks: Iterable[tuple[int, bytes]] = ()) -> NameChain:
        """Return the block names of a new sequence.

        Some tokens stand for more than their ids, such as the tokens of an image. `marks` has a
        pair (position, mark) for each such token, and the mark identifies the content.
        """
        return NameChain(self.layout.block_size, salt, marks)

    def match(self, token_ids: "array[int]", chain: NameChain) -> Match:
        """Return the longest cached prefix that leaves at least one token to process."""
        if not self.layout.num_blocks:
            return NO_MATCH
        found = self._found(token_ids, chain)
        if self.layout.num_slots:
            return self._match_state(found, token_ids, chain)
        return Match(found, len(found) * self.layout.block_size)

    def _found(self, token_ids: "array[int]", chain: NameChain) -> "array[int]":
        """Return the public blocks that contain the sequence's first tokens.

        The search continues from the blocks of the last match. A waiting sequence is matched before
        every step, and matching 3,000 blocks from the start takes a millisecond.
        """
        index = self._blocks.index
        num_forgotten, found = chain.found
        found = found[:] if num_forgotten == index.num_forgotten else array("i")
        for number in range(len(found), (len(token_ids) - 1) // self.layout.block_size):
            name = chain.name(token_ids, number)
            block_id = index.find(name, chain.tokens(token_ids, number))
            if block_id is None:
                break
            found.append(block_id)
        chain.keep_match(index.num_forgotten, found)
        return found

    def _match_state(self, found: "array[int]", token_ids: "array[int]", chain: NameChain) -> Match:
        """Return the longest part of a match that ends at a snapshot of the recurrent state."""
        for num_blocks in range(len(found), 0, -1):
            name = chain.name(token_ids, num_blocks - 1)
            if self._snapshots.find(name) is not None:
                return Match(found[:num_blocks], num_blocks * self.layout.block_size, name)
        return NO_MATCH

    def can_reserve(self, match: Match, num_positions: int, num_spare: int) -> bool:
        """Return whether `num_positions` and a slot fit while `num_spare` blocks stay available."""
        num_wanted = self.layout.blocks_for(num_positions) - len(match.block_ids) + num_spare
        if not self._fits(num_wanted, self.num_available):
            return False
        num_unheld = self._blocks.num_unheld(match.block_ids)
        return self._fits(num_wanted, self.num_available - num_unheld)

    def reserve(self, match: Match, num_positions: int) -> tuple[Lease, SlotCopy | None]:
        """Lease the matched blocks, more blocks for `num_positions`, and a slot if there are slots.

        The blocks and the slot must be available. The returned copy, if any, writes the matched
        snapshot into the slot.
        """
        lease = self._open(match.block_ids)
        for _ in range(self.layout.blocks_for(num_positions) - len(lease.block_ids)):
            lease.block_ids.append(self._blocks.take())
        if match.snapshot is None:
            return lease, None
        return lease, SlotCopy(self._snapshots.use(match.snapshot), lease.slot_id)

    def can_fork(self, num_positions: int, num_spare: int) -> bool:
        """Return whether a fork of a lease fits while `num_spare` blocks remain available."""
        num_copied = self.layout.blocks_for(num_positions) - self._num_full(num_positions)
        return self._fits(num_copied + num_spare, self.num_available)

    def fork(
        self, lease: Lease, num_positions: int
    ) -> tuple[Lease, BlockCopy | None, SlotCopy | None]:
        """Return a second lease on the same tokens, and the copies that the new lease needs.

        The leases share the full blocks. A partly filled block and a slot are copied.
        """
        num_full = self._num_full(num_positions)
        fork = self._open(lease.block_ids[:num_full])
        block_copy = slot_copy = None
        if self.layout.blocks_for(num_positions) > num_full:
            self.grow(fork)
            source, target = lease.block_ids[num_full], fork.block_ids[num_full]
            block_copy = BlockCopy(BlockId(source), BlockId(target))
        if self.layout.num_slots:
            slot_copy = SlotCopy(lease.slot_id, fork.slot_id)
        return fork, block_copy, slot_copy

    def _fits(self, num_blocks: int, num_available: int) -> bool:
        return self.has_slot and (not self.layout.num_blocks or num_blocks <= num_available)

    def _num_full(self, num_positions: int) -> int:
        return num_positions // self.layout.block_size if self.layout.num_blocks else 0

    def _open(self, shared: "array[int]") -> Lease:
        lease = Lease(shared[:], NO_SLOT, len(shared))
        self._blocks.hold(shared)
        if self.layout.num_slots:
            lease.slot_id = self._slots.take()
        self._leases.add(lease)
        return lease

    def lacks_block(self, lease: Lease, num_positions: int) -> bool:
        """Return whether the lease needs one more block to hold `num_positions`."""
        num_held = len(lease.block_ids) * self.layout.block_size
        return num_held < num_positions and self.layout.num_blocks > 0

    def grow(self, lease: Lease) -> None:
        """Add one block to the lease. At least one block must be available."""
        lease.block_ids.append(self._blocks.take())

    def stretch(self, lease: Lease, num_positions: int, num_spare: int) -> int:
        """Grow a lease to `num_positions` while more than `num_spare` blocks are available.

        Return how many positions the lease then has.
        """
        while self.lacks_block(lease, num_positions) and self.num_available > num_spare:
            self.grow(lease)
        return len(lease.block_ids) * self.layout.block_size

    def can_go_back(self, lease: Lease) -> bool:
        """Return whether guessed tokens can be undone.

        To undo guessed tokens, a recurrent state is restored from a copy in a second slot. If the
        lease has no second slot yet, this method takes a slot.
        """
        if lease.slot_id != NO_SLOT and lease.kept_slot_id == NO_SLOT:
            lease.kept_slot_id = self._snapshots.lend()
        return lease.slot_id == NO_SLOT or lease.kept_slot_id != NO_SLOT

    def publish(
        self, lease: Lease, token_ids: "array[int]", chain: NameChain, num_computed: int
    ) -> None:
        """Publish the full blocks of the first `num_computed` tokens for later sequences."""
        if not self.layout.num_blocks:
            return
        for index in range(lease.num_published, num_computed // self.layout.block_size):
            name, tokens = chain.name(token_ids, index), chain.tokens(token_ids, index)
            self._blocks.index.publish(BlockId(lease.block_ids[index]), name, tokens)
            lease.num_published = index + 1
        if self.offers is not None and lease.num_published > lease.num_offered:
            self._offer(self.offers, lease, token_ids, chain)

    def _offer(
        self, offers: Offers, lease: Lease, token_ids: "array[int]", chain: NameChain
    ) -> None:
        first, lease.num_offered = lease.num_offered, lease.num_published
        block_ids = lease.block_ids[first : lease.num_offered]
        take_counts = tuple(self._blocks.num_taken[i] for i in block_ids)
        # Compute the names in this thread, because other threads only read the computed names.
        chain.name(token_ids, lease.num_offered - 1)
        offers.add(FullBlocks(chain, token_ids, first, block_ids, take_counts))

    def still_holds(self, block_ids: Iterable[int], take_counts: Iterable[int]) -> bool:
        """Return whether none of these blocks was taken again after the offer.

        `take_counts` are the counts at the time of the offer. Any thread may call this method.
        """
        return all(
            self._blocks.num_taken[i] == n for i, n in zip(block_ids, take_counts, strict=True)
        )

    def still_saved(self, slot_id: SlotId, taking: int) -> bool:
        """Return whether the snapshot slot was not taken again after the offer.

        `taking` is the count at the time of the offer. Any thread may call this method.
        """
        return self._snapshots.num_taken[slot_id] == taking

    def release(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._blocks.release(reversed(lease.block_ids))
        if lease.slot_id != NO_SLOT:
            self._slots.release(lease.slot_id)
        if lease.kept_slot_id != NO_SLOT:
            self._snapshots.give_back(lease.kept_slot_id)

    def snapshot_stop(self, start: int, num_prompt: int) -> int | None:
        """Return the next position after `start` at which a snapshot is taken.

        A chunk from `start` must not extend beyond this position. Return None if the lane has no
        snapshots.
        """
        if not self.layout.num_snapshots:
            return None
        every = start - start % self.layout.snapshot_every + self.layout.snapshot_every
        last = self._last_boundary(num_prompt)
        return min(every, last) if last > start else every

    def save(self, lease: Lease, end: int, num_prompt: int) -> SlotCopy | None:
        """Return the copy that saves the state after `end`; None if no snapshot is taken there."""
        if end % self.layout.snapshot_every and end != self._last_boundary(num_prompt):
            return None
        slot_id = self._snapshots.take()
        return None if slot_id is None else SlotCopy(lease.slot_id, slot_id)

    def _last_boundary(self, num_prompt: int) -> int:
        return (num_prompt - 1) // self.layout.block_size * self.layout.block_size

    def saved(
        self,
        slot_id: SlotId,
        token_ids: "array[int]",
        chain: NameChain,
        num_tokens: int,
        num_prompt: int,
    ) -> None:
        """Publish the snapshot after `num_tokens`; drop it if some of these tokens are unknown."""
        if num_tokens > len(token_ids):
            self._snapshots.drop(slot_id)
            return
        num_blocks = num_tokens // self.layout.block_size
        name = chain.name(token_ids, num_blocks - 1)
        self._snapshots.keep(slot_id, name, num_tokens == self._last_boundary(num_prompt))
        if self.offers is not None:
            taking = self._snapshots.num_taken[slot_id]
            self.offers.add(SavedState(name, num_blocks, slot_id, taking))

    def not_saved(self, slot_id: SlotId) -> None:
        self._snapshots.drop(slot_id)

    def check(self) -> None:
        """Assert that every block and slot is counted exactly once."""
        self._blocks.check(Counter(i for lease in self._leases for i in lease.block_ids))
        self._slots.check({s.slot_id for s in self._leases if s.slot_id != NO_SLOT})
        self._snapshots.check({s.kept_slot_id for s in self._leases if s.kept_slot_id != NO_SLOT})
