"""Describes cached prefix blocks that are written to disk or read from disk."""

import msgspec


class PrefixSegment(msgspec.Struct, frozen=True):
    """Blocks [first, end) of a prefix, with all data that distinguishes the prefix from others.

    `name` is a hash of the prefix up to `end`. Readers also compare `token_ids`, the tokens of
    these blocks, and `origin`, which contains the salt and the hashes of images.
    """

    name: bytes
    first: int
    end: int
    origin: bytes
    token_ids: bytes

    @property
    def num_blocks(self) -> int:
        return self.end - self.first


class ReadSegment(msgspec.Struct, frozen=True):
    """A request to read one segment from disk."""

    number: int
    segment: PrefixSegment
    num_bytes: int


class SegmentRead(msgspec.Struct, frozen=True):
    """The answer to a ReadSegment. If `numbers` is None, `miss` says why.

    Reading took `seconds`.
    """

    number: int
    numbers: memoryview | None
    seconds: float
    miss: str = ""


class SegmentsOnDisk(msgspec.Struct, frozen=True):
    """Segments that were added to the folder on disk, or all its segments if `is_all`."""

    segments: tuple[tuple[bytes, int, int], ...]  # name, first block and end of each segment
    is_all: bool = False
    num_bytes: int = 0  # bytes written for these segments


DiskNews = SegmentRead | SegmentsOnDisk
