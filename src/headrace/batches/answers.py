"""Answers the lines of batches, and checks all lines before it answers the first."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from headrace.batches.lines import chunks_of
from headrace.batches.records import BatchRecord
from headrace.batches.shelf import Blobs
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.answers import AnswerBody
from headrace.intake.intake import Intake
from headrace.intake.vectors import Asker
from headrace.protocols.batch_lines import MAX_FAULTS
from headrace.protocols.dialect import DIALECTS, ErrorFormat, dialect_of
from headrace.protocols.openai import chunks as openai
from headrace.protocols.vectors import embeddings, rerank
from headrace.streams.log import LogGone
from headrace.streams.record import Names
from headrace.streams.store import ByKey
from headrace.workers.pool import Work
from headrace_common.errors import RequestError
from headrace_common.jobs import (
    CheckedLines,
    CheckLines,
    LineFault,
    OpenLine,
    ReadBody,
    ReadInputs,
    ReadJob,
    ReadPairs,
)
from headrace_common.log_context import begin_request
from headrace_common.request import BACKGROUND, Route

logger = logging.getLogger(__name__)
T = TypeVar("T")

ROUTES: tuple[Route, ...] = (*DIALECTS, embeddings.ROUTE, *rerank.ROUTES)
"""Routes that lines may name."""

MAX_ANSWER_BYTES = 256 << 20
"""Bytes of one answer; every shelf takes so many in one write, and Redis no more than 512 MB."""

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
_DIGEST = 16
_SHARE = 4  # lines in work: the sequences that run at once, divided by this
_UNKNOWN = 8  # lines in work while no model is in memory
_AGAIN = RequestError("server_restarting", "The stream of this line is gone; it is asked again.")


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


class LineAnswers:
    """Answers lines as their routes answer requests, but in the background.

    The stream of a line has a key, by which it is found again.
    """

    def __init__(self, generation: Generation, intake: Intake) -> None:
        self._generation = generation
        self._intake = intake

    @property
    def num_at_once(self) -> int:
        """Lines of all batches that may be in work: a share of the smallest engine's sequences."""
        hosts = self._generation.fleet.hosts.all()
        places = [host.ready.max_num_seqs for host in hosts if host.ready]
        return max(1, min(places) // _SHARE) if places else _UNKNOWN

    def check_model(self, name: str) -> None:
        """RequestError if no model of that name is served."""
        self._generation.fleet.hosts.get(name)

    async def read_models(self, lines: bytes) -> None:
        """Read the models that lines name; RequestError if one of them cannot be read."""
        await self._intake.read_models([lines], "lines")

    async def answer(self, asked: LineAsked) -> LineAnswer:
        """RequestError if the line should be asked again later; any other error is the answer."""
        begin_request(asked.key)
        line = await self._generation.work.do(OpenLine(), [asked.line])
        try:
            status, body = await self._answer(asked, line.body)
            if len(body) > MAX_ANSWER_BYTES:
                message = f"The answer has {len(body)} bytes, and a batch keeps "
                message += f"{MAX_ANSWER_BYTES} of one; ask for less in a line."
                raise RequestError("request_too_large", message)
        except RequestError as error:
            if error.kind.retry:
                raise
            status, body = self._failed(asked, error)
        except LogGone:
            raise _AGAIN.with_traceback(None) from None
        except Exception:  # fails the line, not its batch
            logger.exception("A line of a batch failed")
            failure = RequestError("internal_error", "The server failed on this request.")
            status, body = self._failed(asked, failure)
        return LineAnswer(line.custom_id, status, body)

    async def forget(self, asked: LineAsked) -> None:
        """Stop and remove the stream of a line, if there is one."""
        await self._generation.streams.discard(asked.owner, ByKey(asked.owner, asked.key))

    def _failed(self, asked: LineAsked, error: RequestError) -> tuple[int, bytes]:
        errors = _errors_of(asked.route)
        return errors.status(error), errors.body(error)

    async def _answer(self, asked: LineAsked, body: bytes) -> tuple[int, bytes]:
        checked = await self._intake.read(_job(asked.route), [body])
        checked.fields["priority"] = BACKGROUND
        if asked.route not in DIALECTS:
            asker = Asker(asked.route, asked.owner, BACKGROUND)
            return 200, await self._intake.vectors.answer(checked, asker)
        # An earlier server may have begun the stream; it is found by its key.
        names = Names(asked.owner, key=asked.key, digest=checked.digest)
        stream = (await self._intake.open(asked.route, checked, names)).stream
        return await stream.audience.pause.unless(_gathered(stream))


class Verdict(NamedTuple):
    """The number of lines, and what is wrong with them; a batch with faults is not begun."""

    num_lines: int
    faults: tuple[LineFault, ...]


class LineCheck:
    """Checks the lines of one batch in workers, some at a time."""

    def __init__(self, blobs: Blobs, work: Work, answers: LineAnswers, max_bytes: int) -> None:
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


async def _gathered(stream: Found) -> tuple[int, bytes]:
    """Return the status and the body of its answer; RequestError if a new attempt may succeed."""
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
    return ReadPairs() if route in rerank.ROUTES else ReadBody(route)


def _errors_of(route: Route) -> ErrorFormat:
    return dialect_of(route).ERRORS if route in DIALECTS else openai.ERRORS
