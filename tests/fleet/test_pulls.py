"""Downloads, of which nothing is downloaded: what becomes of them while others come and go."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.fleet import kept_file, pulls
from headrace.fleet.kept_file import keep_file
from headrace.fleet.pulls import Pull, Pulls
from tools.harness.eventually import settle


@contextlib.asynccontextmanager
async def running(made: Pulls) -> AsyncIterator[None]:
    task = asyncio.create_task(made.run())
    await settle()
    async with asyncio.timeout(30):
        yield
    task.cancel()


async def test_a_download_that_was_stopped_and_begun_again_while_the_list_was_kept_has_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, running_now = threading.Event(), 0

    def keep_slowly(file: Path, content: bytes) -> None:
        may_write.wait(30)
        keep_file(file, content)

    async def fetch(pull: Pull) -> None:
        nonlocal running_now
        running_now += 1
        try:
            await never(pull)
        finally:
            running_now -= 1

    monkeypatch.setattr(kept_file, "keep_file", keep_slowly)
    monkeypatch.setattr(pulls, "_fetch", fetch)
    made = Pulls(tmp_path / "pulled.json")
    async with running(made):
        pull = made.begin("owner/name")
        await settle()
        stopped = asyncio.create_task(made.stop("owner/name"))
        await settle()
        made.begin("owner/name")
        await settle()
        assert running_now == 0  # it is not on the list as yet
        may_write.set()
        await stopped
        made.begin("owner/name")
        while not running_now:
            await asyncio.sleep(0.001)
        assert (running_now, pull.state) == (1, "downloading")
        await made.stop("owner/name")
        assert (running_now, pull.state) == (0, "stopped")


async def never(pull: Pull) -> None:
    await asyncio.Event().wait()


async def test_who_waits_for_a_download_hears_that_it_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    made = Pulls(None)
    async with running(made):
        pull = made.begin("owner/name")
        await settle()
        await made.forget("owner/name")
        await pull.over.wait()
    assert (pull.state, made.all()) == ("stopped", ())


async def test_a_download_may_be_deleted_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    made = Pulls(None)
    async with running(made):
        made.begin("owner/name")
        await settle()
        await asyncio.gather(made.forget("owner/name"), made.forget("owner/name"))
    assert made.all() == ()
