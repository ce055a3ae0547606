"""Responses found again by their ids: read, streamed from a number on, stopped, forgotten."""

import contextlib
import re

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.bodies import Bodies, HeldAnswer
from headrace.gateway.delivery import (
    AnswerSoFar,
    LiveAnswer,
    LiveFrames,
    pace_of,
    unless_left,
)
from headrace.gateway.http_responses import answer
from headrace.gateway.named_models import read_named_models
from headrace.generation.generation import Generation
from headrace.generation.registry import Found, Registry
from headrace.protocols.dialect import encode
from headrace.protocols.openai.response_events import GrowingResponse
from headrace.protocols.openai.responses import NO_ITEMS, ROUTE, ResponseFrames
from headrace.streams.events import AnyEvent, Finish
from headrace.streams.log import follow
from headrace.streams.record import Record
from headrace.streams.store import ById
from headrace.workers.image_file import see_images
from headrace.workers.job_line import Body
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import CheckedBody, EncodePrompts, GoOn, ListInput, ReadBody
from headrace_common.request import Chat

_NUMBER = re.compile(r"[0-9]{1,15}")
_MAX_LIMIT, _LIMIT = 100, 20
_MAX_TOKENS = 1 << 30  # a prompt is counted to its end


class EarlierResponses:
    """The conversations that requests go on from, by previous_response_id."""

    def __init__(self, generation: Generation, max_bytes: int) -> None:
        self._generation = generation
        self._max_bytes = max_bytes

    async def put_before(self, checked: CheckedBody, owner: str) -> CheckedBody:
        """The request with the conversation it goes on from; RequestError if there is none."""
        checked = await self.resolve(checked, owner)
        id = checked.fields.get("previous_response_id")
        if id is None:
            return checked
        found = await find(self._generation.streams, owner, id, "previous_response_id")
        kept = found.record.request.kept
        output = await _output(found)
        num_bytes = len(kept) + len(output) + len(checked.kept)
        if num_bytes > self._max_bytes:
            message = f"The conversation takes {num_bytes} bytes, and {self._max_bytes} are taken; "
            message += "begin a new one, or raise --max-body-bytes."
            raise RequestError("request_too_large", message, "previous_response_id")
        packed = msgspec.msgpack.encode((kept, output, checked, {}))
        return await self._generation.work.do(GoOn(), [packed])

    async def resolve(self, checked: CheckedBody, owner: str) -> CheckedBody:
        """Return the request with items of the owner's responses in place of references to them.

        A reference to anything else stays, and the model is not shown it.
        """
        found = dict[str, tuple[bytes, bytes]]()
        num_bytes = len(checked.kept)
        for id in checked.fields.get("referenced", ()):
            with contextlib.suppress(RequestError):
                response = await find(self._generation.streams, owner, id)
                kept, output = response.record.request.kept, await _output(response)
                num_bytes += len(kept) + len(output)
                if num_bytes <= self._max_bytes:
                    found[id] = kept, output
        if not found:
            return checked
        packed = msgspec.msgpack.encode((NO_ITEMS, b"[]", checked, found))
        return await self._generation.work.do(GoOn(), [packed])


