"""Stores conversations (/v1/conversations) as streams.

The newest stream with a conversation's name holds the conversation: its stored body has all earlier
items. A response is such a stream, so its input and its output belong to the conversation as soon
as the response has completed, and only once. Every other change stores a stream without events
except its end. Only one stream can follow another, so no change is lost.
"""

import asyncio
import contextlib
import re
import secrets
import time
from typing import NamedTuple

import msgspec

from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.answers import encoded
from headrace.protocols.openai.response_events import ResponseBuilder
from headrace.protocols.openai.responses import ID_PREFIX, ROUTE
from headrace.streams.events import AnyEvent, Finish, Timings, Usage
from headrace.streams.log import LogGone, LogTaken, LogUnsound, follow
from headrace.streams.record import CONVERSATION, Names, Record
from headrace.streams.store import ByConversation, ConversationLocked, Name
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.request import Request
from headrace_common.sampling import Sampling
from headrace_common.system.race import uncut
from headrace_common.worker_jobs import UseConversation

_MAX_TRIES = 5
# The time that another server has for stopping a response.
_STOP_S = 5.0
_ID = re.compile(r"conv_[0-9a-f]{32}")


class Newest(NamedTuple):
    """The newest stream of a conversation. `output` is empty if the stream adds no items."""

    found: Found
    output: bytes
    is_running: bool

    @property
    def id(self) -> StreamId:
        return self.found.record.id

    @property
    def kept(self) -> bytes:
        return self.found.record.request.kept


