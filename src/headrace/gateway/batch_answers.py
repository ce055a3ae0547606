"""Answers lines of batches as their routes answer requests, but from what others leave."""

import logging

from headrace.batches import answers
from headrace.batches.answers import LineAnswer, LineAsked
from headrace.gateway.delivery import AnswerBody, is_old
from headrace.gateway.vector_routes import Asker, VectorRoutes
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.intake import Intake
from headrace.protocols.dialect import DIALECTS, ErrorFormat, dialect_of
from headrace.protocols.openai import chunks as openai
from headrace.protocols.vectors import embeddings, rerank
from headrace.streams.log import LogGone
from headrace.streams.record import Names
from headrace.streams.store import ByKey
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError
from headrace_common.jobs import OpenLine, ReadBody, ReadInputs, ReadJob, ReadPairs
from headrace_common.log_context import begin_request
from headrace_common.request import BACKGROUND, Route

logger = logging.getLogger(__name__)

ROUTES: tuple[Route, ...] = (*DIALECTS, embeddings.ROUTE, *rerank.ROUTES)
"""Routes that lines may name."""

_SHARE = 4  # lines in work: one part in so many of the sequences that run at once
_UNKNOWN = 8  # while no model is in memory
_AGAIN = RequestError("server_restarting", "The stream of this line is gone; it is asked again.")


class BatchAnswers:
    """One per server. A line's stream is found again by its key, as that of any client is."""

    def __init__(self, generation: Generation, intake: Intake, vectors: VectorRoutes) -> None:
        self._generation = generation
        self._intake = intake
        self._vectors = vectors

    @property
    def num_at_once(self) -> int:
        """A share of the places in the smallest engine."""
        hosts = self._generation.fleet.hosts.all()
        places = [host.ready.max_num_seqs for host in hosts if host.ready]
        return max(1, min(places) // _SHARE) if places else _UNKNOWN

    def check_model(self, name: str) -> None:
        self._generation.fleet.hosts.get(name)

    async def read_models(self, lines: bytes) -> None:
        await self._intake.read_models([lines], "lines")

    async def answer(self, asked: LineAsked) -> LineAnswer:
        """RequestError for what passes; any other error is the answer."""
        begin_request(asked.key)
        line = await self._generation.work.do(OpenLine(), [asked.line])
        try:
            status, body = await self._answer(asked, line.body)
            if len(body) > answers.MAX_ANSWER_BYTES:
                message = f"The answer has {len(body)} bytes, and a batch keeps "
                message += f"{answers.MAX_ANSWER_BYTES} of one; ask for less in a line."
                raise RequestError("request_too_large", message)
        except RequestError as error:
            if error.kind.retry:
                raise
            status, body = self._failed(asked, error)
        except LogGone:
            raise _AGAIN.with_traceback(None) from None
        except Exception:  # one line, and not its batch
            logger.exception("A line of a batch failed")
            failure = RequestError("internal_error", "The server failed on this request.")
            status, body = self._failed(asked, failure)
        return LineAnswer(line.custom_id, status, body)

    async def forget(self, asked: LineAsked) -> None:
        """Stops its stream, if there is one, and removes it."""
        await self._generation.streams.discard(asked.owner, ByKey(asked.owner, asked.key))

    def _failed(self, asked: LineAsked, error: RequestError) -> tuple[int, bytes]:
        errors = _errors_of(asked.route)
        return errors.status(error), errors.body(error)

    async def _answer(self, asked: LineAsked, body: bytes) -> tuple[int, bytes]:
        checked = await self._intake.read(_job(asked.route), [body])
        checked.fields["priority"] = BACKGROUND
        if asked.route not in DIALECTS:
            asker = Asker(asked.route, asked.owner, BACKGROUND)
            return 200, await self._vectors.make(checked, asker)
        # found by its key, if an earlier server began it
        names = Names(asked.owner, key=asked.key, digest=checked.digest)
        stream = (await self._intake.open(asked.route, checked, names)).stream
        return await stream.audience.pause.unless(_gathered(stream))


async def _gathered(stream: Found) -> tuple[int, bytes]:
    """Status and body of its whole answer; RequestError if it was cut by what passes."""
    answer = AnswerBody(stream.record)
    async with stream.audience.reader() as events:
        async for event in events:
            if is_old(stream.log, event):
                await slice_of_loop()
            answer.feed(event)
            events.sent(event)
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
