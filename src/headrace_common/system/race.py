"""Ways to wait: for the first of several things, or for the end of one that must not be cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def race(
    *works: "Coroutine[Any, Any, Any] | asyncio.Future[Any]",
) -> AsyncIterator[list["asyncio.Future[Any]"]]:
    """The works as futures, once the first is done; leaving the context cancels the coroutines."""
    tasks = [it if isinstance(it, asyncio.Future) else asyncio.create_task(it) for it in works]
    own = [task for task, work in zip(tasks, works, strict=True) if task is not work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in own:
            task.cancel()
        await asyncio.wait(own)


async def uncut(work: Awaitable[T], patience_s: float | None = None) -> T:
    """The result of work that is never left half done: a cancelled caller waits for its end.

    For at most `patience_s` seconds; None: however long that takes.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,), timeout=patience_s)
        raise
