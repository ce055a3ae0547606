"""Collects complete answers from the logs of their streams."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.protocols.dialect import dialect_of, encode
from headrace.streams.events import AnyEvent, Error
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError

_whole_bodies = ThreadPoolExecutor(1, "whole-body")
# The last NUM_NEW events of a log count as new. A few steps write about as many events.
NUM_NEW = 8
_PAGE = 256


def is_old(log: Log, event: AnyEvent) -> bool:
    """Return whether many events of the log follow this event.

    A reader of old events should yield to the event loop.
    """
    return log.next_seq - event.seq > NUM_NEW


async def encoded(whole: Callable[[], Any]) -> bytes:
    """Encode the result of `whole` in a thread: encoding long log probabilities takes seconds.

    Answers are encoded one at a time, because encoding holds several copies of an answer.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_whole_bodies, lambda: encode(whole()))


class AnswerBody:
    """Collects the complete answer of a stream, in the dialect of the stream's request."""

    def __init__(self, record: Record) -> None:
        # The error that ended the stream; None if the stream did not end with an error.
        self.error: Error | None = None
        self._dialect = dialect_of(record.request.route)
        self._body = self._dialect.response_body(record)

    def feed(self, event: AnyEvent) -> None:
        """Add an event. The caller passes every event in order, starting from number 0."""
        if isinstance(event, Error):
            self.error = event
        else:
            self._body.feed(event)

    async def gather(self, log: Log) -> AnyEvent:
        """Feed all events of a log to the body until the stream ends. Return the last event."""
        after, has_ended = -1, False
        while not has_ended:
            await log.wait(after)
            page, has_ended = await log.read(after, _PAGE)
            for event in page:
                if len(page) > NUM_NEW and is_old(log, event):
                    await slice_of_loop()
                self.feed(event)
            after += len(page)
        return page[-1]

    async def body(self) -> bytes:
        return self.failure(self.error) if self.error else await encoded(self._body.whole)

    def failure(self, error: RequestError | Error) -> bytes:
        return self._dialect.ERRORS.body(error)
