"""Maps block boundaries to the snapshot slots that keep their recurrent state; ids only."""

from headrace_common.ids import SlotId
from headrace_common.plan import NO_SLOT


class SnapshotPool:
    """Extra slots with copies of recurrent state, found by the name of the last block before them.

    The least recently used snapshot makes way for the next one. Those on a prompt's way to its end
    have a quarter of the slots until they are used: a long prompt leaves many, and the ends of
    others, from which conversations go on, would all make way for them.
    """

    def __init__(self, first_id: int, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_taken = dict.fromkeys(range(first_id, first_id + num_snapshots), 0)
        self._free = [SlotId(first_id + number) for number in reversed(range(num_snapshots))]
        self._slots: dict[bytes, SlotId] = {}  # the first is the least recently used
        self._passing: dict[bytes, None] = {}  # of those, on the way to an end and never used
        self._pending: set[SlotId] = set()  # named as a target by a launched plan
        self._lent: set[SlotId] = set()  # to sequences that guess

    def find(self, name: bytes) -> SlotId | None:
        return self._slots.get(name)

    def use(self, name: bytes) -> SlotId:
        """The snapshot of this name, now the most recently used."""
        self._slots[name] = slot_id = self._slots.pop(name)
        self._passing.pop(name, None)
        return slot_id

    def take(self) -> SlotId | None:
        """A slot to save into; None while launched plans write to every one."""
        if self._free:
            slot_id = self._free.pop()
        elif self._slots:
            is_crowded = len(self._passing) >= max(1, self.num_snapshots // 4)
            name = next(iter(self._passing if is_crowded else self._slots))
            self._passing.pop(name, None)
            slot_id = self._slots.pop(name)
        else:
            return None
        self._pending.add(slot_id)
        self.num_taken[slot_id] += 1
        return slot_id

    def keep(self, slot_id: SlotId, name: bytes, is_end: bool) -> None:
        """The state is saved and can be found, unless the same state was saved first.

        `is_end`: of its prompt, but for tokens that fill no block.
        """
        self._pending.remove(slot_id)
        if name in self._slots:
            self._free.append(slot_id)
        else:
            self._slots[name] = slot_id
            if not is_end:
                self._passing[name] = None

    def drop(self, slot_id: SlotId) -> None:
        """The state was not saved."""
        self._pending.remove(slot_id)
        self._free.append(slot_id)

    def lend(self) -> SlotId:
        """A slot for a state that a sequence may go back to; NO_SLOT once half of them are lent."""
        slot_id = self.take() if 2 * len(self._lent) + 2 <= self.num_snapshots else None
        if slot_id is None:
            return NO_SLOT
        self._pending.remove(slot_id)
        self._lent.add(slot_id)
        return slot_id

    def give_back(self, slot_id: SlotId) -> None:
        self._lent.remove(slot_id)
        self._free.append(slot_id)

    def check(self, lent: set[SlotId]) -> None:
        """Prove that every snapshot slot is accounted for once."""
        assert lent == self._lent
        slots = [*self._free, *self._slots.values(), *self._pending, *lent]
        assert len(set(slots)) == len(slots) == self.num_snapshots
        assert self._passing.keys() <= self._slots.keys()
