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


class ReadRun(msgspec.Struct, frozen=True):
    """A wish to have a run's numbers."""

    number: int
    run: PrefixRun
    num_bytes: int


class RunRead(msgspec.Struct, frozen=True):
    """The answer: the numbers, or why there are none; `seconds` are of reading alone."""

    number: int
    numbers: memoryview | None
    seconds: float
    miss: str = ""


class RunsOnDisk(msgspec.Struct, frozen=True):
    """News of the folder: runs that were added; all that there are, if `is_all`."""

    runs: tuple[tuple[bytes, int, int], ...]  # name, first block, end
    is_all: bool = False
    num_bytes: int = 0  # that were written for them


DiskNews = RunRead | RunsOnDisk
