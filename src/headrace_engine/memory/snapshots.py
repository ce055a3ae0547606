"""Maps block boundaries to snapshots: slots with copies of recurrent states. Handles only ids."""

from headrace_common.ids import SlotId
from headrace_common.plan import NO_SLOT


class SnapshotPool:
    """Holds the snapshot slots, found by the name of the last block before the state.

    The least recently used snapshot is evicted first. A long prompt has many snapshots in the
    middle. These snapshots could evict the snapshots at the ends of prompts, where conversations
    continue. Therefore, snapshots in the middle may only use a quarter of the slots until they are
    used for the first time.
    """

    def __init__(self, first_id: int, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_taken = dict.fromkeys(range(first_id, first_id + num_snapshots), 0)
        self._free = [SlotId(first_id + number) for number in reversed(range(num_snapshots))]
        # Sorted by last use, oldest first.
        self._slots: dict[bytes, SlotId] = {}
        # Never-used snapshots in the middle of a prompt.
        self._passing: dict[bytes, None] = {}
        # Slots into which launched plans copy a state.
        self._pending: set[SlotId] = set()
        # Slots that are lent to sequences. Each slot keeps a sequence's state from before a guess.
        self._lent: set[SlotId] = set()

    def find(self, name: bytes) -> SlotId | None:
        return self._slots.get(name)

    def use(self, name: bytes) -> SlotId:
        """Return the snapshot of this name, and mark the snapshot as the most recently used."""
        self._slots[name] = slot_id = self._slots.pop(name)
        self._passing.pop(name, None)
        return slot_id

    def take(self) -> SlotId | None:
        """Take a slot for a new snapshot; None if launched plans or guesses use every slot."""
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
        """Publish a saved snapshot unless its name is already taken.

        `is_end` is true if the state belongs to the last full block of a prompt.
        """
        self._pending.remove(slot_id)
        if name in self._slots:
            self._free.append(slot_id)
        else:
            self._slots[name] = slot_id
            if not is_end:
                self._passing[name] = None

    def drop(self, slot_id: SlotId) -> None:
        """Free a slot whose state was not saved."""
        self._pending.remove(slot_id)
        self._free.append(slot_id)

    def lend(self) -> SlotId:
        """Lend a slot for the state to which a sequence returns after a wrong guess.

        Return NO_SLOT if half of the slots are lent already, or if no slot can be taken.
        """
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
        """Assert that every snapshot slot is counted exactly once."""
        assert lent == self._lent
        slots = [*self._free, *self._slots.values(), *self._pending, *lent]
        assert len(set(slots)) == len(slots) == self.num_snapshots
        assert self._passing.keys() <= self._slots.keys()
