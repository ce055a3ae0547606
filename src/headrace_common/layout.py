"""Describes the memory of a lane (a way to run a model) in blocks, slots and positions."""

import msgspec


class MemoryLayout(msgspec.Struct, frozen=True):
    """The memory of a lane: blocks of `block_size` token positions, slots, or both.

    `num_blocks == 0` means a dense cache: one slot holds a whole sequence of up to
    `max_positions` tokens. `num_slots == 0` means that no sequence needs a slot.
    """

    block_size: int = 32
    num_blocks: int = 0
    num_slots: int = 0
    # Extra slots hold saved recurrent states. Ids of extra slots follow the ids of all other slots.
    num_snapshots: int = 0
    snapshot_every: int = 1024  # positions between two snapshots of a long prompt
    # Length of the longest sequence that fits into one slot, or into all blocks together.
    max_positions: int = 0
    # Whether each chunk needs a separate forward pass. Otherwise the chunks of a step share a pass.
    forward_per_chunk: bool = False

    @property
    def num_positions(self) -> int:
        """The number of token positions in memory, for all sequences.

        It is 0 if tokens need no memory.
        """
        return self.num_blocks * self.block_size or self.num_slots * self.max_positions

    def blocks_for(self, num_positions: int) -> int:
        """Return the number of blocks for `num_positions` positions; 0 for a dense cache."""
        return -(-num_positions // self.block_size) if self.num_blocks else 0
