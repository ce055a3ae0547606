"""A lane's memory as the books see it: counts only, never bytes or tensors."""

import msgspec


class MemoryLayout(msgspec.Struct, frozen=True):
    """Blocks of `block_size` token positions, and slots; a lane has either or both.

    `num_blocks == 0` means a dense cache: one slot holds a whole sequence of up to
    `max_positions` tokens. `num_slots == 0` means that no sequence needs a slot.
    """

    block_size: int = 32
    num_blocks: int = 0
    num_slots: int = 0
    num_snapshots: int = 0  # extra slots, numbered after the others, for saved recurrent state
    snapshot_every: int = 1024  # positions between two snapshots of a long prompt
    max_positions: int = 0  # the longest sequence that one slot or the whole pool can hold
    forward_per_chunk: bool = False  # a step runs its chunks one after another, not packed

    @property
    def num_positions(self) -> int:
        """Token positions of all sequences together; 0 if none takes any memory."""
        return self.num_blocks * self.block_size or self.num_slots * self.max_positions

    def blocks_for(self, num_positions: int) -> int:
        """Number of blocks that hold `num_positions` positions; 0 for a dense lane."""
        return -(-num_positions // self.block_size) if self.num_blocks else 0
