"""The nouns of batches: files, and batches of lines to be answered; frozen, stored as msgpack."""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TypeVar

import msgspec

from headrace.workers.loop_slices import slice_of_loop
from headrace_common.jobs import LineFault

logger = logging.getLogger(__name__)

FILE, BATCH, OPEN, STOP = "file", "batch", "open", "stop"
"""Kinds of records: what there is, and by a batch's id whether it is unfinished, and to stop."""

SUCCEEDED, ERRORED, CANCELED, EXPIRED = "succeeded", "errored", "canceled", "expired"
"""Ends of a line."""


T = TypeVar("T")
_NUM_AT_ONCE = 16  # records, less than a tenth of a millisecond


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def now_s() -> int:
    return int(time.time())


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a key; its bytes are a blob of the same id."""

    id: str
    owner: str
    name: str
    purpose: str
    num_bytes: int
    created_at: int  # this and the next in unix seconds
    expires_at: int
    is_listed: bool = True


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch as far as it has come. `status` is a word of OpenAI's."""

    id: str
    owner: str
    api: str  # in whose form lines are answered: openai or anthropic
    route: str  # of every line
    input_id: str
    created_at: int
    window_s: int
    status: str = "validating"
    at: Mapping[str, int] = {}  # when it came to each status
    metadata: Mapping[str, str] = {}
    num_lines: int = 0
    counts: Mapping[str, int] = {}  # of lines, by how they ended
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

    def moved(self, status: str) -> "BatchRecord":
        """The same, at its next status from now on."""
        return msgspec.structs.replace(self, status=status, at={**self.at, status: now_s()})


async def in_slices(packed: Iterable[bytes], kind: type[T]) -> AsyncIterator[T]:
    """Yield the records as they are read, in slices of the event loop."""
    for number, record in enumerate(packed):
        if number % _NUM_AT_ONCE == 0:
            await slice_of_loop()
        if (found := read_record(record, kind)) is not None:
            yield found


def read_record(packed: bytes | None, kind: type[T]) -> T | None:
    """None if there is none, or if it is damaged."""
    try:
        return None if packed is None else msgspec.msgpack.decode(packed, type=kind)
    except msgspec.DecodeError:
        logger.warning("The record of a file or batch is damaged, and passed over")
        return None


encode_record = msgspec.msgpack.Encoder().encode
