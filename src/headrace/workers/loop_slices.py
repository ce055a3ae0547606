"""Slices of the event loop, for long logs and forms whose pieces are too small for a worker."""

import asyncio
import weakref
from collections import OrderedDict, deque

from headrace.workers.job_line import OWNER

SLICE_S = 0.005


async def slice_of_loop() -> None:
    """Return when the caller may do its next small piece of work.

    Returns at once while a slice lasts. After it, one caller continues in each turn of the loop, so
    a turn takes a slice and one piece, however many callers wait. Keys take turns; the caller that
    has waited longest continues for its key.
    """
    loop = asyncio.get_running_loop()
    slices = _of_loop.get(loop)
    if slices is None:
        slices = _of_loop[loop] = _Slices()
    if loop.time() >= slices.ends_at:
        await slices.next()


class _Slices:
    def __init__(self) -> None:
        self.ends_at = 0.0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By key; the key whose turn is next comes first."""
        self._is_due = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(OWNER.get(), deque()).append(future)
        self._ask()
        await future
        self.ends_at = loop.time() + SLICE_S

    def _ask(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_due = False
        while self._waiting:
            owner, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[owner] = futures
            if not future.done():  # else it has left
                future.set_result(None)
                break
        self._ask()


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slices] = (
    weakref.WeakKeyDictionary()
)
