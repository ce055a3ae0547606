"""Several things awaited at once, until the first of them is done."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


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
