"""Books of the KV blocks and their holders: ids and counts, never what a block contains."""

from collections.abc import Iterable

from headrace_common.ids import BlockId
from headrace_engine.memory.prefix import PrefixIndex


class BlockPool:
    """A block is free, held by one or more leases, or public and held by nobody for now.

    Unheld public blocks keep their tokens until other sequences need the space. The least recently
    released go first; within a lease the tail goes before the head, which is likelier to be shared.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_taken = [0] * num_blocks  # of each block, how often it was taken
        self.index = PrefixIndex()
        self._free = [BlockId(number) for number in reversed(range(num_blocks))]
        self._unheld: dict[BlockId, None] = {}  # public; the first is evicted next
        self._num_holders = [0] * num_blocks

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._unheld)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these are public and unheld."""
        return sum(block_id in self._unheld for block_id in block_ids)

    def take(self) -> BlockId:
        """Give an available block its first holder; one must be available."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = next(iter(self._unheld))
            del self._unheld[block_id]
            self.index.forget(block_id)
        self._num_holders[block_id] = 1
        self.num_taken[block_id] += 1
        return block_id

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each of these public or held blocks."""
        for block_id in block_ids:
            self._unheld.pop(BlockId(block_id), None)
            self._num_holders[block_id] += 1

    def release(self, block_ids: "Iterable[int]") -> None:
        """Take one holder from each block; the tail comes first."""
        for number in block_ids:
            block_id = BlockId(number)
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            if block_id in self.index:
                self._unheld[block_id] = None
            else:
                self._free.append(block_id)

    def check(self, held: dict[int, int]) -> None:
        """Prove the books against the holders that the leases account for."""
        assert {i: n for i, n in enumerate(self._num_holders) if n} == held
        free = set(self._free)
        assert len(free) == len(self._free)
        assert not free & self._unheld.keys() and not held.keys() & (free | self._unheld.keys())
        assert len(free) + len(self._unheld) + len(held) == self.num_blocks
        public = self.index.check()
        assert self._unheld.keys() <= public and not public & free
