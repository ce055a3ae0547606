"""Leases on blocks and slots for a lane's whole memory; deals in ids, never in tensors."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from headrace.core.ids import SlotId
from headrace.core.layout import MemoryLayout
from headrace.core.plan import NO_SLOT
from headrace.memory.blocks import BlockPool
from headrace.memory.slots import SlotPool


@dataclass(slots=True, eq=False)
class Lease:
    """What one running sequence holds. `block_ids` grows in place: plans in flight refer to it."""

    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    slot_id: SlotId = NO_SLOT


class Memory:
    """The books of one lane's memory."""

    def __init__(self, layout: MemoryLayout) -> None:
        self.layout = layout
        self._blocks = BlockPool(layout.num_blocks)
        self._slots = SlotPool(layout.num_slots)
        self._leases: set[Lease] = set()

    @property
    def num_available(self) -> int:
        """Blocks that a lease could take now."""
        return self._blocks.num_available

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def has_slot(self) -> bool:
        return not self.layout.num_slots or self._slots.num_free > 0

    @property
    def is_idle(self) -> bool:
        return not self._leases

    def can_reserve(self, num_positions: int, num_spare: int) -> bool:
        """Whether `num_positions` fit, with a slot, and leave `num_spare` blocks available."""
        num_needed = self.layout.blocks_for(num_positions)
        return self.has_slot and (not num_needed or num_needed + num_spare <= self.num_available)

    def reserve(self, num_positions: int) -> Lease:
        """Lease blocks for `num_positions`, and a slot if there are slots; all must be free."""
        lease = Lease(slot_id=self._slots.take() if self.layout.num_slots else NO_SLOT)
        self._leases.add(lease)
        for _ in range(self.layout.blocks_for(num_positions)):
            lease.block_ids.append(self._blocks.take())
        return lease

    def lacks_block(self, lease: Lease, num_positions: int) -> bool:
        """Whether the lease must grow, by one block at most, to hold `num_positions`."""
        return len(lease.block_ids) < self.layout.blocks_for(num_positions)

    def grow(self, lease: Lease) -> None:
        """Add one block; there must be an available one."""
        lease.block_ids.append(self._blocks.take())

    def release(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._blocks.release(lease.block_ids)
        if lease.slot_id != NO_SLOT:
            self._slots.release(lease.slot_id)

    def check(self) -> None:
        """Prove that every block and slot is accounted for once."""
        self._blocks.check(Counter(i for lease in self._leases for i in lease.block_ids))
        self._slots.check({s.slot_id for s in self._leases if s.slot_id != NO_SLOT})