class ResponsesRoutes:
    def __init__(
        self, generation: Generation, config: ServerConfig, auth: Auth, bodies: Bodies
    ) -> None:
        self._generation = generation
        self._earlier = EarlierResponses(generation, config.http.max_body_bytes)
        self._config = config.streams
        self._auth = auth
        self._bodies = bodies

    async def read(self, request: Request) -> ASGIApp:
        found = await self._find(request)
        if request.query_params.get("stream") != "true":
            return AnswerSoFar(found)
        after = _number(request, "starting_after")
        view = _Behind(found.record, -1 if after is None else after)
        pace = pace_of(found.record, self._config)
        if not found.record.request.response_options.stream:
            pace = pace._replace(heartbeat_s=self._config.heartbeat_s)
        return LiveAnswer(found, view, pace)

    async def cancel(self, request: Request) -> ASGIApp:
        found = await self._find(request)
        await self._generation.streams.stop(found)
        return AnswerSoFar(found)

    async def delete(self, request: Request) -> ASGIApp:
        id = (await self._find(request)).record.id
        await self._generation.streams.discard(self._auth.owner(request.headers), ById(id))
        return answer({"id": id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> ASGIApp:
        """A page of what led to the response."""
        limit = _number(request, "limit")
        if limit is not None and not 1 <= limit <= _MAX_LIMIT:
            raise _out_of_range("limit", f"a number from 1 to {_MAX_LIMIT}")
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise _out_of_range("order", "asc or desc")
        record = (await self._find(request)).record
        after = request.query_params.get("after", "")
        page = ListInput(record.id, limit or _LIMIT, order == "asc", after)
        listing = self._generation.work.do(page, [record.request.kept])
        return HeldAnswer(await unless_left(request.receive, listing), self._bodies)

    async def input_tokens(self, request: Request) -> ASGIApp:
        """The length of the prompt that a body would make."""
        async with self._bodies.read(request) as body:
            checked = await unless_left(request.receive, self._read(body))
        owner = self._auth.owner(request.headers)
        checked = await unless_left(request.receive, self._earlier.resolve(checked, owner))
        counting = self._count(checked, owner)
        num_tokens = await unless_left(request.receive, counting)
        counted = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return answer(counted, checked.ignored)

    async def _read(self, body: Body) -> CheckedBody:
        await read_named_models(self._generation, body)
        return await self._generation.work.do(ReadBody(ROUTE), body)

    async def _count(self, checked: CheckedBody, owner: str) -> int:
        name = self._generation.fleet.hosts.get(checked.fields.get("model")).name
        checked = await self._earlier.put_before(checked, owner)
        if any(isinstance(prompt, Chat) and prompt.num_images for prompt in checked.stubs):
            work = self._generation.work
            packed = await self._generation.pictures.put(work, checked.stubs, checked.packed)
            seen = await see_images(work, packed, name)
            seen.close()
            return sum(len(token_ids) // 4 for token_ids in seen.prompts)
        job = EncodePrompts(_MAX_TOKENS, name)
        encoded = await self._generation.work.do(job, [checked.packed])
        return sum(len(token_ids) // 4 for token_ids in encoded.prompts)

    async def _find(self, request: Request) -> Found:
        owner = self._auth.owner(request.headers)
        return await find(self._generation.streams, owner, request.path_params["id"])


class _Behind(LiveFrames):
    """The frames of the POST that follow an event's number."""

    def __init__(self, record: Record, after: int) -> None:
        super().__init__(record)
        self._after = after

    def render(self, event: AnyEvent) -> list[bytes]:
        frames = super().render(event)
        assert isinstance(self._frames, ResponseFrames)
        places = self._frames.places
        if len(places) != len(frames):  # a comment
            return frames
        pairs = zip(frames, places, strict=True)
        return [frame for frame, place in pairs if place > self._after]


async def find(streams: Registry, owner: str, id: str, param: str = "id") -> Found:
    """The response of that id, if it is this owner's."""
    found = await streams.find(owner, ById(StreamId(id)))
    if found is None or found.record.request.route != ROUTE:
        message = "There is no such response, or it has expired, or was not stored."
        raise RequestError("stream_not_found", message, param)
    return found


async def _output(found: Found) -> bytes:
    """The items of an ended response, as JSON."""
    last, _ = await found.log.read(found.log.next_seq - 2, 1)
    if not last or not isinstance(last[0], Finish):
        message = "The response of previous_response_id has not ended, or was cut; "
        message += "wait until it is completed or incomplete."
        raise RequestError("invalid_value", message, "previous_response_id")
    response = GrowingResponse(found.record)
    async for event in follow(found.log):
        await slice_of_loop()
        response.feed(event)
    return encode(response.output)


def _number(request: Request, name: str) -> int | None:
    """None if it was not given."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise _out_of_range(name, "a number")
    return int(text)


def _out_of_range(name: str, wanted: str) -> RequestError:
    return RequestError("invalid_value", f"{name} takes {wanted}.", name)
