"""Reads files of the batch store line by line: files of requests and files of results."""

import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from headrace.batches.records import ERRORED, SUCCEEDED, BatchRecord
from headrace.batches.store import Blobs

PIECE = 256 << 10
_RESULT = re.compile(rb'\{"id":"batch_req_[0-9a-f]+_(\d+)"(?:,"result":\{"type":"(\w+)")?')


class LineChunk(NamedTuple):
    """Complete lines and the number of the first line.

    `lines` is None if the chunk is a single line that is too long.
    """

    first: int
    lines: bytes | None


async def chunks_of(blobs: Blobs, id: str, most: int) -> AsyncIterator[LineChunk]:
    """Yield all lines of a blob in chunks. The lines are numbered from 1.

    A line of more than `most` bytes becomes a separate chunk without its bytes.
    """
    number, at, rest = 1, 0, bytearray()
    is_skipping = False
    while piece := await blobs.read(id, at, PIECE):
        at += len(piece)
        end = piece.rfind(b"\n") + 1
        if is_skipping:
            start = piece.find(b"\n") + 1
            if not start:
                continue
            number, is_skipping = number + 1, False
            piece, end = piece[start:], end - start
        if end:
            yield LineChunk(number, bytes(rest + piece[:end]))
            number += piece.count(b"\n", 0, end)
            rest = bytearray(piece[end:])
        else:
            rest += piece
        if len(rest) > most:
            yield LineChunk(number, None)
            rest, is_skipping = bytearray(), True
    if rest:
        yield LineChunk(number, bytes(rest))


async def lines_of(blobs: Blobs, id: str, most: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    async for chunk in chunks_of(blobs, id, most):
        for number, line in enumerate((chunk.lines or b"").split(b"\n"), chunk.first):
            if line.strip():
                yield number, line


class Answered(NamedTuple):
    """The lines that have a result.

    `numbers` has the line numbers. `counts` has the number of lines per kind of result, and `sizes`
    the bytes of each result file.
    """

    numbers: set[int]
    counts: Counter[str]
    sizes: Counter[str]


async def answered(blobs: Blobs, batch: BatchRecord) -> Answered:
    """Find the lines that have a result. Only the result files record this."""
    numbers, counts, sizes = set[int](), Counter[str](), Counter[str]()
    for id, kind in ((batch.output_id, SUCCEEDED), (batch.error_id, ERRORED)):
        at = 0
        while id is not None and (piece := await blobs.read(id, at, PIECE)):
            whole, end = bytearray(piece), piece.rfind(b"\n") + 1
            while not end and (more := await blobs.read(id, at + len(whole), PIECE)):
                if b"\n" in more:
                    end = len(whole) + more.rfind(b"\n") + 1
                whole += more
            if not end:
                # The rest is an incomplete line that a killed server left.
                break
            at += end
            sizes[id] = at
            start = 0
            while start < end:
                if found := _RESULT.match(whole, start):
                    numbers.add(int(found[1]))
                    counts[found[2].decode() if found[2] else kind] += 1
                start = whole.index(b"\n", start) + 1
    return Answered(numbers, counts, sizes)
