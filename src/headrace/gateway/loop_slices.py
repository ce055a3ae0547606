"""Shares the event loop out among those who work through a long log: a slice to one, then a turn.

Live events never wait here. Whoever renders, counts or encodes what has lain in a log asks first.
"""

import asyncio
import weakref
from collections import deque

SLICE_S = 0.005


async def slice_of_loop() -> None:
    """Returns when the caller may handle its next event.

    At once while a slice lasts. Then one caller goes on in each turn of the loop, the one that has
    waited longest, so the turn takes a slice and one event however many there are.
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
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(future)
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
            future = self._waiting.popleft()
            if not future.done():  # else it has left
                future.set_result(None)
                break
        self._ask()


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Slices] = (
    weakref.WeakKeyDictionary()
)
