"""Checks and answers the lines of a batch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from headrace.batches.lines import chunks_of
from headrace.batches.records import BatchRecord
from headrace.batches.store import Blobs
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.answers import AnswerBody
from headrace.intake.intake import Intake, names_of
from headrace.intake.vectors import Requester
from headrace.protocols.batch_lines import MAX_FAULTS, custom_id_of
from headrace.protocols.dialect import DIALECTS, ErrorFormat, dialect_of
from headrace.protocols.openai import chunks as openai
from headrace.protocols.vectors import embeddings, rerank, score
from headrace.streams.log import LogGone
from headrace.streams.store import ByKey
from headrace.workers.pool import JobRunner
from headrace_common.errors import RequestError
from headrace_common.log_context import begin_request
from headrace_common.request import BACKGROUND, Route
from headrace_common.worker_jobs import (
    CheckedLines,
    CheckLines,
    LineFault,
    OpenLine,
    ReadBody,
    ReadInputs,
    ReadJob,
    ReadPairs,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PAIRS: tuple[Route, ...] = (*rerank.ROUTES, *score.ROUTES)
ROUTES: tuple[Route, ...] = (*DIALECTS, embeddings.ROUTE, *_PAIRS)
"""Routes that a line may name."""

MAX_ANSWER_BYTES = 256 << 20
"""The maximum size of an answer, in bytes.

An answer is stored in one write, and Redis allows 512 MB per value.
"""

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
_DIGEST = 16
# Lines answered at the same time: one for every _SHARE sequences that an engine can run.
_SHARE = 4
# The number of lines answered at the same time while no model is in memory.
_UNKNOWN = 8
_AGAIN = RequestError("server_restarting", "The stream of this line is gone; the line is retried.")


async def retrying(work: Callable[[], Awaitable[T]]) -> T:
    """Call `work` until it succeeds. The wait grows with each failure.

    Raise an error that a retry cannot fix.
    """
    wait_s = LEAST_WAIT_S
    while True:
        try:
            return await work()
        except RequestError as error:
            if not error.kind.retry:
                raise
            await asyncio.sleep(max(wait_s, min(error.retry_after_s, MOST_WAIT_S)))
        wait_s = min(2 * wait_s, MOST_WAIT_S)


class LineRequest(NamedTuple):
    """A line to answer.

    `key` is the idempotency key of the line's stream. No other line ever gets the key, so a
    repeated attempt continues the first attempt.
    """

    route: Route
    owner: str
    key: str
    line: bytes


class LineAnswer(NamedTuple):
    """The answer that the line's route would have sent, with the `custom_id` of the line."""

    custom_id: str
    status: int
    body: bytes


