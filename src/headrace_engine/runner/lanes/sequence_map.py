"""Maps KV blocks to the sequences of llama.cpp, whose cache has no blocks."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class CellSequences(Protocol):
    """The operations of llama.cpp's cache that SequenceMap uses.

    A copy shares the cells of its source.
    """

    def remove(self, sequence: int, start: int) -> None: ...
    def copy(self, source: int, target: int, end: int) -> None: ...
    def compute(self, sequence: int, token_ids: Ints) -> None: ...


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A llama.cpp sequence, whose first `num_tokens` tokens belong to `blocks`."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    # The number of the last step that used this sequence.
    last_used: int = 0


class SequenceMap:
    """Assigns chunks to sequences of llama.cpp, and keeps finished sequences for later prefixes.

    The scheduler tracks blocks, and llama.cpp tracks sequences of cells. So this class records
    the blocks of each sequence. When a block is overwritten, every other sequence with this block
    is cut off before the block. When no sequence is free, the least recently used sequence is
    removed. If a later chunk needs the prefix of a removed sequence, the prefix is processed
    again. For this purpose, the tokens of every block are kept.
    """

    def __init__(
        self, cells: CellSequences, num_blocks: int, block_size: int, num_sequences: int
    ) -> None:
        self._cells, self._size = cells, block_size
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._sequences: dict[int, CachedSequence] = {}
        self._sequences_of: list[set[int]] = [set() for _ in range(num_blocks)]
        self._free = list(reversed(range(num_sequences)))
        self._step = 0

    def next_step(self) -> None:
        self._step += 1

    def assign(self, block_ids: "array[int]", start: int, token_ids: "array[int]") -> int:
        """Return a sequence that holds exactly the tokens before `start` of a chunk.

        The caller must decode `token_ids` in the returned sequence, because the blocks of these
        tokens are now recorded as blocks of the sequence.
        """
        end = start + len(token_ids)
        blocks = block_ids[: self._num_blocks(end)].tolist()
        number = self._with_prefix(blocks[: self._num_blocks(start)], start)
        sequence = self._sequences[number]
        for block in blocks[start // self._size :]:
            # The block is about to be overwritten, so other sequences lose the block.
            for other in self._sequences_of[block] - {number}:
                self._truncate(other, self._sequences[other].blocks.index(block))
            self._sequences_of[block].add(number)
        sequence.blocks, sequence.num_tokens, sequence.last_used = blocks, end, self._step
        positions = np.arange(start, end)
        rows = np.asarray(blocks)[positions // self._size]
        self._tokens[rows, positions % self._size] = token_ids
        return number

    def copy(self, source: int, target: int) -> None:
        """Copy a block for another choice of the same prompt, which continues from the copy."""
        for other in set(self._sequences_of[target]):
            self._truncate(other, self._sequences[other].blocks.index(target))
        self._tokens[target] = self._tokens[source]
        for number in self._sequences_of[source]:
            sequence = self._sequences[number]
            index = sequence.blocks.index(source)
            end = min(sequence.num_tokens, (index + 1) * self._size)
            self._copy_sequence(number, [*sequence.blocks[:index], target], end)
            return

    def clear(self) -> None:
        for number in list(self._sequences):
            self._truncate(number, 0)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _with_prefix(self, blocks: list[int], num_tokens: int) -> int:
        """Return a sequence with exactly the first `num_tokens` tokens of these blocks.

        The first choice is a sequence of exactly this length that no other chunk of the step
        uses. The second choice is a copy of a longer sequence. Otherwise the tokens are processed
        again.
        """
        if not blocks:
            return self._allocate([], 0)
        longer = None
        for number in self._sequences_of[blocks[-1]]:
            sequence = self._sequences[number]
            if sequence.num_tokens < num_tokens or sequence.blocks[: len(blocks)] != blocks:
                continue
            if sequence.num_tokens == num_tokens and sequence.last_used < self._step:
                return number
            longer = number
        if longer is not None:
            return self._copy_sequence(longer, blocks, num_tokens)
        number = self._allocate(blocks, num_tokens)
        self._cells.compute(number, self._tokens[blocks].reshape(-1)[:num_tokens])
        return number

    def _copy_sequence(self, source: int, blocks: list[int], num_tokens: int) -> int:
        # The copy counts as a use of the source. So the source is not evicted for its own copy.
        self._sequences[source].last_used = self._step
        number = self._allocate(blocks, num_tokens)
        self._cells.copy(source, number, num_tokens)
        return number

    def _allocate(self, blocks: list[int], num_tokens: int) -> int:
        if not self._free:
            self._truncate(
                min(self._sequences, key=lambda number: self._sequences[number].last_used), 0
            )
        number = self._free.pop()
        self._sequences[number] = CachedSequence(blocks, num_tokens, self._step - 1)
        for block in blocks:
            self._sequences_of[block].add(number)
        return number

    def _truncate(self, number: int, num_blocks: int) -> None:
        """Cut a sequence to its first `num_blocks` blocks; 0 frees the sequence."""
        sequence, end = self._sequences[number], num_blocks * self._size
        if sequence.num_tokens > end or not num_blocks:
            self._cells.remove(number, end)
            sequence.num_tokens = end
        for block in sequence.blocks[num_blocks:]:
            self._sequences_of[block].discard(number)
        del sequence.blocks[num_blocks:]
        if not num_blocks:
            del self._sequences[number]
            self._free.append(number)
