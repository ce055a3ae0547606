"""Maps our KV blocks onto the sequences of llama.cpp, whose cache knows no blocks."""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class CellSequences(Protocol):
    """The calls that we need of llama.cpp; a copy shares the cells of its source."""

    def remove(self, sequence: int, start: int) -> None: ...
    def copy(self, source: int, target: int, end: int) -> None: ...
    def compute(self, sequence: int, token_ids: Ints) -> None: ...


@dataclass(slots=True, eq=False)
class HeldSequence:
    """One of the cache's sequences: its first `num_tokens` belong to these blocks."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    used: int = 0  # the last step that it was part of


class HeldBlocks:
    """Places chunks in sequences, and keeps those of ended ones until their blocks are needed.

    A block's cells belong to a sequence until the block is written anew by another one. There are
    fewer sequences than blocks: the one used least recently makes way, and what it alone held is
    computed again from its tokens if a chunk goes on from it.
    """

    def __init__(
        self, cells: CellSequences, num_blocks: int, block_size: int, num_sequences: int
    ) -> None:
        self._cells, self._size = cells, block_size
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._held: dict[int, HeldSequence] = {}
        self._holders: list[set[int]] = [set() for _ in range(num_blocks)]
        self._free = list(reversed(range(num_sequences)))
        self._step = 0

    def next_step(self) -> None:
        self._step += 1

    def place(self, block_ids: "array[int]", start: int, token_ids: "array[int]") -> int:
        """The sequence that holds exactly the tokens before `start`, and gets these ones next."""
        end = start + len(token_ids)
        blocks = block_ids[: self._num_blocks(end)].tolist()
        number = self._with_prefix(blocks[: self._num_blocks(start)], start)
        held = self._held[number]
        for block in blocks[start // self._size :]:
            for other in self._holders[block] - {number}:  # what it held there is no more
                self._cut(other, self._held[other].blocks.index(block))
            self._holders[block].add(number)
        held.blocks, held.num_tokens, held.used = blocks, end, self._step
        places = np.arange(start, end)
        rows = np.asarray(blocks)[places // self._size]
        self._tokens[rows, places % self._size] = token_ids
        return number

    def copy(self, source: int, target: int) -> None:
        """A block is copied for another choice of the same prompt, which goes on from there."""
        for other in set(self._holders[target]):
            self._cut(other, self._held[other].blocks.index(target))
        self._tokens[target] = self._tokens[source]
        for number in self._holders[source]:
            held = self._held[number]
            place = held.blocks.index(source)
            end = min(held.num_tokens, (place + 1) * self._size)
            self._copied(number, [*held.blocks[:place], target], end)
            return

    def lose_all(self) -> None:
        for number in list(self._held):
            self._cut(number, 0)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _with_prefix(self, blocks: list[int], num_tokens: int) -> int:
        """A sequence of this content and no more: one that is there, a copy, or computed anew."""
        if not blocks:
            return self._taken([], 0)
        longer = None
        for number in self._holders[blocks[-1]]:
            held = self._held[number]
            if held.num_tokens < num_tokens or held.blocks[: len(blocks)] != blocks:
                continue
            if held.num_tokens == num_tokens and held.used < self._step:
                return number
            longer = number
        if longer is not None:
            return self._copied(longer, blocks, num_tokens)
        number = self._taken(blocks, num_tokens)
        self._cells.compute(number, self._tokens[blocks].reshape(-1)[:num_tokens])
        return number

    def _copied(self, source: int, blocks: list[int], num_tokens: int) -> int:
        self._held[source].used = self._step  # it does not make way for its copy
        number = self._taken(blocks, num_tokens)
        self._cells.copy(source, number, num_tokens)
        return number

    def _taken(self, blocks: list[int], num_tokens: int) -> int:
        if not self._free:
            self._cut(min(self._held, key=lambda number: self._held[number].used), 0)
        number = self._free.pop()
        self._held[number] = HeldSequence(blocks, num_tokens, self._step - 1)
        for block in blocks:
            self._holders[block].add(number)
        return number

    def _cut(self, number: int, num_blocks: int) -> None:
        """Cuts it to its first `num_blocks` blocks; without any it is free."""
        held, end = self._held[number], num_blocks * self._size
        if held.num_tokens > end or not num_blocks:
            self._cells.remove(number, end)
            held.num_tokens = end
        for block in held.blocks[num_blocks:]:
            self._holders[block].discard(number)
        del held.blocks[num_blocks:]
        if not num_blocks:
            del self._held[number]
            self._free.append(number)
