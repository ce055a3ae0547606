"""Tracks which KV blocks are free and how many leases hold each block. Handles only ids."""

from collections.abc import Iterable

from headrace_common.ids import BlockId
from headrace_engine.memory.prefix import PrefixIndex


class BlockPool:
    """Tracks the state of every block: free, held by leases, or public but held by nobody.

    A public block can be found by its name. A public block that nobody holds keeps its tokens until
    the space is needed. The least recently released block is evicted first. A lease releases its
    last blocks first, because other sequences are more likely to share the first blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # How many times each block was taken.
        self.num_taken = [0] * num_blocks
        self.index = PrefixIndex()
        self._free = [BlockId(number) for number in reversed(range(num_blocks))]
        # Public blocks that nobody holds. The first block in this dict is evicted next.
        self._unheld: dict[BlockId, None] = {}
        self._num_holders = [0] * num_blocks

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._unheld)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are public and held by nobody."""
        return sum(block_id in self._unheld for block_id in block_ids)

    def take(self) -> BlockId:
        """Take a block for its first holder. At least one block must be available."""
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
        """Add a holder to each of these blocks, which must be public or held."""
        for block_id in block_ids:
            self._unheld.pop(BlockId(block_id), None)
            self._num_holders[block_id] += 1

    def release(self, block_ids: "Iterable[int]") -> None:
        """Remove one holder from each block.

        Pass the last block of a sequence first, because blocks are evicted in the order of release.
        """
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
        """Assert that each block has as many holders as `held` says, and that no block is lost."""
        assert {i: n for i, n in enumerate(self._num_holders) if n} == held
        free = set(self._free)
        assert len(free) == len(self._free)
        assert not free & self._unheld.keys() and not held.keys() & (free | self._unheld.keys())
        assert len(free) + len(self._unheld) + len(held) == self.num_blocks
        public = self.index.check()
        assert self._unheld.keys() <= public and not public & free
