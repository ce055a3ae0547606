"""Downloads, of which nothing is downloaded: what becomes of them while others come and go."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.fleet import pulls
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


async def test_a_download_begins_though_the_client_left_while_the_list_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, fetched = threading.Event(), asyncio.Event()

    def keep_slowly(file: Path, content: bytes) -> None:
        may_write.wait()
        keep_file(file, content)

    async def fetch(pull: Pull) -> None:
        fetched.set()

    monkeypatch.setattr(pulls, "keep_file", keep_slowly)
    monkeypatch.setattr(pulls, "_fetch", fetch)
    made = Pulls(tmp_path / "pulled.json")
    async with running(made):
        asked = asyncio.create_task(made.begin("owner/name"))
        await settle()
        asked.cancel()
        await settle()
        assert asked.cancelled()
        may_write.set()
        await fetched.wait()
        pull = made.find("owner/name")
        assert pull is not None
        await pull.over.wait()
        assert pull.state == "here"


async def never(pull: Pull) -> None:
    await asyncio.Event().wait()


async def test_who_waits_for_a_download_hears_that_it_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    made = Pulls(None)
    async with running(made):
        pull = await made.begin("owner/name")
        await settle()
        await made.forget("owner/name")
        await pull.over.wait()
    assert (pull.state, made.all()) == ("stopped", ())


async def test_a_download_may_be_deleted_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    made = Pulls(None)
    async with running(made):
        await made.begin("owner/name")
        await settle()
        await asyncio.gather(made.forget("owner/name"), made.forget("owner/name"))
    assert made.all() == ()
