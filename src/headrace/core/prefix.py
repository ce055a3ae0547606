"""Runs of a prefix's blocks as they go to disk and come back: numbers and names, no tensors."""

import msgspec


class PrefixRun(msgspec.Struct, frozen=True):
    """Blocks [first, end) of a prefix, with all that tells it from every other prefix.

    `name` stands for the prefix up to its end. So that it need not be trusted, the tokens from the
    first one on are there too, and `origin`: the salt, and what shows beside the tokens.
    """

    name: bytes
    first: int
    end: int
    origin: bytes
    token_ids: bytes

    @property
    def num_blocks(self) -> int:
        return self.end - self.first
