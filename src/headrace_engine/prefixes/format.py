"""A file of a prefix run as bytes: its head, the cached numbers, a checksum. Opens no file.

The head says everything that must be equal for the numbers to be of use, so a reader makes the head
that it expects and compares: nothing in a file is believed, and nothing is decoded.
"""

import zlib
from collections.abc import Iterator
from io import FileIO
from struct import Struct

from headrace_common.prefix import PrefixRun

MAGIC = b"headrace prefix\n"
VERSION = 1
CHECKSUM_BYTES = 4
_START = Struct("<16sI")  # magic, version
_FIELDS = Struct("<16sQQQQ")  # key, first block, end, bytes of the origin, bytes of the tokens
_READ_BYTES = 1 << 20


class Unusable(Exception):
    """A file that is not what it should be: `damaged`, `older` or `foreign`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def head(key: bytes, run: PrefixRun) -> bytes:
    """The beginning of the file of a run that was computed under `key`."""
    sizes = len(run.origin), len(run.token_ids)
    fields = _FIELDS.pack(key, run.first, run.end, *sizes)
    return _START.pack(MAGIC, VERSION) + fields + run.origin + run.token_ids


def parts(key: bytes, run: PrefixRun, numbers: memoryview) -> Iterator[bytes | memoryview]:
    """The file's bytes, in order."""
    begin = head(key, run)
    yield begin
    yield numbers
    yield zlib.crc32(numbers, zlib.crc32(begin)).to_bytes(CHECKSUM_BYTES, "little")


def read(file: FileIO, size: int, expected: bytes, num_bytes: int) -> memoryview:
    """The numbers of a file of `size` bytes, which should begin with the head `expected`.

    Unusable says why there are none.
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
        checksum = zlib.crc32(numbers[done : done + got], checksum)  # while it is in the cache
        done += got
    if file.read(CHECKSUM_BYTES) != checksum.to_bytes(CHECKSUM_BYTES, "little"):
        raise Unusable("damaged")
    if begin != expected:
        raise Unusable("foreign")
    return numbers
