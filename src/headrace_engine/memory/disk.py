"""Records which prefixes are on disk, by name and size. Opens no file."""

from array import array
from collections.abc import Iterable

from headrace_common.prefix import PrefixSegment
from headrace_engine.memory.prefix import NameChain


class DiskPrefixes:
    """Maps the name of a segment's last block to the segment's first block.

    A segment is a number of consecutive blocks in one file. No segment crosses a multiple of
    `blocks_per_segment`.
    """

    def __init__(
        self, block_size: int, blocks_per_segment: int, block_bytes: int, state_bytes: int = 0
    ) -> None:
        """`state_bytes` is the size of a model's recurrent state; 0 if there is no such state."""
        self.block_size, self.blocks_per_segment = block_size, blocks_per_segment
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        # The first block of each segment.
        self._firsts: dict[bytes, int] = {}

    def set_segments(self, segments: Iterable[tuple[bytes, int, int]]) -> None:
        """Replace all known segments; each is a tuple (name, first block, end)."""
        self._firsts.clear()
        for name, first, end in segments:
            self.add(name, first, end)

    def add(self, name: bytes, first: int, end: int) -> None:
        """Add a segment. If two segments have the same last block, keep the longer segment."""
        self._firsts[name] = min(first, self._firsts.get(name, end))

    def forget(self, name: bytes) -> None:
        self._firsts.pop(name, None)

    def reaches(self, name: bytes, first: int) -> bool:
        """Return whether a segment whose last block has this name contains block `first`."""
        found = self._firsts.get(name)
        return found is not None and found <= first

    def num_bytes(self, num_blocks: int) -> int:
        """Return the size of `num_blocks` blocks plus the recurrent state after the last block."""
        return num_blocks * self._block_bytes + self._state_bytes

    def find(self, token_ids: "array[int]", chain: NameChain, block: int) -> PrefixSegment | None:
        """Return the known segment that contains block number `block`, or None.

        If several segments contain the block, return the segment that ends last. The segment ends
        before the sequence's last token, so at least one token remains to process.
        """
        if not self._firsts:
            return None
        end_of_segment = (block // self.blocks_per_segment + 1) * self.blocks_per_segment
        limit = min(end_of_segment, (len(token_ids) - 1) // self.block_size)
        for end in range(limit, block, -1):
            if (segment := self.known_segment(token_ids, chain, block, end)) is not None:
                return segment
        return None

    def known_segment(
        self, token_ids: "array[int]", chain: NameChain, block: int, end: int
    ) -> PrefixSegment | None:
        """Return the known segment that contains block number `block` and ends before block `end`.

        Another thread may call `forget` at any time.
        """
        first = self._firsts.get(chain.name(token_ids, end - 1))
        if first is None or first > block:
            return None
        return self.segment(token_ids, chain, first, end)

    def segment(
        self, token_ids: "array[int]", chain: NameChain, first: int, end: int
    ) -> PrefixSegment:
        """Describe blocks [first, end) of a sequence as a segment."""
        tokens = token_ids[: end * self.block_size].tobytes()
        return PrefixSegment(chain.name(token_ids, end - 1), first, end, chain.origin(end), tokens)
