"""Waits for the first of several tasks, or for the end of a task that must not be interrupted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def race(
    *works: "Coroutine[Any, Any, Any] | asyncio.Future[Any]",
) -> AsyncIterator[list["asyncio.Future[Any]"]]:
    """Yield all works as futures once the first of the works is done.

    Leaving the context cancels the works that were given as coroutines.
    """
    tasks: list[asyncio.Future[Any]] = []
    own: list[asyncio.Task[Any]] = []
    for work in works:
        if isinstance(work, asyncio.Future):
            tasks.append(work)
        else:
            own.append(asyncio.create_task(work))
            tasks.append(own[-1])
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in own:
            task.cancel()
        await asyncio.wait(own)


async def uncut(work: Awaitable[T], patience_s: float | None = None) -> T:
    """Return the result of work that must not be interrupted.

    A cancelled caller first waits until the work is done. The wait lasts at most `patience_s`
    seconds, or as long as needed if `patience_s` is None.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,), timeout=patience_s)
        if task.done() and not task.cancelled():
            # Nobody awaits the result any more. Otherwise asyncio would log its error.
            task.exception()
        raise
