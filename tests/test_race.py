"""Tests waiting for the first of several coroutines and for uncut work."""

import asyncio
import gc

import pytest

from headrace_common.system.race import race, uncut


def test_a_race_cancels_slower_coroutines_but_not_the_callers_futures() -> None:
    async def run() -> None:
        given = asyncio.get_running_loop().create_future()
        async with race(asyncio.sleep(0, "first"), asyncio.sleep(1000), given) as (first, slow, _):
            assert first.result() == "first"
            assert not slow.done()
        assert slow.cancelled()
        assert not given.done()

    asyncio.run(run())


async def test_a_cancelled_caller_waits_for_uncut_work_to_end() -> None:
    may_end, done = asyncio.Event(), list[str]()

    async def work() -> None:
        await may_end.wait()
        done.append("whole")

    caller = asyncio.create_task(uncut(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0.01)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ["whole"]


async def test_a_cancelled_caller_waits_at_most_the_given_time() -> None:
    endless = asyncio.get_running_loop().create_future()
    caller = asyncio.create_task(uncut(endless, 0.01))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not endless.done()


def test_an_error_that_nobody_waits_for_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError

    async def run() -> None:
        caller = asyncio.create_task(uncut(fail()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])

    asyncio.run(run())
    gc.collect()
    assert not caplog.records
