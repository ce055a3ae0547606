"""Encodes and checks a segment's file: a head, the cached data, and a checksum. Opens no file.

The head contains everything that must match before the data may be used. A reader builds the
expected head and compares the bytes. So a reader never decodes or trusts a file's head.
"""

import zlib
from collections.abc import Iterator
from io import FileIO
from struct import Struct

from headrace_common.prefix import PrefixSegment

MAGIC = b"headrace prefix\n"
VERSION = 1
CHECKSUM_BYTES = 4
_START = Struct("<16sI")  # magic, version
_FIELDS = Struct("<16sQQQQ")  # key, first block, end, bytes of the origin, bytes of the tokens
_READ_BYTES = 1 << 20


class Unusable(Exception):
    """Raised for a file that cannot be used; the reason is `damaged`, `older` or `foreign`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def head(key: bytes, segment: PrefixSegment) -> bytes:
    """Return the head of a segment's file. `key` identifies the model."""
    sizes = len(segment.origin), len(segment.token_ids)
    fields = _FIELDS.pack(key, segment.first, segment.end, *sizes)
    return _START.pack(MAGIC, VERSION) + fields + segment.origin + segment.token_ids


def parts(key: bytes, segment: PrefixSegment, numbers: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the parts of the file, in order."""
    begin = head(key, segment)
    yield begin
    yield numbers
    yield zlib.crc32(numbers, zlib.crc32(begin)).to_bytes(CHECKSUM_BYTES, "little")


def read(file: FileIO, size: int, expected: bytes, num_bytes: int) -> memoryview:
    """Check a file of `size` bytes and return the cached data. `expected` is the expected head.

    Raise Unusable if the file is damaged, has another version, or belongs to another prefix or
    model.
    """
    begin = file.read(len(expected))
    if begin[: len(MAGIC)] != MAGIC or len(begin) < _START.size:
        raise Unusable("damaged")
    if _START.unpack_from(begin)[1] != VERSION:
        raise Unusable("older")
    if size != len(expected) + num_bytes + CHECKSUM_BYTES:
        raise Unusable("damaged")
    numbers = memoryview(bytearray(num_bytes))
    checksum, done = zlib.crc32(begin), 0
    while done < num_bytes:
        got = file.readinto(numbers[done : done + _READ_BYTES])
        if not got:
            raise Unusable("damaged")
        # The checksum is computed in pieces, while the bytes are in the processor's cache.
        checksum = zlib.crc32(numbers[done : done + got], checksum)
        done += got
    if file.read(CHECKSUM_BYTES) != checksum.to_bytes(CHECKSUM_BYTES, "little"):
        raise Unusable("damaged")
    if begin != expected:
        raise Unusable("foreign")
    return numbers
