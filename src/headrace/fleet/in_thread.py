"""Runs blocking functions in threads that do not keep the process alive."""

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
    """Start a daemon thread that runs `work`, and return the future of the result.

    The process can end while a daemon thread runs, but not while a thread of an executor runs. A
    panic (a BaseException from `work`) becomes a RuntimeError. Otherwise the panic would end the
    caller's task and its task group.
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
        # A panic also has to settle the future, and must not be reported as a failed thread.
        except BaseException as panic:
            error = RuntimeError(f"a library failed ({type(panic).__name__})")
        # The event loop may already be closed when the thread ends.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="read model", daemon=True).start()
    return done
