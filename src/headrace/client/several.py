"""Reads several answers at the same time, with tasks or with threads."""

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from headrace_common.answer import Answer, naming_input
from headrace_common.progress_bar import progress_bar

_MAX_STREAMS = 64
"""Largest number of streams that one call reads at the same time."""


class _AsyncStream(Protocol):
    def answer(self) -> Awaitable[Answer]: ...


class _Stream(Protocol):
    def answer(self) -> Answer: ...
    def stop(self) -> None: ...


async def async_answers(streams: Sequence[_AsyncStream], progress: bool) -> list[Answer]:
    """Return the answers in the order of the streams. If one stream fails, stop the others."""
    places = asyncio.Semaphore(_MAX_STREAMS)

    async def read(number: int, stream: _AsyncStream) -> Answer:
        async with places:
            with naming_input(number):
                found = await stream.answer()
        count()
        return found

    with progress_bar(len(streams), "answers", progress) as count:
        working = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
        try:
            return await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


def answers(streams: Sequence[_Stream], progress: bool) -> list[Answer]:
    """Return the answers in the order of the streams. If one stream fails, stop the others."""

    def read(number: int, stream: _Stream) -> Answer:
        with naming_input(number):
            return stream.answer()

    with (
        progress_bar(len(streams), "answers", progress) as count,
        ThreadPoolExecutor(min(_MAX_STREAMS, len(streams))) as threads,
    ):
        try:
            found = []
            for answer in threads.map(read, range(len(streams)), streams):
                found.append(answer)
                count()
            return found
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for stream in streams:
                stream.stop()
            raise
