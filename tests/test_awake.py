"""Tests time limits that count only while this process runs."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from headrace_common.system import awake
from headrace_common.system.awake import Countdown, ProcessStops, within


class Loop:
    """A fake event loop whose clock and timers the test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, object, tuple[object, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: object, *arguments: object) -> "Loop":
        self.due.append((self.now + seconds, callback, arguments))
        return self

    def cancel(self) -> None:
        self.due.clear()

    def run(self, late_s: float = 0.0) -> None:
        """Run the next timer, late by this many seconds."""
        at, callback, arguments = self.due.pop(0)
        self.now = at + late_s
        callback(*arguments)  # type: ignore[operator]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


def test_a_limit_is_reached_when_its_seconds_have_passed(loop: Loop) -> None:
    called: list[float] = []
    Countdown(80, lambda: called.append(loop.now))
    while loop.due:
        loop.run()
    assert called == [80]


@pytest.mark.parametrize("num_before", [0, 3, awake.NUM_TICKS - 1])
def test_time_in_which_the_process_was_stopped_does_not_count(loop: Loop, num_before: int) -> None:
    called: list[float] = []
    Countdown(80, lambda: called.append(loop.now))
    for _ in range(num_before):
        loop.run()
    loop.run(late_s=600)
    assert not called
    while loop.due:
        loop.run()
    assert called == [600 + 80 + 10]  # the tick during which the process was stopped is repeated


async def test_a_limit_of_zero_seconds_is_reached_at_once() -> None:
    reached = asyncio.Event()
    Countdown(0.0, reached.set)
    await reached.wait()


def test_a_limit_that_is_cancelled_is_never_reached(loop: Loop) -> None:
    Countdown(80, pytest.fail).cancel()
    assert not loop.due


async def test_a_body_that_takes_longer_than_its_limit_is_cut() -> None:
    with pytest.raises(TimeoutError):
        async with within(0.01):
            await asyncio.Event().wait()
    async with within(60):
        pass


STOPPED = """
import os, signal, time
from headrace_common.system.awake import ProcessStops
with ProcessStops() as stops:
    print(stops.take(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(stops.take(), stops.take(), flush=True)
"""


def test_a_stop_is_noticed_before_any_thread_has_run() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"False\n"
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        time.sleep(awake.STOPPED_S + 1.5)  # only a pause longer than STOPPED_S counts as a stop
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == b"True False\n"


def test_a_long_wait_does_not_count_as_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "_TICK_S", 0.01)
    monkeypatch.setattr(awake, "STOPPED_S", 2.0)
    with ProcessStops() as stops:
        time.sleep(2.5)  # the thread keeps ticking
        assert not stops.take()
