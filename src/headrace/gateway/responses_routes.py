"""Routes that find a response by its id: read, stream after an event number, cancel, delete."""

import re

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.delivery import (
    AnswerSoFar,
    LiveAnswer,
    pace_of,
    unless_left,
)
from headrace.gateway.http_responses import answer
from headrace.gateway.request_bodies import Bodies, CountedAnswer
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.earlier_responses import find
from headrace.intake.intake import Intake
from headrace.intake.long_responses import has_images
from headrace.protocols.dialect import WireFrames
from headrace.protocols.openai.responses import ROUTE, ResponseFrames
from headrace.streams.events import AnyEvent
from headrace.streams.record import Record
from headrace.streams.store import ById
from headrace.workers.input_memory import HeldInput
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import (
    CheckedBody,
    EncodePrompts,
    ListInput,
    ReadBody,
    WriteCompaction,
)

_NUMBER = re.compile(r"[0-9]{1,15}")
_MAX_LIMIT, _LIMIT = 100, 20
# Maximum number of tokens to count. No prompt is longer, so every prompt is counted completely.
_MAX_TOKENS = 1 << 30


class ResponsesRoutes:
    def __init__(
        self,
        generation: Generation,
        intake: Intake,
        config: ServerConfig,
        auth: Auth,
        bodies: Bodies,
    ) -> None:
        self._generation = generation
        self._intake = intake
        self._earlier = intake.earlier[ROUTE]
        self._config = config.streams
        self._auth = auth
        self._bodies = bodies

    async def read(self, request: Request) -> ASGIApp:
        found = await self._find(request)
        if request.query_params.get("stream") != "true":
            return AnswerSoFar(found)
        after = _number(request, "starting_after")
        view = _FramesAfter(found.record, -1 if after is None else after)
        pace = pace_of(found.record, self._config)
        if not found.record.request.response_options.stream:
            pace = pace._replace(heartbeat_s=self._config.heartbeat_s)
        return LiveAnswer(found, view, pace)

    async def cancel(self, request: Request) -> ASGIApp:
        found = await self._find(request, suspended=True)
        await self._generation.streams.stop(found)
        return AnswerSoFar(found)

    async def delete(self, request: Request) -> ASGIApp:
        id = (await self._find(request, suspended=True)).record.id
        await self._intake.conversations.discard(self._auth.owner(request.headers), ById(id))
        return answer({"id": id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> ASGIApp:
        """Return a page of the response's input items."""
        limit, is_rising, after = page_query(request)
        record = (await self._find(request)).record
        page = ListInput(record.id, limit, is_rising, after)
        listing = self._generation.work.do(page, [record.request.kept])
        return CountedAnswer(await unless_left(request.receive, listing), self._bodies)

    async def input_tokens(self, request: Request) -> ASGIApp:
        """Count the prompt tokens of a request without running it."""
        async with self._bodies.read(request) as body:
            checked = await unless_left(request.receive, self._intake.do(ReadBody(ROUTE), body))
        with self._hold(request, checked) as held:
            restoring = self._earlier.restore(checked, held.owner)
            checked = await unless_left(request.receive, restoring)
            num_tokens = await unless_left(request.receive, self._count(checked, held))
        counted = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return answer(counted, checked.ignored)

    async def compact(self, request: Request) -> ASGIApp:
        """Return a shorter conversation: the user's newest messages and a summary."""
        async with self._bodies.read(request) as body:
            agent = request.headers.get("user-agent", "")
            reading = self._intake.read_from(agent, ROUTE, body)
            checked = await unless_left(request.receive, reading)
        with self._hold(request, checked) as held:
            written = await unless_left(request.receive, self._compact(checked, held))
        return CountedAnswer(written, self._bodies, checked.ignored)

    def _hold(self, request: Request, checked: CheckedBody) -> HeldInput:
        """Count the input of a request that opens no stream itself."""
        owner = self._auth.owner(request.headers)
        return self._generation.queues.inputs.hold(owner, checked.num_bytes)

    async def _compact(self, checked: CheckedBody, held: HeldInput) -> bytes:
        host = await self._generation.host_for(checked.fields.get("model"), waits=True)
        checked = await self._earlier.restore(checked, held.owner)
        checked = await self._earlier.before(checked, held.owner)
        held.resize(checked.num_bytes)
        summary = await self._intake.long_responses.summarize(checked, host, held)
        assert summary is not None, "a summary that was asked for is always written"
        record = summary.record
        job = WriteCompaction(record.id, record.created, summary.text, summary.usage)
        return await self._generation.work.do(job, [checked.kept])

    async def _count(self, checked: CheckedBody, held: HeldInput) -> int:
        name = self._generation.fleet.hosts.get(checked.fields.get("model")).name
        checked = await self._earlier.before(checked, held.owner)
        held.resize(checked.num_bytes)
        if has_images(checked):
            return await self._intake.long_responses.count_with_images(checked, name, held)
        job = EncodePrompts(_MAX_TOKENS, name)
        encoded = await self._generation.work.do(job, [checked.packed])
        return sum(len(token_ids) // 4 for token_ids in encoded.prompts)

    async def _find(self, request: Request, suspended: bool = False) -> Found:
        owner, id = self._auth.owner(request.headers), request.path_params["id"]
        return await find(self._generation.streams, owner, id, suspended=suspended)


class _FramesAfter(WireFrames):
    """Renders the frames of the POST's answer whose event number is greater than `after`."""

    def __init__(self, record: Record, after: int) -> None:
        super().__init__(record)
        self._after = after
        assert isinstance(self._frames, ResponseFrames)
        self._frames.resume_after(max(after, 0))

    def render(self, event: AnyEvent) -> list[bytes]:
        frames = super().render(event)
        assert isinstance(self._frames, ResponseFrames)
        places = self._frames.places
        # A comment has no event number and is always sent.
        if len(places) != len(frames):
            return frames
        pairs = zip(frames, places, strict=True)
        return [frame for frame, number in pairs if number > self._after]


def page_query(request: Request) -> tuple[int, bool, str]:
    """Return a page's limit, whether its order is rising, and the id of the item before it."""
    limit = _number(request, "limit")
    if limit is not None and not 1 <= limit <= _MAX_LIMIT:
        raise _out_of_range("limit", f"a number from 1 to {_MAX_LIMIT}")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _out_of_range("order", "asc or desc")
    return limit or _LIMIT, order == "asc", request.query_params.get("after", "")


def _number(request: Request, name: str) -> int | None:
    """Read a number from the query; return None if the query does not have the number."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise _out_of_range(name, "a number")
    return int(text)


def _out_of_range(name: str, wanted: str) -> RequestError:
    return RequestError("invalid_value", f"{name} must be {wanted}.", name)
