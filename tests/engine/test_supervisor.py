"""Tests the supervisor with real engine processes: start, answer, death, restart, end."""

import asyncio
import contextlib
import os
import resource
import signal
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engines import backoff
from headrace.engines import child as child_module
from headrace.engines import supervisor as module
from headrace.engines.child import Child
from headrace.engines.client import EngineDown, EngineNews, EngineUp
from headrace.engines.supervisor import MAX_FAILED_STARTS, MAX_SILENT_PINGS, PingMonitor, Supervisor
from headrace_common import wire
from headrace_common.config.settings import ModelConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.loading import CHECKING, COMPILING, READING, WARMING
from headrace_common.messages import (
    WEIGHTS,
    FinishReason,
    Loading,
    Message,
    NewSequence,
    Outputs,
    Shutdown,
    Submit,
)
from headrace_common.sampling import Sampling
from headrace_common.system import awake
from headrace_common.system.step_record import StepRecord
from tests.fleet.fakes import READY
from tools.harness.eventually import eventually

LIMIT_S = 240


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[Supervisor, AsyncIterator[EngineNews]]]:
    """Start a supervisor. Yield it and its news."""
    supervisor = Supervisor(ModelConfig(model=str(folder), threads=1), LIMIT_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield supervisor, aiter(supervisor.news)
    finally:
        await supervisor.close()
    assert supervisor.pid is None


async def of_kind(news: AsyncIterator[EngineNews], kind: type[EngineNews]) -> EngineNews:
    return await anext(item async for item in news if isinstance(item, kind))


async def test_an_engine_reports_the_progress_of_its_load(folder: Path) -> None:
    async with started(folder) as (_engine, news):
        told = []
        async for one in news:
            if not isinstance(one, Loading):
                break
            told.append(one)
        assert isinstance(one, EngineUp)
        shares = [one.share for one in told if one.stage == WEIGHTS]
        assert shares == sorted(set(shares)) and shares[-1] == 1
        stages = list(dict.fromkeys(one.stage for one in told if one.stage != COMPILING))
        assert stages == [READING, CHECKING, WEIGHTS, WARMING]


async def child_of(supervisor: Supervisor) -> Child:
    """Return the engine's process as soon as it is spawned."""
    while supervisor._child is None:
        await asyncio.sleep(0.01)
    return supervisor._child


def submit(num: int, max_tokens: int) -> Submit:
    return Submit(
        stream_id=StreamId("s"),
        prompts=(array("i", [1, 2, 3]).tobytes(),),
        sequences=(NewSequence(SequenceId(num), 0, 0),),
        sampling=Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        arrival=0.0,
    )


async def tokens(news: AsyncIterator[EngineNews]) -> list[int]:
    found: list[int] = []
    async for item in news:
        if isinstance(item, Outputs):
            found += [token.token_id for token in item.tokens]
            if item.finished:
                assert item.finished[0].finish is FinishReason.LENGTH
                break
    return found


async def test_a_killed_engine_restarts_and_answers_the_same(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace.engines.supervisor")

    async with started(folder) as (supervisor, news):
        await of_kind(news, EngineUp)
        supervisor.submit(submit(1, 8))
        first = await tokens(news)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        down = await of_kind(news, EngineDown)
        assert isinstance(down, EngineDown) and down.from_outside and not down.given_up
        await of_kind(news, EngineUp)
        supervisor.submit(submit(1, 8))
        assert await tokens(news) == first and len(first) == 8
    died, is_back = (record.message for record in caplog.records)
    assert "SIGKILL" in died and is_back.startswith("The engine is up again after ")


@pytest.mark.parametrize("is_held", [True, False])
async def test_a_suspended_engine_counts_as_killed_from_outside(is_held: bool) -> None:
    child = await Child.spawn()
    if is_held:
        os.kill(child.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{child.pid}/stat")
        await asyncio.to_thread(eventually, lambda: ") T" in stat.read_text())
    child.kill()
    await child.end()
    assert child.death_report().from_outside == is_held


async def test_a_model_that_cannot_be_served_is_given_up_at_once(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, news):
        down = await of_kind(news, EngineDown)
        assert isinstance(down, EngineDown) and down.given_up
        assert down.code == "model_corrupt" and str(tmp_path) not in down.message


async def test_an_engine_starts_later_if_no_file_descriptor_is_free(
    folder: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async with started(folder) as (supervisor, news):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            down = await of_kind(news, EngineDown)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(down, EngineDown) and down.from_outside and not down.given_up
        await child_of(supervisor)


async def test_an_engine_killed_while_loading_is_always_restarted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "_PAUSES_S", (0.0,))

    async with started(folder) as (supervisor, news):
        for _ in range(MAX_FAILED_STARTS + 1):
            os.kill((await child_of(supervisor)).pid, signal.SIGKILL)
            down = await of_kind(news, EngineDown)
            assert isinstance(down, EngineDown) and not down.given_up
        await child_of(supervisor)


async def test_reading_the_news_raises_if_the_supervisor_failed(folder: Path) -> None:
    async with started(folder) as (supervisor, news):
        supervisor._task.cancel()
        with pytest.raises(RuntimeError, match="supervisor failed"):
            await of_kind(news, EngineUp)


class Silent:
    """A child that answers no ping. Each ping blocks the event loop for `lost_s` seconds."""

    def __init__(self, lost_s: float = 0.0) -> None:
        self.step_record = StepRecord()
        self.num_pings = 0
        self.was_killed = False
        self._lost_s = lost_s

    def send(self, message: Message) -> None:
        self.num_pings += 1
        if self.num_pings == 3 * MAX_SILENT_PINGS:
            raise EOFError
        time.sleep(self._lost_s)

    def kill(self) -> None:
        self.was_killed = True


def test_an_engine_that_answers_no_ping_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "_LATE_S", 60.0)
    silent = Silent()
    asyncio.run(PingMonitor(silent).watch())
    assert silent.was_killed and silent.num_pings == MAX_SILENT_PINGS


def test_missed_pings_do_not_count_if_the_event_loop_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "_LATE_S", 0.001)
    silent = Silent(lost_s=0.002)
    with pytest.raises(EOFError):
        asyncio.run(PingMonitor(silent).watch())
    assert not silent.was_killed


def test_a_step_suspended_with_its_server_does_not_count_as_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "_LATE_S", 0.001)
    monkeypatch.setattr(awake, "STOPPED_S", 0.001)
    stopped = Silent(lost_s=0.002)
    stopped.step_record.write([SequenceId(1)], 0.1)
    clock = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + 600 * (stopped.num_pings > 1))
    with pytest.raises(EOFError):
        asyncio.run(PingMonitor(stopped).watch())
    assert not stopped.was_killed


