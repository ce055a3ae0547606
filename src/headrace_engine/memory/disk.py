"""The prefixes that are known to be on disk: names and counts; opens no file."""

from array import array
from collections.abc import Iterable

from headrace_common.prefix import PrefixRun
from headrace_engine.memory.prefix import NameChain


class DiskPrefixes:
    """Runs by the name of their last block. No run crosses a multiple of `blocks_per_run`."""

    def __init__(
        self, block_size: int, blocks_per_run: int, block_bytes: int, state_bytes: int = 0
    ) -> None:
        """`state_bytes`: of the recurrent state at the end of each run, if there is one."""
        self.block_size, self.blocks_per_run = block_size, blocks_per_run
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._firsts: dict[bytes, int] = {}  # of each run its first block

    def know(self, runs: Iterable[tuple[bytes, int, int]]) -> None:
        """These are all: name, first block and end of each."""
        self._firsts.clear()
        for name, first, end in runs:
            self.add(name, first, end)

    def add(self, name: bytes, first: int, end: int) -> None:
        """One more; of two that end alike the longer one is known."""
        self._firsts[name] = min(first, self._firsts.get(name, end))

    def forget(self, name: bytes) -> None:
        self._firsts.pop(name, None)

    def reaches(self, name: bytes, first: int) -> bool:
        """Whether the run that ends with this name holds block `first`."""
        found = self._firsts.get(name)
        return found is not None and found <= first

    def num_bytes(self, num_blocks: int) -> int:
        """The size of that many blocks, with the state after them."""
        return num_blocks * self._block_bytes + self._state_bytes

    def find(self, token_ids: "array[int]", chain: NameChain, block: int) -> PrefixRun | None:
        """The run that reaches farthest from block number `block` on, one token short at least."""
        if not self._firsts:
            return None
        end_of_run = (block // self.blocks_per_run + 1) * self.blocks_per_run
        limit = min(end_of_run, (len(token_ids) - 1) // self.block_size)
        for end in range(limit, block, -1):
            name = chain.name(token_ids, end - 1)
            if self.reaches(name, block):
                return self.run_of(token_ids, chain, name, end)
        return None

    def run_of(self, token_ids: "array[int]", chain: NameChain, name: bytes, end: int) -> PrefixRun:
        """The known run of this name, which ends with a sequence's block number `end` - 1."""
        return self.run(token_ids, chain, self._firsts[name], end)

    def run(self, token_ids: "array[int]", chain: NameChain, first: int, end: int) -> PrefixRun:
        """The run of these blocks of a sequence."""
        tokens = token_ids[: end * self.block_size].tobytes()
        return PrefixRun(chain.name(token_ids, end - 1), first, end, chain.origin(end), tokens)
