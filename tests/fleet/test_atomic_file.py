"""Tests atomic and ordered writes of a state file."""

import asyncio
import threading
from pathlib import Path

import pytest

from headrace.fleet import atomic_file
from headrace.fleet.atomic_file import NotSyncedError, StateFile, keep_file
from tools.harness.eventually import settle


async def test_a_write_waits_for_the_previous_one_even_if_that_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, begun = threading.Event(), list[bytes]()

    def keep_slowly(file: Path, content: bytes) -> None:
        begun.append(content)
        may_write.wait(30)
        keep_file(file, content)

    monkeypatch.setattr(atomic_file, "keep_file", keep_slowly)
    file = StateFile(tmp_path / "kept.json")
    first = asyncio.create_task(file.keep(b"first"))
    await settle()
    second = asyncio.create_task(file.keep(b"second"))
    await settle()
    first.cancel()
    await settle()
    assert b"second" not in begun and not first.done()
    may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert (tmp_path / "kept.json").read_bytes() == b"second"


def test_content_is_written_even_if_its_folder_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept.json"
    keep_file(file, b"old")
    monkeypatch.setattr(atomic_file, "sync_folder", fail_to_sync)
    with pytest.raises(NotSyncedError, match="No space left"):
        keep_file(file, b"new")
    assert file.read_bytes() == b"new"


def fail_to_sync(folder: Path) -> None:
    raise OSError(28, "No space left on device")