async def test_a_very_long_line_of_an_engine_is_cut(folder: Path) -> None:
    child = await Child.spawn()
    assert child._process.stderr is not None
    child._process.stderr.feed_data(b"x" * 300_000 + b"\nlast words\n")
    child.kill()
    await child.end()
    assert "last words" in child.death_report().message


async def test_an_engines_log_keeps_its_levels_and_only_warnings_explain_its_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    child = await Child.spawn()
    assert child._process.stderr is not None
    lines = b"INFO headrace_engine.x: all is well\nWARNING headrace_engine.x: the disk is full\n"
    child._process.stderr.feed_data(lines)
    child.kill()
    await child.end()
    logged = [(it.levelname, it.message) for it in caplog.records if it.message[:7] == "engine:"]
    assert logged[:2] == [
        ("INFO", "engine: all is well"),
        ("WARNING", "engine: the disk is full"),
    ]
    report = child.death_report().message
    assert "the disk is full" in report and "all is well" not in report


async def test_ending_an_engine_does_not_wait_for_other_holders_of_its_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_module, "_STDERR_S", 0.1)

    child = await Child.spawn()
    held = os.open(f"/proc/{child.pid}/fd/2", os.O_WRONLY)  # like a process that the engine started
    os.write(held, b"last words\n")
    child.kill()
    async with asyncio.timeout(LIMIT_S / 4):
        await child.end()
    os.close(held)
    assert "last words" in child.death_report().message


async def test_an_engine_does_not_outlive_its_parent(folder: Path) -> None:
    async with started(folder) as (supervisor, news):
        await of_kind(news, EngineUp)
        pid = supervisor.pid
        assert pid is not None and supervisor._child is not None
        supervisor._child._writer.transport.abort()  # as when this process ends
        await of_kind(news, EngineDown)
        assert not os.path.exists(f"/proc/{pid}")  # noqa: ASYNC240


async def test_closing_during_a_load_is_quick(folder: Path) -> None:
    async with started(folder) as (supervisor, _):
        await child_of(supervisor)


async def test_closing_while_the_engine_is_spawned_is_quick(folder: Path) -> None:
    async with started(folder) as (supervisor, _):
        await asyncio.sleep(0)  # the task is spawning, and has no child yet
        assert supervisor._child is None


class Lingering:
    """A child that closes its socket at Shutdown, but whose process ends only if it is killed."""

    pid = 1

    def __init__(self) -> None:
        self.step_record = StepRecord()
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(wire.encode(READY))
        self._killed = asyncio.Event()

    def send(self, message: Message) -> None:
        if isinstance(message, Shutdown):
            self.reader.feed_eof()

    def kill(self) -> None:
        self._killed.set()

    async def end(self) -> None:
        await self._killed.wait()


async def test_a_process_that_outlives_its_socket_is_killed_at_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_STOP_S", 0.01)

    async def spawn(number: int, lock_fds: tuple[int, ...]) -> Any:
        return Lingering()

    supervisor = Supervisor(ModelConfig(), LIMIT_S, spawn=spawn)
    await of_kind(aiter(supervisor.news), EngineUp)
    await supervisor.close()
    assert supervisor.pid is None
