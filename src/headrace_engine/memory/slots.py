"""Tracks which slots are free. Handles ids, never the state in a slot."""

from headrace_common.ids import SlotId


class SlotPool:
    """Hands out slots and takes slots back. Each slot is free or held by one sequence."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [SlotId(number) for number in reversed(range(num_slots))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> SlotId:
        """Take a free slot. At least one slot must be free."""
        return self._free.pop()

    def release(self, slot_id: SlotId) -> None:
        self._free.append(slot_id)

    def check(self, held: set[SlotId]) -> None:
        """Assert that the free slots match the slots that the leases hold."""
        assert len(set(self._free)) == len(self._free)
        assert not held & set(self._free)
        assert len(self._free) + len(held) == self.num_slots
