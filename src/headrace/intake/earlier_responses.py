"""Adds earlier responses to a request of /v1/responses that refers to earlier responses."""

import contextlib

import msgspec

from headrace.generation.generation import Generation
from headrace.generation.registry import Found, Registry
from headrace.intake.conversations import (
    Conversations,
    is_shown,
    last_event,
    output_of,
    too_large,
)
from headrace.protocols.openai.response_items import response_of
from headrace.protocols.openai.responses import NO_ITEMS, ROUTE
from headrace.streams.events import Finish
from headrace.streams.store import ById, ByItem, ConversationLocked
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.worker_jobs import CheckedBody, ContinueResponse

# The maximum number of look-ups in the store for the references in one request.
_MAX_LOOKUPS = 256
# The maximum number of responses whose items one request can refer to.
_MAX_RESPONSES = 64


class EarlierResponses:
    """Adds earlier responses to requests that refer to earlier responses."""

    def __init__(
        self, generation: Generation, conversations: Conversations, max_bytes: int
    ) -> None:
        """`max_bytes` limits a conversation, including all its earlier responses."""
        self._generation = generation
        self._conversations = conversations
        self._max_bytes = max_bytes

    async def restore(self, checked: CheckedBody, owner: str) -> CheckedBody:
        """Return the request after replacing references with the items of the owner's responses.

        A reference that finds no item stays in the request; the model does not see the reference.
        """
        found = dict[str, tuple[bytes, bytes]]()
        num_bytes, num_lookups = len(checked.kept), 0
        # The ids of the responses found so far, and the item ids that clients chose.
        known = set[str]()
        for item in checked.fields.get("referenced", ()):
            if item in known or response_of(item) in known:
                continue
            if num_lookups == _MAX_LOOKUPS or len(found) == _MAX_RESPONSES:
                break
            num_lookups += 1
            with contextlib.suppress(RequestError):
                response = await self._with_item(owner, item)
                record = response.record
                known.update((record.id, *record.names.items))
                kept, output = record.request.kept, b"[]"
                # A response that is still being generated contributes only its input.
                with contextlib.suppress(RequestError):
                    output = await _output(response)
                num_bytes += len(kept) + len(output)
                if num_bytes <= self._max_bytes:
                    found[record.id] = kept, output
        if not found:
            return checked
        packed = msgspec.msgpack.encode((NO_ITEMS, b"[]", checked, found))
        return await self._generation.work.do(ContinueResponse(), [packed])

    async def _with_item(self, owner: str, item: str) -> Found:
        """Return the owner's response with this item. Raise RequestError if there is none."""
        streams = self._generation.streams
        if id := response_of(item):
            with contextlib.suppress(RequestError):
                return await find(streams, owner, id)
        # The client chose the item's id. Another server may have assigned the id originally.
        return _checked(await streams.find(owner, ByItem(owner, item)), "id")

    async def before(self, checked: CheckedBody, owner: str) -> CheckedBody:
        """Return the request with an earlier conversation before the request's own items.

        The field `previous_response_id` or `conversation` names the earlier conversation. If
        `conversation` names it, the result has the field `follows`. Raise RequestError if the
        conversation is unknown, unfinished or too large.
        """
        newest, param = StreamId(""), "previous_response_id"
        if (id := checked.fields.get(param)) is not None:
            found = await find(self._generation.streams, owner, id, param)
            kept, output = found.record.request.kept, await _output(found)
        elif (id := checked.fields.get("conversation")) is not None:
            param = "conversation"
            found, output, is_running = await self._conversations.newest(owner, id, param)
            if is_running:
                raise ConversationLocked
            kept, newest = found.record.request.kept, found.record.id
        else:
            return checked
        num_bytes = len(kept) + len(output) + len(checked.kept)
        if num_bytes > self._max_bytes:
            raise too_large(num_bytes, self._max_bytes, param)
        packed = msgspec.msgpack.encode((kept, output, checked, {}))
        checked = await self._generation.work.do(ContinueResponse(newest=newest), [packed])
        fields = checked.fields | ({"follows": newest} if newest else {})
        return msgspec.structs.replace(checked, fields=fields)


async def find(
    streams: Registry, owner: str, id: str, param: str = "id", suspended: bool = False
) -> Found:
    """Return the response with this id, as `Registry.find` does.

    Raise RequestError if `owner` has no such response.
    """
    return _checked(await streams.find(owner, ById(StreamId(id)), suspended), param)


def _checked(found: Found | None, param: str) -> Found:
    is_response = found is not None and found.record.request.route == ROUTE
    if found is None or not is_response or not is_shown(found.record):
        message = "No response has this id. It may have expired, or it was never stored."
        raise RequestError("stream_not_found", message, param)
    return found


async def _output(found: Found) -> bytes:
    """Return the items of an ended response as JSON. Raise RequestError if it has not finished."""
    if not isinstance(await last_event(found), Finish):
        message = "The response of previous_response_id is still running, or has failed. "
        message += "Only a response that is completed or incomplete can be continued."
        raise RequestError("invalid_value", message, "previous_response_id")
    return await output_of(found)
