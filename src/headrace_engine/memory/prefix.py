"""Index of the public blocks by their tokens and prefix; never who holds a block."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from headrace_common.ids import BlockId

NAME_BYTES = 16


class NameChain:
    """Names of the full blocks of one sequence, made on demand.

    A name stands for a block's tokens and for everything before them. It is a hash of the parent's
    name and the block's token ids; the first block's parent is the salt. What begins to show at a
    token of the block, beside its id, belongs to the name too.
    """

    def __init__(self, block_size: int, salt: str, marks: Iterable[tuple[int, bytes]] = ()) -> None:
        self._block_size = block_size
        self._marks: dict[int, bytes] = {}  # by block
        for position, mark in marks:
            index = position // block_size
            fixed = position.to_bytes(8, "big") + blake2b(mark, digest_size=NAME_BYTES).digest()
            self._marks[index] = self._marks.get(index, b"") + fixed
        self._root = blake2b(salt.encode(), digest_size=NAME_BYTES).digest()
        self._names: list[bytes] = []
        # the blocks that a match found last, and how many the index had forgotten by then
        self.found = 0, array("i")

    def copy(self) -> "NameChain":
        """The chain of a sequence with the same tokens so far."""
        chain = NameChain.__new__(NameChain)
        chain._block_size, chain._root = self._block_size, self._root
        chain._names, chain._marks = self._names[:], self._marks
        chain.found = 0, array("i")
        return chain

    def tokens(self, token_ids: "array[int]", index: int) -> bytes:
        start = index * self._block_size
        return token_ids[start : start + self._block_size].tobytes()

    def origin(self, num_blocks: int) -> bytes:
        """The salt and the marks, which tell the first blocks from others with their tokens."""
        marks = (self._marks[index] for index in sorted(self._marks) if index < num_blocks)
        return self._root + b"".join(marks)

    def name(self, token_ids: "array[int]", index: int) -> bytes:
        """Name of block number `index`, which must be full of known tokens."""
        while len(self._names) <= index:
            parent = self._names[-1] if self._names else self._root
            tokens = self.tokens(token_ids, len(self._names))
            mark = self._marks.get(len(self._names), b"")
            self._names.append(blake2b(parent + mark + tokens, digest_size=NAME_BYTES).digest())
        return self._names[index]


class PrefixIndex:
    """Public blocks by name. A hit also compares the tokens, so no hash has to be trusted."""

    def __init__(self) -> None:
        self.num_forgotten = 0  # so far: while none are, what was found is still there
        self._blocks: dict[bytes, BlockId] = {}
        self._entries: dict[BlockId, tuple[bytes, bytes]] = {}  # name, tokens

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def find(self, name: bytes, tokens: bytes) -> BlockId | None:
        block_id = self._blocks.get(name)
        if block_id is None or self._entries[block_id][1] != tokens:
            return None
        return block_id

    def publish(self, block_id: BlockId, name: bytes, tokens: bytes) -> None:
        """Let a full block be found; a second block of the same name stays private."""
        if name not in self._blocks:
            self._blocks[name] = block_id
            self._entries[block_id] = (name, tokens)

    def forget(self, block_id: BlockId) -> None:
        self.num_forgotten += 1
        name, _ = self._entries.pop(block_id)
        del self._blocks[name]

    def check(self) -> set[BlockId]:
        """Prove both directions equal; returns the public blocks."""
        assert {name: i for i, (name, _) in self._entries.items()} == self._blocks
        return set(self._entries)
