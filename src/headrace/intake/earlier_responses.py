"""Add the earlier responses that a request of /v1/responses names to that request."""

import contextlib

import msgspec

from headrace.generation.generation import Generation
from headrace.generation.registry import Found, Registry
from headrace.protocols.dialect import encode
from headrace.protocols.openai.response_events import GrowingResponse
from headrace.protocols.openai.responses import NO_ITEMS, ROUTE
from headrace.streams.events import Finish
from headrace.streams.log import follow
from headrace.streams.store import ById
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import CheckedBody, GoOn


class EarlierResponses:
    """Puts earlier responses into the requests that name them.

    Requests of other routes have none of the fields that it reads, and stay as they are.
    """

    def __init__(self, generation: Generation, max_bytes: int) -> None:
        """`max_bytes` limits a conversation with all its earlier responses."""
        self._generation = generation
        self._max_bytes = max_bytes

    async def restore(self, checked: CheckedBody, owner: str) -> CheckedBody:
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

    async def before(self, checked: CheckedBody, owner: str) -> CheckedBody:
        """Return the request with the conversation that it continues in front of it.

        RequestError if there is no such conversation.
        """
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
