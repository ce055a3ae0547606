"""Names blocks by their tokens and prefix, and finds public blocks by name."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from headrace_common.ids import BlockId

NAME_BYTES = 16


class NameChain:
    """Computes the names of one sequence's full blocks on demand.

    A name identifies a block's tokens and all tokens before the block. It is a hash of the parent's
    name and the block's token ids; the parent of the first block is the salt. Some tokens stand for
    content that the ids do not identify, such as an image. The hash also covers this content.
    """

    def __init__(self, block_size: int, salt: str, marks: Iterable[tuple[int, bytes]] = ()) -> None:
        self._block_size = block_size
        # By block number, for blocks with marked tokens: the tokens' positions and the marks'
        # hashes.
        self._marks: dict[int, bytes] = {}
        for position, mark in marks:
            index = position // block_size
            fixed = position.to_bytes(8, "big") + blake2b(mark, digest_size=NAME_BYTES).digest()
            self._marks[index] = self._marks.get(index, b"") + fixed
        self._root = blake2b(salt.encode(), digest_size=NAME_BYTES).digest()
        self._names: list[bytes] = []
        # The value of `num_forgotten` at the last match, and the blocks that this match found.
        self.found = 0, array("i")

    def copy(self) -> "NameChain":
        """Return a copy, for a sequence with the same tokens so far."""
        chain = NameChain.__new__(NameChain)
        chain._block_size, chain._root = self._block_size, self._root
        chain._names, chain._marks = self._names[:], self._marks
        chain.found = 0, array("i")
        return chain

    def keep_match(self, num_forgotten: int, found: "array[int]") -> None:
        """Store the blocks that a match found. The next match continues from these blocks."""
        self.found = num_forgotten, found

    def tokens(self, token_ids: "array[int]", index: int) -> bytes:
        start = index * self._block_size
        return token_ids[start : start + self._block_size].tobytes()

    def origin(self, num_blocks: int) -> bytes:
        """Return the salt and marks, which distinguish blocks that have the same tokens."""
        marks = (self._marks[index] for index in sorted(self._marks) if index < num_blocks)
        return self._root + b"".join(marks)

    def name(self, token_ids: "array[int]", index: int) -> bytes:
        """Return the name of block number `index`, which must be full of known tokens."""
        while len(self._names) <= index:
            parent = self._names[-1] if self._names else self._root
            tokens = self.tokens(token_ids, len(self._names))
            mark = self._marks.get(len(self._names), b"")
            self._names.append(blake2b(parent + mark + tokens, digest_size=NAME_BYTES).digest())
        return self._names[index]


class PrefixIndex:
    """Maps names to public blocks.

    A lookup compares the tokens of the block itself. The tokens before the block are compared only
    by the hash of 128 bits in the block's name.
    """

    def __init__(self) -> None:
        # How many entries were removed so far. Earlier matches are valid while this number does not
        # change.
        self.num_forgotten = 0
        self._blocks: dict[bytes, BlockId] = {}
        # The name and tokens of each block.
        self._entries: dict[BlockId, tuple[bytes, bytes]] = {}

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._entries

    def find(self, name: bytes, tokens: bytes) -> BlockId | None:
        block_id = self._blocks.get(name)
        if block_id is None or self._entries[block_id][1] != tokens:
            return None
        return block_id

    def publish(self, block_id: BlockId, name: bytes, tokens: bytes) -> None:
        """Add a full block, unless another block already has the name."""
        if name not in self._blocks:
            self._blocks[name] = block_id
            self._entries[block_id] = (name, tokens)

    def forget(self, block_id: BlockId) -> None:
        self.num_forgotten += 1
        name, _ = self._entries.pop(block_id)
        del self._blocks[name]

    def check(self) -> set[BlockId]:
        """Assert that both maps agree; return the public blocks."""
        assert {name: i for i, (name, _) in self._entries.items()} == self._blocks
        return set(self._entries)
