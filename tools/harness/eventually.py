"""Waits for a condition instead of a fixed time."""

import asyncio
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Returns as soon as the condition holds; fails after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.01)


async def settle() -> None:
    """Lets every task run until the task waits for a timer, a socket or a thread."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while ready:  # noqa: ASYNC110
        await asyncio.sleep(0)
