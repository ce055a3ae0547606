"""Defines the records of files and batches, which are frozen and stored as msgpack."""

import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TypeVar

import msgspec

from headrace.workers.loop_slices import slice_of_loop
from headrace_common.worker_jobs import LineFault

logger = logging.getLogger(__name__)

FILE, BATCH, OPEN, STOP = "file", "batch", "open", "stop"
"""The kinds of records.

OPEN and STOP records have the id of a batch. An OPEN record marks an unfinished batch. A STOP
record asks the server that runs the batch to stop the batch.
"""

SUCCEEDED, ERRORED, CANCELED, EXPIRED = "succeeded", "errored", "canceled", "expired"
"""The kinds of results of a line."""


T = TypeVar("T")
# Decoding this many records takes less than a tenth of a millisecond.
_NUM_AT_ONCE = 16


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


class FileRecord(msgspec.Struct, frozen=True):
    """A file of an API key; the blob with the same id has its bytes."""

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    # `created_at` and `expires_at` are in unix seconds.
    created_at: int
    expires_at: int
    is_listed: bool = True


class BatchRecord(msgspec.Struct, frozen=True):
    """The state of a batch. `status` has the values of OpenAI's API."""

    id: str
    owner: str
    # The API whose format the results use: openai or anthropic.
    api: str
    # The route of every line.
    route: str
    input_id: str
    created_at: int
    window_s: int
    status: str = "validating"
    # Unix seconds at which each status was reached.
    at: Mapping[str, int] = {}
    metadata: Mapping[str, str] = {}
    num_lines: int = 0
    # The number of lines per kind of result.
    counts: Mapping[str, int] = {}
    faults: tuple[LineFault, ...] = ()
    output_id: str | None = None
    error_id: str | None = None

    @property
    def expires_at(self) -> int:
        return self.created_at + self.window_s

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def ended_at(self) -> int | None:
        return self.at.get(self.status) if self.has_ended else None

    @property
    def num_ended(self) -> int:
        return sum(self.counts.values())

    def moved(self, status: str, now: int) -> "BatchRecord":
        """Return the batch with `status`, which it reached at the time `now`, in unix seconds."""
        return msgspec.structs.replace(self, status=status, at={**self.at, status: now})


async def in_slices(packed: Iterable[bytes], kind: type[T]) -> AsyncIterator[T]:
    """Decode records and yield the records of type `kind`. Other tasks can run in between."""
    for number, record in enumerate(packed):
        if number % _NUM_AT_ONCE == 0:
            await slice_of_loop()
        if (found := read_record(record, kind)) is not None:
            yield found


def read_record(packed: bytes | None, kind: type[T]) -> T | None:
    """Decode a record; return None if it is missing or damaged."""
    try:
        return None if packed is None else msgspec.msgpack.decode(packed, type=kind)
    except msgspec.DecodeError:
        logger.warning("The record of a file or batch is damaged and is ignored")
        return None


encode_record = msgspec.msgpack.Encoder().encode
