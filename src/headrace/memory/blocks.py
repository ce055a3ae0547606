"""Who holds which block of token positions: ids and counts, never what a block contains."""

from collections.abc import Iterable

from headrace.core.ids import BlockId


class BlockPool:
    """Blocks that are free or held; a block may have several holders."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(number) for number in reversed(range(num_blocks))]
        self._num_holders = [0] * num_blocks

    @property
    def num_available(self) -> int:
        return len(self._free)

    def take(self) -> BlockId:
        """Give a free block its first holder; there must be one."""
        block_id = self._free.pop()
        self._num_holders[block_id] = 1
        return block_id

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one holder from each block; what nobody holds is free again."""
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                self._free.append(BlockId(block_id))

    def check(self, held: dict[int, int]) -> None:
        """Prove the books against the holders that the leases account for."""
        assert {i: n for i, n in enumerate(self._num_holders) if n} == held
        assert len(set(self._free)) == len(self._free)
        assert not held.keys() & set(self._free)
        assert len(self._free) + len(held) == self.num_blocks
