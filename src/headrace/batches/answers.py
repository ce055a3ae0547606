"""The seam to what answers a line, and the check of all lines before the first one is."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from headrace.batches.lines import chunks_of
from headrace.batches.records import BatchRecord
from headrace.batches.shelf import Blobs
from headrace.protocols.batch_lines import MAX_FAULTS
from headrace.workers.pool import Work
from headrace_common.errors import RequestError
from headrace_common.jobs import CheckedLines, CheckLines, LineFault
from headrace_common.request import Route

T = TypeVar("T")

MAX_ANSWER_BYTES = 256 << 20
"""Bytes of one answer; every shelf takes so many in one write, and Redis no more than 512 MB."""

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
_DIGEST = 16


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """The result of work that may have to wait: for a disk, an engine, or its turn."""
    wait_s = LEAST_WAIT_S
    while True:
        try:
            return await work()
        except RequestError as error:
            if not error.kind.retry:
                raise
            await asyncio.sleep(max(wait_s, min(error.retry_after_s, MOST_WAIT_S)))
        wait_s = min(2 * wait_s, MOST_WAIT_S)


class LineAsked(NamedTuple):
    """A line to be answered. `key` is its own in all of time: asked again, it goes on."""

    route: Route
    owner: str
    key: str
    line: bytes


class LineAnswer(NamedTuple):
    """An answer as the route would have given it, and the custom_id of its line."""

    custom_id: str
    status: int
    body: bytes


class Answers(Protocol):
    """Answers lines from what other requests leave."""

    @property
    def num_at_once(self) -> int:
        """Lines of all batches that may be in work."""

    def check_model(self, name: str) -> None:
        """RequestError if no model of that name is served."""

    async def read_models(self, lines: bytes) -> None:
        """Read the models that lines name; RequestError if one of them cannot be read."""

    async def answer(self, asked: LineAsked) -> LineAnswer:
        """RequestError if it cannot be answered now, and should be asked again."""

    async def forget(self, asked: LineAsked) -> None:
        """Ends what a line began, and forgets it."""


class Verdict(NamedTuple):
    """The number of lines, and what is wrong with them; a batch with faults is not begun."""

    num_lines: int
    faults: tuple[LineFault, ...]


class LineCheck:
    """Checks the lines of one batch in workers, some at a time."""

    def __init__(self, blobs: Blobs, work: Work, answers: Answers, max_bytes: int) -> None:
        self._blobs = blobs
        self._work = work
        self._answers = answers
        self._max_bytes = max_bytes

    async def verdict(self, batch: BatchRecord, max_lines: int) -> Verdict:
        """The first faults, as many as are told."""
        num_lines, faults = 0, list[LineFault]()
        seen, models = set[bytes](), dict[str, int]()
        async for first, checked, found in self._checked(batch):
            faults += found
            num_lines += checked.num_lines
            for at in range(0, len(checked.digests), _DIGEST):
                digest = checked.digests[at : at + _DIGEST]
                if digest in seen:
                    message = "custom_id is that of an earlier line, this one or one of the next "
                    message += f"{checked.num_lines}; give each line its own."
                    faults.append(LineFault(first, "duplicate_id", message, "custom_id"))
                    break
                seen.add(digest)
            models = checked.models | models
            if num_lines > max_lines:
                message = f"The file has more than the {max_lines} lines that one batch may have; "
                message += "split it, or raise --max-batch-lines."
                faults.insert(0, LineFault(max_lines + 1, "request_too_large", message))
            if len(faults) >= MAX_FAULTS or num_lines > max_lines:
                break
        faults += self._unknown(models)
        if not num_lines and not faults:
            faults.append(LineFault(1, "invalid_value", "The file has no lines; send one or more."))
        return Verdict(num_lines, tuple(faults[:MAX_FAULTS]))

    async def _checked(
        self, batch: BatchRecord
    ) -> AsyncIterator[tuple[int, CheckedLines, list[LineFault]]]:
        """The verdicts on pieces of the file, with the number of the first line of each."""
        nothing = CheckedLines(0, b"", {}, ())
        async for first, lines in chunks_of(self._blobs, batch.input_id, self._max_bytes):
            if lines is None:
                message = f"The line is longer than the {self._max_bytes} bytes that a body may "
                message += "have; send less, or raise --max-body-bytes."
                yield first, nothing, [LineFault(first, "request_too_large", message)]
                continue
            check = partial(self._check, CheckLines(first, batch.route), lines)
            try:
                checked = await patiently(check)
            except RequestError as error:
                yield first, nothing, [LineFault(first, error.code, f"From here on: {error}")]
            else:
                yield first, checked, list(checked.faults)

    async def _check(self, job: CheckLines, lines: bytes) -> CheckedLines:
        await self._answers.read_models(lines)
        return await self._work.do(job, [lines])

    def _unknown(self, models: dict[str, int]) -> list[LineFault]:
        """Faults of the first lines that name models nobody serves."""
        faults = []
        for name, line in models.items():
            try:
                self._answers.check_model(name)
            except RequestError as error:
                faults.append(LineFault(line, error.code, str(error), "body.model"))
        return faults
