"""Why readers of a living stream must leave for now; says nothing about the stream's end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.core.errors import RequestError

Result = TypeVar("Result")


class ReaderPause:
    """Set while nobody can be served; the stream itself goes on, now or after a restart."""

    def __init__(self) -> None:
        self._is_set = asyncio.Event()
        self.reason: RequestError | None = None

    def set(self, reason: RequestError) -> None:
        self.reason = reason
        self._is_set.set()

    def clear(self) -> None:
        self.reason = None
        self._is_set.clear()

    async def unless(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`; the reason is raised as soon as there is one."""
        working = asyncio.create_task(work)
        waiting = asyncio.create_task(self._is_set.wait())
        try:
            await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self.reason is not None:
                raise self.reason
            return await working
        finally:
            waiting.cancel()
            working.cancel()
            await asyncio.wait((working, waiting))