class LineAnswers:
    """Answers lines as their routes would, but at background priority.

    The stream of each line has an idempotency key, so that later attempts find the stream.
    """

    def __init__(self, generation: Generation, intake: Intake) -> None:
        self._generation = generation
        self._intake = intake

    @property
    def num_at_once(self) -> int:
        """Return how many lines of all batches may be answered at the same time.

        The number is a fraction of the sequences that the smallest engine can run.
        """
        hosts = self._generation.fleet.hosts.all()
        capacities = [host.ready.max_num_seqs for host in hosts if host.ready]
        return max(1, min(capacities) // _SHARE) if capacities else _UNKNOWN

    def check_model(self, name: str) -> None:
        """Raise RequestError if the server has no model with this name."""
        self._generation.fleet.hosts.get(name)

    async def read_models(self, lines: bytes) -> None:
        """Read the models that the lines name, without the weights.

        Raises RequestError if a model cannot be read.
        """
        await self._intake.read_models([lines], "lines")

    async def answer(self, asked: LineRequest) -> LineAnswer:
        """Answer a line. Raises RequestError if the line should be retried later.

        Any other error becomes the line's answer.
        """
        begin_request(asked.key)
        custom_id = None
        try:
            line = await self._generation.work.do(OpenLine(), [asked.line])
            custom_id = line.custom_id
            status, body = await self._answer(asked, line.body)
            if len(body) > MAX_ANSWER_BYTES:
                message = f"The answer has {len(body)} bytes, and a batch stores at most "
                message += f"{MAX_ANSWER_BYTES} per answer; ask for less in one line."
                raise RequestError("request_too_large", message)
        except RequestError as error:
            if error.kind.retry:
                raise
            status, body = self._failed(asked, error)
        except LogGone:
            raise _AGAIN.with_traceback(None) from None
        # The failure concerns one line, not the whole batch.
        except Exception:
            logger.exception("A line of a batch failed")
            failure = RequestError("internal_error", "The server failed on this request.")
            status, body = self._failed(asked, failure)
        if custom_id is None:
            # Opening the line failed, so no worker has returned its custom_id.
            custom_id = await asyncio.to_thread(custom_id_of, asked.line)
        return LineAnswer(custom_id, status, body)

    async def forget(self, asked: LineRequest) -> None:
        """Stop and delete the stream of a line, if one exists."""
        await self._intake.conversations.discard(asked.owner, ByKey(asked.owner, asked.key))

    def _failed(self, asked: LineRequest, error: RequestError) -> tuple[int, bytes]:
        errors = _errors_of(asked.route)
        return errors.status(error), errors.body(error)

    async def _answer(self, asked: LineRequest, body: bytes) -> tuple[int, bytes]:
        checked = await self._intake.read(_job(asked.route), [body])
        checked.fields["priority"] = BACKGROUND
        if asked.route not in DIALECTS:
            asker = Requester(asked.route, asked.owner, BACKGROUND)
            return 200, await self._intake.vectors.answer(checked, asker)
        # A stream that an earlier server started is found by its key.
        names = names_of(asked.owner, checked, key=asked.key)
        stream = (await self._intake.open(asked.route, checked, names)).stream
        return await stream.audience.pause.unless(_gathered(stream))


class Verdict(NamedTuple):
    """The number of lines, and the faults found in the lines."""

    num_lines: int
    faults: tuple[LineFault, ...]


class LineCheck:
    """Checks the lines of one batch in workers, one chunk of the file at a time."""

    def __init__(self, blobs: Blobs, work: JobRunner, answers: LineAnswers, max_bytes: int) -> None:
        self._blobs = blobs
        self._work = work
        self._answers = answers
        self._max_bytes = max_bytes

    async def verdict(self, batch: BatchRecord, max_lines: int) -> Verdict:
        """Check all lines; stop early when MAX_FAULTS faults are found."""
        num_lines, faults = 0, list[LineFault]()
        seen, models = set[bytes](), dict[str, int]()
        async for first, checked, found in self._checked(batch):
            faults += found
            num_lines += checked.num_lines
            for at in range(0, len(checked.digests), _DIGEST):
                digest = checked.digests[at : at + _DIGEST]
                if digest in seen:
                    message = (
                        f"In the {checked.num_lines} lines that start here, a line repeats the "
                    )
                    message += "custom_id of an earlier line; give each line a different custom_id."
                    faults.append(LineFault(first, "duplicate_id", message, "custom_id"))
                    break
                seen.add(digest)
            models = checked.models | models
            if num_lines > max_lines:
                message = f"The file has more than {max_lines} lines, the limit for a batch; "
                message += "split the file, or raise --max-batch-lines."
                faults.insert(0, LineFault(max_lines + 1, "request_too_large", message))
            if len(faults) >= MAX_FAULTS or num_lines > max_lines:
                break
        faults += self._unknown(models)
        if not num_lines and not faults:
            faults.append(
                LineFault(1, "invalid_value", "The file has no lines; send at least one.")
            )
        return Verdict(num_lines, tuple(faults[:MAX_FAULTS]))

    async def _checked(
        self, batch: BatchRecord
    ) -> AsyncIterator[tuple[int, CheckedLines, list[LineFault]]]:
        """Check the file chunk by chunk.

        Yields for each chunk the number of its first line, the result of the check, and the faults.
        """
        nothing = CheckedLines(0, b"", {}, ())
        async for first, lines in chunks_of(self._blobs, batch.input_id, self._max_bytes):
            if lines is None:
                message = f"The line has more than {self._max_bytes} bytes, the limit for a body; "
                message += "shorten the line, or raise --max-body-bytes."
                yield first, nothing, [LineFault(first, "request_too_large", message)]
                continue
            check = partial(self._check, CheckLines(first, batch.route), lines)
            try:
                checked = await retrying(check)
            except RequestError as error:
                yield first, nothing, [LineFault(first, error.code, f"From this line on: {error}")]
            else:
                yield first, checked, list(checked.faults)

    async def _check(self, job: CheckLines, lines: bytes) -> CheckedLines:
        await self._answers.read_models(lines)
        return await self._work.do(job, [lines])

    def _unknown(self, models: dict[str, int]) -> list[LineFault]:
        """Return a fault for each model name that is not served, at the first line with it."""
        faults = []
        for name, line in models.items():
            try:
                self._answers.check_model(name)
            except RequestError as error:
                faults.append(LineFault(line, error.code, str(error), "body.model"))
        return faults


async def _gathered(stream: Found) -> tuple[int, bytes]:
    """Return the status and body of a stream's answer.

    Raises RequestError if a new attempt may succeed.
    """
    answer = AnswerBody(stream.record)
    async with stream.audience.reader() as reader:
        reader.sent(await answer.gather(stream.log))
    error = answer.error
    if error is not None and error.retryable:
        raise RequestError(error.code, error.message)
    errors = dialect_of(stream.record.request.route).ERRORS
    return 200 if error is None else errors.status(error), await answer.body()


def _job(route: Route) -> ReadJob:
    if route == embeddings.ROUTE:
        return ReadInputs()
    return ReadPairs(route) if route in _PAIRS else ReadBody(route)


def _errors_of(route: Route) -> ErrorFormat:
    return dialect_of(route).ERRORS if route in DIALECTS else openai.ERRORS
