"""Books of the slots and their holders: ids and counts, never the state in a slot."""

from headrace_common.ids import SlotId


class SlotPool:
    """Slots that are free or held by one sequence each."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [SlotId(number) for number in reversed(range(num_slots))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> SlotId:
        """Take a free slot; there must be one."""
        return self._free.pop()

    def release(self, slot_id: SlotId) -> None:
        self._free.append(slot_id)

    def check(self, held: set[SlotId]) -> None:
        """Prove the books against the slots that the leases account for."""
        assert len(set(self._free)) == len(self._free)
        assert not held & set(self._free)
        assert len(self._free) + len(held) == self.num_slots
