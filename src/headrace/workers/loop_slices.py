"""Divides long work on the event loop into slices, so that other tasks can run in between.

Use it for many pieces of work that are each too small for a worker, such as reading long logs or
forms with many fields.
"""

import asyncio
import weakref
from collections import OrderedDict, deque

from headrace.workers.job_queue import OWNER

SLICE_S = 0.005


async def slice_of_loop() -> None:
    """Return when the caller may do its next small piece of work.

    The function returns immediately while the current slice lasts. After that, each iteration of
    the event loop lets one caller continue. An iteration therefore takes the time of one slice and
    one piece of work, however many callers wait. API keys take turns. Within a key, the caller that
    has waited longest continues.
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
        """Waiting callers by API key. The key whose turn is next comes first."""
        self._is_due = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(OWNER.get(), deque()).append(future)
        self._schedule()
        await future
        self.ends_at = loop.time() + SLICE_S

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._continue_one)

    def _continue_one(self) -> None:
        self._is_due = False
        while self._waiting:
            owner, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[owner] = futures
            # Skip callers that were cancelled.
            if not future.done():
                future.set_result(None)
                break
        self._schedule()


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slices] = (
    weakref.WeakKeyDictionary()
)
