"""Tests the list of downloads with fake download processes."""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.fleet import atomic_file, pulls
from headrace.fleet.atomic_file import keep_file
from headrace.fleet.download_process import DownloadProcess
from headrace.fleet.pulls import Pull, Pulls
from headrace_common.checkpoints.fetch import FetchFailed
from headrace_common.errors import RequestError
from tools.harness.eventually import settle


@contextlib.asynccontextmanager
async def running(made: Pulls) -> AsyncIterator[None]:
    task = asyncio.create_task(made.run(lambda: None))
    await settle()
    async with asyncio.timeout(30):
        yield
    task.cancel()


async def test_a_download_restarted_while_the_list_is_saved_has_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, running_now = threading.Event(), 0

    def keep_slowly(file: Path, content: bytes) -> None:
        may_write.wait(30)
        keep_file(file, content)

    async def fetch(pull: Pull, _: object) -> None:
        nonlocal running_now
        running_now += 1
        try:
            await never(pull, None)
        finally:
            running_now -= 1

    monkeypatch.setattr(atomic_file, "keep_file", keep_slowly)
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


async def never(pull: Pull, _: object) -> None:
    await asyncio.Event().wait()


async def test_a_list_that_could_not_be_saved_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, num_errors = tmp_path / "pulled.json", 0

    def keep_later(path: Path, content: bytes) -> None:
        nonlocal num_errors
        if num_errors < 2:
            num_errors += 1
            raise OSError(28, "No space left on device")
        keep_file(path, content)

    monkeypatch.setattr(atomic_file, "keep_file", keep_later)
    monkeypatch.setattr(pulls, "_SAVE_AGAIN_S", 0.0)
    monkeypatch.setattr(pulls, "_fetch", never)
    made = Pulls(file)
    async with running(made):
        made.begin("owner/name")
        while not file.exists():
            await asyncio.sleep(0.001)
    assert [pull.model for pull in Pulls(file).all()] == ["owner/name"]


