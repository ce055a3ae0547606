import asyncio

import pytest

from headrace.fleet.in_thread import in_thread


class Panic(BaseException):
    """A fake for the exception that a panic in a Rust library raises."""


async def test_the_result_of_work_in_a_thread_is_returned():
    assert await in_thread(lambda: 1 + 1) == 2


async def test_an_exception_is_raised_to_the_caller():
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("panic", [Panic, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_a_panic_only_fails_the_call_and_not_the_thread_or_the_task(panic):
    def work() -> None:
        raise panic

    with pytest.raises(RuntimeError, match="a library failed"):
        async with asyncio.timeout(30):
            await in_thread(work)
