"""Whole answers, gathered from the logs of their streams."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from headrace.protocols.dialect import ResponseBody, dialect_of, encode
from headrace.streams.events import AnyEvent, Error
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError

_whole_bodies = ThreadPoolExecutor(1, "whole-body")
NUM_NEW = 8  # last events of a log that count as new: what a few steps write together
_PAGE = 256


def is_old(log: Log, event: AnyEvent) -> bool:
    """Whether later events have followed it: then its reader waits for a slice of the loop."""
    return log.next_seq - event.seq > NUM_NEW


async def encoded(body: ResponseBody) -> bytes:
    """Encode the answer in a thread: long log probabilities take seconds, and no stream may wait.

    One after the other: each holds the whole answer several times over.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_whole_bodies, lambda: encode(body.whole()))


class AnswerBody:
    """Gathers the whole answer of a stream, in the dialect of its request."""

    def __init__(self, record: Record) -> None:
        self.error: Error | None = None  # the stream was cut
        self._dialect = dialect_of(record.request.route)
        self._body = self._dialect.response_body(record)

    def feed(self, event: AnyEvent) -> None:
        """Takes every event from seq 0, in order."""
        if isinstance(event, Error):
            self.error = event
        else:
            self._body.feed(event)

    async def gather(self, log: Log) -> AnyEvent:
        """Feed it all events of a log, and return the last one once the stream has ended."""
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
        return self.failure(self.error) if self.error else await encoded(self._body)

    def failure(self, error: RequestError | Error) -> bytes:
        return self._dialect.ERRORS.body(error)
