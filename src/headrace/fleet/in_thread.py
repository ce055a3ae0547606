"""Runs blocking work in threads that do not keep the process alive."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread; return its result or raise its exception."""
    return await start_thread(work)


def start_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Start a daemon thread that runs `work`; return the future of its result.

    The process can end while the thread runs, which an executor's threads would prevent. An
    exception from `work` ends only this call: a panic becomes a RuntimeError, since a BaseException
    would end the caller's task and its group.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        except BaseException as panic:  # an uncaught one would also count as a lost thread
            error = RuntimeError(f"a library failed ({type(panic).__name__})")
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="read model", daemon=True).start()
    return done