async def test_deleting_a_download_wakes_the_requests_that_wait_for_it(
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


async def test_no_download_starts_after_the_shutdown() -> None:
    made = Pulls(None)
    async with running(made):
        await settle()
    await settle()
    with pytest.raises(RequestError) as refused:
        made.begin("owner/name")
    assert refused.value.code == "server_shutdown"
    assert [pull.state for pull in made.all()] == ["stopped"]


async def test_a_download_can_be_deleted_twice_concurrently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    made = Pulls(None)
    async with running(made):
        made.begin("owner/name")
        await settle()
        await asyncio.gather(made.forget("owner/name"), made.forget("owner/name"))
    assert made.all() == ()


class SlowProcess:
    """A fake download process that takes a while to end."""

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()
        self.has_ended = False

    async def end(self) -> None:
        await asyncio.sleep(0.05)
        self.has_ended = True


async def test_a_second_stop_leaves_no_process() -> None:
    process = SlowProcess()

    async def begin(model: str) -> DownloadProcess:
        return process  # type: ignore[return-value]

    made = Pulls(None, begin)
    async with running(made):
        made.begin("owner/name")
        await settle()
        first = asyncio.create_task(made.stop("owner/name"))
        await settle()
        await made.stop("owner/name")
        await first
        assert process.has_ended


GARBAGE = {
    "a line of 10 MB": "out.write(b'x' * 10_000_000 + b'\\n')",
    "10 MB without a line break": "out.write(b'{' * 10_000_000)",
    "no JSON": "out.write(b'Traceback\\n')",
    "no text": "out.write(bytes(range(256)) + b'\\n')",
    "an empty line": "out.write(b'\\n')",
    "brackets": "out.write(b'[' * 60_000 + b'\\n')",
    "another type": """out.write(b'{"type":"Fetched","done":"1","total":[]}\\n')""",
    "no such news": """out.write(b'{"type":"Other"}\\n')""",
    "a negative size": """out.write(b'{"type":"Fetched","done":-1,"total":1}\\n')""",
    "a size of 400 digits": (
        """out.write(b'{"type":"Fetched","done":1,"total":1' + b'0' * 400 + b'}\\n')"""
    ),
    "an unknown code": """out.write(b'{"type":"FetchFailed","code":"x","message":"no"}\\n')""",
    "nothing": "",
    "an exit code": "sys.exit(7)",
    "a signal": "os.kill(os.getpid(), 9)",
}


def child(code: str) -> str:
    """Return a program that replaces the download process and runs `code`."""
    return f"import os, sys\nout = sys.stdout.buffer\n{code}\nout.flush()\n"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the code of the download process."""

    def tell(code: str) -> None:
        script = tmp_path / "child.py"
        script.write_text(child(code))
        command = tmp_path / "python"
        command.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
        command.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(command))

    return tell


@pytest.mark.parametrize("what", GARBAGE)
async def test_invalid_output_of_a_download_process_only_fails_its_download(
    what: str, told: Callable[[str], None], tmp_path: Path
) -> None:
    told(GARBAGE[what])
    made = Pulls(tmp_path / "pulled.json")
    async with running(made):
        pull = made.begin("owner/name")
        await pull.over.wait()
        assert pull.state == "failed" and pull.error is not None
        assert pull.error.code == "download_failed"
        ends = {"nothing": "exit code 0", "an exit code": "exit code 7", "a signal": "signal 9"}
        assert ends.get(what, "") in pull.error.message
        assert pull.task is not None
        await pull.task
    assert [it.state for it in Pulls(tmp_path / "pulled.json").all()] == ["failed"]


async def test_the_last_of_a_million_progress_lines_counts(told: Callable[[str], None]) -> None:
    line = """b'{"type":"Fetched","done":1,"total":2}\\n'"""
    told(f'out.write({line} * 1_000_000)\nout.write(b\'{{"type":"IsHere"}}\\n\')')
    made = Pulls(None)
    async with running(made):
        pull = made.begin("owner/name")
        await pull.over.wait()
        assert pull.state == "here" and pull.done == 1


async def test_an_unexpected_error_only_ends_its_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(pull: Pull, _: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(pulls, "_fetch", fail)
    made = Pulls(None)
    async with running(made):
        pull = made.begin("owner/name")
        await pull.over.wait()
        assert pull.error is not None and "bug in this server (KeyError)" in pull.error.message


async def test_only_the_newest_failed_downloads_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(pull: Pull, _: object) -> FetchFailed:
        return FetchFailed("download_failed", "The hub says no.")

    monkeypatch.setattr(pulls, "_fetch", fail)
    made = Pulls(None)
    async with running(made):
        for number in range(100):
            await made.begin(f"owner/name-{number}").over.wait()
    assert [it.model for it in made.all()][-64:] == [f"owner/name-{n}" for n in range(36, 100)]
    assert len(made.all()) <= 65


async def test_only_the_newest_stopped_downloads_are_remembered_and_can_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    monkeypatch.setattr(pulls, "_MAX_ENDED", 2)
    made = Pulls(None)
    async with running(made):
        for number in range(5):
            made.begin(f"owner/name-{number}")
            await made.stop(f"owner/name-{number}")
        oldest = made.all()[0]
        assert [it.model[-1] for it in made.all()] == ["2", "3", "4"]
        assert made.begin(oldest.model) is oldest is made.find(oldest.model)


async def test_a_limited_number_of_downloads_continues_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "_fetch", never)
    kept = [{"model": f"owner/name-{n}", "state": "downloading"} for n in range(20)]
    (tmp_path / "pulled.json").write_text(json.dumps(kept))
    made = Pulls(tmp_path / "pulled.json")
    async with running(made):
        states = [pull.state for pull in made.all()]
    most = pulls.MAX_AT_ONCE
    assert states == most * ["downloading"] + (20 - most) * ["stopped"]


def test_an_unknown_name_or_code_does_not_affect_other_downloads(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pulled.json"
    entries: list[dict[str, str]] = [
        {"model": "owner/name", "state": "here"},
        {"model": "not-in-the-catalog", "state": "here"},
        {"model": "deleted-from-it", "state": "deleted"},
        {"model": "owner/other", "state": "failed", "code": "code-of-the-future", "message": "x"},
    ]
    file.write_text(json.dumps(entries))
    made = Pulls(file)
    assert (made.here, made.deleted) == (("owner/name",), ("deleted-from-it",))
    unknown, other = made.find("not-in-the-catalog"), made.find("owner/other")
    assert unknown and unknown.state == "failed" and unknown.error
    assert unknown.error.code == "model_not_found" and "hub id" in unknown.error.message
    assert other and other.error and other.error.code == "download_failed"


def test_a_list_with_an_invalid_model_name_is_moved_aside(tmp_path: Path) -> None:
    file = tmp_path / "pulled.json"
    file.write_text(json.dumps([{"model": "../\0", "state": "deleted"}]))
    assert Pulls(file).deleted == () and not file.exists()
