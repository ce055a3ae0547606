"""Maps block boundaries to the snapshot slots that keep their recurrent state; ids only."""

from headrace.core.ids import SlotId


class SnapshotPool:
    """Extra slots with copies of recurrent state, found by the name of the last block before them.

    The least recently used snapshot makes way for the next one.
    """

    def __init__(self, first_id: int, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_taken = dict.fromkeys(range(first_id, first_id + num_snapshots), 0)
        self._free = [SlotId(first_id + number) for number in reversed(range(num_snapshots))]
        self._slots: dict[bytes, SlotId] = {}  # the first is the least recently used
        self._pending: set[SlotId] = set()  # named as a target by a launched plan

    def find(self, name: bytes) -> SlotId | None:
        return self._slots.get(name)

    def use(self, name: bytes) -> SlotId:
        """The snapshot of this name, now the most recently used."""
        self._slots[name] = slot_id = self._slots.pop(name)
        return slot_id

    def take(self) -> SlotId | None:
        """A slot to save into; None while launched plans write to every one."""
        if self._free:
            slot_id = self._free.pop()
        elif self._slots:
            slot_id = self._slots.pop(next(iter(self._slots)))
        else:
            return None
        self._pending.add(slot_id)
        self.num_taken[slot_id] += 1
        return slot_id

    def keep(self, slot_id: SlotId, name: bytes) -> None:
        """The state is saved and can be found, unless the same state was saved first."""
        self._pending.remove(slot_id)
        if name in self._slots:
            self._free.append(slot_id)
        else:
            self._slots[name] = slot_id

    def drop(self, slot_id: SlotId) -> None:
        """The state was not saved."""
        self._pending.remove(slot_id)
        self._free.append(slot_id)

    def check(self) -> None:
        """Prove that every snapshot slot is accounted for once."""
        slots = [*self._free, *self._slots.values(), *self._pending]
        assert len(set(slots)) == len(slots) == self.num_snapshots