class Conversations:
    """Reads, changes and deletes the conversations of API keys."""

    def __init__(self, generation: Generation, max_bytes: int) -> None:
        """`max_bytes` limits the items of a conversation."""
        self._generation = generation
        self._max_bytes = max_bytes

    async def newest(self, owner: str, id: str, param: str = "id") -> Newest:
        """Return the newest stream of a conversation. Raise RequestError if there is none."""
        for _ in range(_MAX_TRIES):
            # The stream that was found may be replaced and deleted before it is read.
            with contextlib.suppress(LogGone):
                return await self._newest(owner, id, param)
        raise ConversationLocked

    async def _newest(self, owner: str, id: str, param: str) -> Newest:
        found = None
        if _ID.fullmatch(id):
            found = await self._generation.streams.find(
                owner, ByConversation(owner, CONVERSATION + id), suspended=True
            )
        if found is None or not found.record.request.kept:
            message = f"Conversation with id '{id[:64]}' not found."
            raise RequestError("conversation_not_found", message, param)
        last = await last_event(found)
        is_response = isinstance(last, Finish) and bool(found.record.prompts)
        output = await output_of(found) if is_response else b""
        return Newest(found, output, is_running=last is None)

    async def create(self, owner: str, body: bytes) -> bytes:
        """Create a conversation; return the conversation as JSON."""
        job = UseConversation(
            what="create",
            id=f"conv_{secrets.token_hex(16)}",
            new_id=_new_id(),
            created=int(time.time()),
        )
        used = await self._generation.work.do(job, [msgspec.msgpack.encode((b"", b"", body))])
        await self._put(owner, job, used.kept, follows=None)
        return used.answer

    async def use(self, owner: str, job: UseConversation, body: bytes = b"") -> bytes:
        """Return the answer of a job, after storing its change to the conversation, if any."""
        newest = await self.newest(owner, job.id)
        job = msgspec.structs.replace(job, stream_id=newest.id, new_id=_new_id())
        packed = msgspec.msgpack.encode((newest.kept, newest.output, body))
        used = await self._generation.work.do(job, [packed])
        if used.kept:
            if newest.is_running:
                raise ConversationLocked
            await self._put(owner, job, used.kept, newest.found.record)
        return used.answer

    async def delete(self, owner: str, id: str) -> None:
        """Delete a conversation. A running response is stopped; responses can still be read."""
        try:
            newest = await self.newest(owner, id)
        except LogUnsound:
            await self._generation.streams.discard(owner, ByConversation(owner, CONVERSATION + id))
            return
        await self._stop(newest.found)
        # An empty stream takes over the name, so that stored responses are kept.
        job = UseConversation(what="show", id=id, new_id=_new_id())
        await self._put(owner, job, b"", newest.found.record)
        await self._generation.streams.store.forget(StreamId(job.new_id))

    async def discard(self, owner: str, name: Name) -> None:
        """Delete a stream. First, move its conversation to another stream, if there is one."""
        with contextlib.suppress(LogUnsound):
            found = await self._generation.streams.find(owner, name, suspended=True)
            if found is not None and found.record.names.is_in_conversation:
                await self._stop(found)
                await self._pass_on(owner, found.record)
        await self._generation.streams.discard(owner, name)

    async def _stop(self, found: Found) -> None:
        """End a stream, even if another server writes it."""
        await self._generation.streams.stop(found)
        try:
            async with asyncio.timeout(_STOP_S):
                while await last_event(found) is None:
                    await found.log.wait(found.log.next_seq - 1)
        except TimeoutError:
            raise ConversationLocked from None

    async def _pass_on(self, owner: str, record: Record) -> None:
        """Store a conversation in a new stream, if it is stored in the stream of this record."""
        name = record.names.conversation or ""
        found = await self._generation.streams.find(owner, ByConversation(owner, name))
        if found is None or found.record.id != record.id:
            return
        newest = await self.newest(owner, id := name.removeprefix(CONVERSATION))
        job = UseConversation(what="copy", id=id, stream_id=newest.id, new_id=_new_id())
        packed = msgspec.msgpack.encode((newest.kept, newest.output, b""))
        used = await self._generation.work.do(job, [packed])
        # If another stream has taken over the conversation meanwhile, that stream stores it too.
        with contextlib.suppress(ConversationLocked):
            await self._put(owner, job, used.kept, record)

    async def _put(
        self, owner: str, job: UseConversation, kept: bytes, follows: Record | None
    ) -> None:
        """Store a change in a stream that follows the newest stream of the conversation."""
        if len(kept) > self._max_bytes and job.what in ("create", "add"):
            raise too_large(len(kept), self._max_bytes, "items")
        store = self._generation.streams.store
        names = Names(
            owner,
            CONVERSATION + job.id,
            can_attach=False,
            follows=follows.id if follows else None,
        )
        record = Record(
            id=StreamId(job.new_id),
            created=int(time.time()),
            request=Request(ROUTE, "", (), Sampling(), kept=kept),
            prompts=(),
            system_fingerprint="",
            names=names,
            is_durable=store.is_durable,
        )
        end = Finish(seq=0, at_ms=0, ends=(), usage=Usage(0, 0), timings=Timings())

        async def write() -> None:
            log = (await store.create(record)).log
            # A server that has taken the stream over ends it, too.
            with contextlib.suppress(LogTaken):
                await log.append(0, [end])
            if follows is not None and not is_shown(follows):
                await store.forget(follows.id)

        # A stream without its end would block the conversation.
        await uncut(write())


def is_shown(record: Record) -> bool:
    """Return whether clients can read a stream as a response."""
    names = record.names
    return not names.is_in_conversation or names.is_stored or names.is_kept


def too_large(num_bytes: int, most: int, param: str) -> RequestError:
    message = f"The conversation has {num_bytes} bytes; the limit is {most}. "
    message += "Start a new conversation, or raise --max-body-bytes."
    return RequestError("request_too_large", message, param)


async def last_event(found: Found) -> AnyEvent | None:
    """Return the terminal event of a stream; None if the stream has not ended."""
    log = found.log
    last, has_ended = await log.read(max(log.next_seq - 2, -1), 1)
    return last[0] if has_ended and last else None


async def output_of(found: Found) -> bytes:
    """Return the items that a response has generated, as JSON."""
    response = ResponseBuilder(found.record)
    async for event in follow(found.log):
        await slice_of_loop()
        response.feed(event)
    return await encoded(lambda: response.output)


def _new_id() -> StreamId:
    return StreamId(ID_PREFIX + secrets.token_hex(16))
