"""Tests every batch store: whole records, blobs of whole lines, one holder per batch."""

import asyncio
import errno
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.batches import folder
from headrace.batches.folder import folder_batch_store
from headrace.batches.records import BATCH, FILE, OPEN
from headrace.batches.store import BatchStore, ClaimLost
from headrace.streams.store import StoreStalled
from tools.harness.redis_servers import RedisServer, needs_redis

Test = Callable[[BatchStore, BatchStore | None], Awaitable[None]]


@asynccontextmanager
async def opened_folder(path: Path) -> AsyncIterator[tuple[BatchStore, BatchStore | None]]:
    yield folder_batch_store(path), None


@asynccontextmanager
async def opened_in_redis(path: Path) -> AsyncIterator[tuple[BatchStore, BatchStore | None]]:
    """Yield the batch stores of two servers."""
    from headrace.batches.redis_store import redis_batch_store
    from headrace.streams.stores.redis import RedisStore

    server = RedisServer(path / "redis")
    one, other = await RedisStore.open(server.url), await RedisStore.open(server.url)
    try:
        yield redis_batch_store(one), redis_batch_store(other)
    finally:
        await one.close()
        await other.close()
        server.end()


async def lapse(shelf: BatchStore, id: str) -> None:
    """Expire a claim that is not renewed."""
    from headrace.batches.redis_store import claim_key

    link = shelf.records._link
    assert await link.command("DEL", claim_key(link, id)) == 1


async def append_unanswered(shelf: BatchStore, command: Callable[..., Awaitable[object]]) -> None:
    """Append a line with `command` instead of the one of Redis, and lose its answer."""

    async def unanswered(*words: object) -> None:
        await command(*words)
        raise TimeoutError

    with pytest.MonkeyPatch.context() as lost, pytest.raises(StoreStalled):
        lost.setattr(shelf.blobs._link, "command", unanswered)
        await shelf.blobs.append("out", b"one\n", "batch")


def shelf_test(test: Test) -> Callable[..., None]:
    @pytest.mark.parametrize(
        "opened", [opened_folder, pytest.param(opened_in_redis, marks=needs_redis)]
    )
    async def each(opened: Callable[[Path], object], tmp_path: Path) -> None:
        async with opened(tmp_path) as shelves:
            await test(*shelves)

    each.__name__ = test.__name__
    return each


@shelf_test
async def test_the_last_version_of_a_record_is_returned(
    shelf: BatchStore, other: BatchStore | None
) -> None:
    await shelf.records.put(FILE, "a", b"1")
    await shelf.records.put(FILE, "a", b"\x00\xff2")
    await shelf.records.put(FILE, "b", b"3")
    for it in filter(None, (shelf, other)):
        assert await it.records.get(FILE, "a") == b"\x00\xff2"
        assert await it.records.get(BATCH, "a") is None
        assert sorted(await it.records.all(FILE)) == [b"\x00\xff2", b"3"]
    await shelf.records.remove(FILE, "a")
    await shelf.records.remove(FILE, "never")
    assert await shelf.records.get(FILE, "a") is None


@shelf_test
async def test_a_blob_can_be_appended_to_and_read_at_any_offset(
    shelf: BatchStore, other: BatchStore | None
) -> None:
    await shelf.blobs.append("a", b"one\n")
    await shelf.blobs.append("a", b"two\n")
    for it in filter(None, (shelf, other)):
        assert await it.blobs.read("a", 0, 100) == b"one\ntwo\n"
        assert await it.blobs.read("a", 4, 3) == b"two"
        assert await it.blobs.read("a", 8, 10) == b""
        assert await it.blobs.read("never", 0, 10) == b""
    await shelf.blobs.remove("a")
    assert await shelf.blobs.read("a", 0, 100) == b""


@shelf_test
async def test_only_one_server_holds_a_batch(shelf: BatchStore, other: BatchStore | None) -> None:
    assert await shelf.records.claim("batch")
    assert await shelf.records.claim("batch")
    if other is not None:
        assert not await other.records.claim("batch")
        with pytest.raises(ClaimLost):
            await other.blobs.append("out", b"line\n", "batch")
        with pytest.raises(ClaimLost):
            await other.records.put(BATCH, "batch", b"theirs", "batch")
    await shelf.blobs.append("out", b"line\n", "batch")
    await shelf.records.put(BATCH, "batch", b"ours", "batch")
    assert await shelf.blobs.read("out", 0, 100) == b"line\n"
    assert await shelf.records.get(BATCH, "batch") == b"ours"


@needs_redis
async def test_an_expired_claim_cannot_be_renewed(tmp_path: Path) -> None:
    async with opened_in_redis(tmp_path) as (shelf, _):
        assert not await shelf.records.claim("batch", is_held=True)
        assert await shelf.records.claim("batch")
        assert await shelf.records.claim("batch", is_held=True)
        await lapse(shelf, "batch")
        assert not await shelf.records.claim("batch", is_held=True)
        with pytest.raises(ClaimLost):
            await shelf.records.put(BATCH, "batch", b"late", "batch")
        assert await shelf.records.claim("batch")


@needs_redis
async def test_a_blob_in_redis_is_stored_in_parts_but_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.batches import redis_store

    monkeypatch.setattr(redis_store, "PART_BYTES", 10)
    async with opened_in_redis(tmp_path) as (shelf, _):
        lines = [b"x" * size + b"\n" for size in (3, 5, 9, 34, 0, 8, 9)]
        for line in lines:
            await shelf.blobs.append("out", line)
        whole = b"".join(lines)
        for most in (1, 7, 10, 100):
            found = b""
            while piece := await shelf.blobs.read("out", len(found), most):
                found += piece
            assert found == whole
        assert await shelf.blobs.read("out", 25, 3) == whole[25:28]
        await shelf.blobs.append("other", b"kept\n")
        await shelf.blobs.remove("out")
        assert await shelf.blobs.read("out", 50, 10) == b"" == await shelf.blobs.read("out", 0, 1)
        assert await shelf.blobs.read("other", 0, 10) == b"kept\n"


@needs_redis
async def test_an_upload_in_redis_expires_unless_its_file_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.batches import redis_store

    monkeypatch.setattr(redis_store, "PART_BYTES", 4)
    async with opened_in_redis(tmp_path) as (shelf, other):
        assert other is not None and await shelf.records.claim("batch")
        for id in ("whole", "half", "results"):
            await shelf.blobs.append(id, b"1234567\n", "batch" if id == "results" else "")
        await shelf.records.put(FILE, "whole", b"record")
        link, left_s = shelf.records._link, {}
        for id in ("whole", "half", "results"):
            keys = [f"{shelf.blobs._key(id)}:{number}" for number in range(2)]
            left_s[id] = [await link.command("TTL", key) for key in keys]
        assert left_s["whole"] == left_s["results"] == [-1, -1]
        assert all(0 < seconds <= redis_store.UPLOAD_S for seconds in left_s["half"])
        for key in [f"{shelf.blobs._key('half')}:{number}" for number in range(2)]:
            await link.command("EXPIRE", key, 9)
        await shelf.blobs.append("half", b"8\n")
        assert await link.command("TTL", f"{shelf.blobs._key('half')}:0") > 9


@needs_redis
async def test_results_whose_confirmation_was_lost_are_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.batches import redis_store

    monkeypatch.setattr(redis_store, "RETRY_S", 0.0)
    async with opened_in_redis(tmp_path) as (shelf, _):
        assert await shelf.records.claim("batch")
        await append_unanswered(shelf, shelf.blobs._link.command)
        for line in (b"one\n", b"two\n"):
            await shelf.blobs.append("out", line, "batch")
        assert await shelf.blobs.read("out", 0, 100) == b"one\ntwo\n"


@needs_redis
async def test_a_late_write_of_an_earlier_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.batches import redis_store

    monkeypatch.setattr(redis_store, "RETRY_S", 0.0)
    async with opened_in_redis(tmp_path) as (shelf, _):
        sent: list[tuple[object, ...]] = []

        async def delay(*words: object) -> None:
            sent.append(words)

        assert await shelf.records.claim("batch")
        await append_unanswered(shelf, delay)
        await lapse(shelf, "batch")
        assert await shelf.records.claim("batch")
        assert await shelf.blobs._link.command(*sent[0]) == -1
        assert await shelf.blobs.read("out", 0, 100) == b""
        await shelf.blobs.append("out", b"one\n", "batch")


@needs_redis
@pytest.mark.parametrize("holder", ["", "batch"])
async def test_a_late_repeated_write_does_not_undo_later_writes(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.batches import redis_store

    monkeypatch.setattr(redis_store, "RETRY_S", 0.0)
    async with opened_in_redis(tmp_path) as (shelf, _):
        link, sent = shelf.blobs._link, []
        command = link.command

        async def delay_first(*words: object) -> object:
            sent.append(words)
            if len(sent) == 1:
                raise TimeoutError
            return await command(*words)

        assert await shelf.records.claim("batch")
        for write in (
            lambda: shelf.blobs.append("out", b"one\n", holder),
            lambda: shelf.records.put(BATCH, "batch", b"new"),
        ):
            sent.clear()
            with monkeypatch.context() as late:
                late.setattr(link, "command", delay_first)
                await write()
            await shelf.blobs.append("out", b"two\n", holder)
            await shelf.records.put(BATCH, "batch", b"begun", "batch")
            await command(*sent[0])
        assert await shelf.blobs.read("out", 0, 100) == b"one\ntwo\n" + b"two\n" * (not holder)
        assert await shelf.records.get(BATCH, "batch") == b"begun"


def pause(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[threading.Event, threading.Event]:
    """Make a function of the folder store set the first event and wait for the second."""
    is_writing, may_write, write = threading.Event(), threading.Event(), getattr(folder, name)

    def slowly(*given: object) -> None:
        is_writing.set()
        assert may_write.wait(20)
        write(*given)

    monkeypatch.setattr(folder, name, slowly)
    return is_writing, may_write


async def test_a_record_whose_writer_was_cancelled_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = folder_batch_store(tmp_path).records
    is_writing, may_write = pause(monkeypatch, "_replace")
    writing = asyncio.create_task(records.put(BATCH, "batch", b"record"))
    assert await asyncio.to_thread(is_writing.wait, 20)
    writing.cancel()
    may_write.set()
    await asyncio.wait((writing,))
    assert await records.get(BATCH, "batch") == b"record"


async def test_a_record_reported_as_not_stored_is_not_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = folder_batch_store(tmp_path).records

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "sync_folder", broken)
        with pytest.raises(StoreStalled):
            await records.put(BATCH, "batch", b"record")
    assert await folder_batch_store(tmp_path).records.all(BATCH) == []


async def test_a_reopened_folder_keeps_everything_but_unfinished_uploads(
    tmp_path: Path,
) -> None:
    before = folder_batch_store(tmp_path)
    await before.records.put(FILE, "whole", b"record")
    await before.records.put(OPEN, "batch", b"batch")
    await before.blobs.append("whole", b"line\n")
    await before.blobs.append("half", b"li")
    after = folder_batch_store(tmp_path)
    assert await after.records.all(FILE) == [b"record"]
    assert await after.records.all(OPEN) == [b"batch"]
    assert await after.blobs.read("whole", 0, 10) == b"line\n"
    assert await after.blobs.read("half", 0, 10) == b""


async def test_a_blob_removed_during_a_write_stays_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = folder_batch_store(tmp_path).blobs
    is_writing, may_write = pause(monkeypatch, "_write")
    writing = asyncio.create_task(blobs.append("out", b"one\n"))
    assert await asyncio.to_thread(is_writing.wait, 20)
    writing.cancel()

    async def drop() -> None:
        await asyncio.wait((writing,))
        await blobs.remove("out")

    dropping = asyncio.create_task(drop())
    await asyncio.wait((dropping,), timeout=0.1)
    may_write.set()
    await dropping
    blobs._threads.shutdown()
    assert list((tmp_path / "blobs").iterdir()) == []


@pytest.mark.parametrize("left", [b"", b'{"half', b"one\n", b"one\n{" + b"x" * 200_000])
async def test_the_next_append_cuts_off_half_a_line_left_by_a_kill(
    left: bytes, tmp_path: Path
) -> None:
    before = folder_batch_store(tmp_path)
    await before.records.put(FILE, "out", b"record")
    await before.blobs.append("out", left)
    after = folder_batch_store(tmp_path)
    await after.blobs.append("out", b"two\n")
    whole = b"one\n" if left.startswith(b"one\n") else b""
    assert await after.blobs.read("out", 0, 1 << 20) == whole + b"two\n"


async def test_an_append_that_does_not_fit_on_the_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    shelf = folder_batch_store(tmp_path)
    await shelf.blobs.append("out", b"one\n")
    write = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if at >= 8:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:4], at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreStalled, match="no space left on device"):
        await shelf.blobs.append("out", b"two and more\n")
    monkeypatch.undo()
    assert await shelf.blobs.read("out", 0, 100) == b"one\n"
    await shelf.blobs.append("out", b"three\n")
    assert await shelf.blobs.read("out", 0, 100) == b"one\nthree\n"


async def test_a_partial_line_that_cannot_be_removed_is_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = folder_batch_store(tmp_path)
    await shelf.blobs.append("out", b"one\n")
    write = os.pwrite

    def broken(descriptor: int, data: bytes, at: int) -> int:
        if at > 4:
            raise OSError(errno.EIO, "Input/output error")
        return write(descriptor, data[:2], at)

    def also_broken(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    monkeypatch.setattr(os, "ftruncate", also_broken)
    with pytest.raises(StoreStalled):
        await shelf.blobs.append("out", b"two\n")
    monkeypatch.undo()
    await shelf.blobs.append("out", b"two\n")
    assert await shelf.blobs.read("out", 0, 100) == b"one\ntwo\n"


async def test_lines_that_could_not_be_removed_are_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = folder_batch_store(tmp_path)
    await shelf.blobs.append("out", b"one\n")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def cannot_shorten(descriptor: int, size: int) -> None:
        if size < os.fstat(descriptor).st_size:
            broken()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        patch.setattr(os, "ftruncate", cannot_shorten)
        with pytest.raises(StoreStalled):
            await shelf.blobs.append("out", b"two\n")
    await shelf.blobs.append("out", b"two\n")
    assert await shelf.blobs.read("out", 0, 100) == b"one\ntwo\n"


async def test_lines_whose_folder_could_not_be_synced_are_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = folder_batch_store(tmp_path)

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder, "sync_folder", broken)
    with pytest.raises(StoreStalled):
        await shelf.blobs.append("out", b"one\n")
    monkeypatch.undo()
    await shelf.blobs.append("out", b"one\n")
    assert await shelf.blobs.read("out", 0, 100) == b"one\n"


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors have no readable path")
async def test_new_and_removed_file_names_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The names in each folder at its last sync: a power failure may lose all other changes.
    synced = dict[Path, set[str]]()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            synced[path] = {entry.name for entry in path.iterdir()}
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    shelf = folder_batch_store(tmp_path / "batches")
    await shelf.records.put(FILE, "a", b"record")
    await shelf.blobs.append("a", b"line\n")
    for _ in range(2):
        for path, _, _ in os.walk(tmp_path):
            assert synced.get(Path(path), set()) == set(os.listdir(path)), path
        await shelf.records.remove(FILE, "a")
        await shelf.blobs.remove("a")


async def test_a_record_whose_removal_failed_can_be_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = folder_batch_store(tmp_path)
    await shelf.records.put(FILE, "a", b"record")

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", broken)
    with pytest.raises(StoreStalled):
        await shelf.records.remove(FILE, "a")
    monkeypatch.undo()
    await shelf.records.remove(FILE, "a")
    assert await folder_batch_store(tmp_path).records.all(FILE) == []


def moved_aside(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.rglob("*.unreadable-*"))


async def test_folders_and_pipes_among_records_and_blobs_are_moved_aside(
    tmp_path: Path,
) -> None:
    before = folder_batch_store(tmp_path)
    for id in ("sound", "spoiled"):
        await before.records.put(FILE, id, b"record")
        await before.blobs.append(id, b"line\n")
    (tmp_path / "records/file/spoiled").unlink()
    (tmp_path / "records/file/spoiled").mkdir()
    os.mkfifo(tmp_path / "records/file/pipe")
    (tmp_path / "blobs/a folder").mkdir()
    os.mkfifo(tmp_path / "blobs/a pipe")
    (tmp_path / "records/stop").rmdir()
    (tmp_path / "records/stop").write_text("a file")
    for _ in range(2):
        after = folder_batch_store(tmp_path)
        assert await after.records.all(FILE) == [b"record"]
        for id in ("sound", "spoiled"):  # what belongs to a record that cannot be read is kept
            assert await after.blobs.read(id, 0, 10) == b"line\n"
    assert moved_aside(tmp_path) == ["a folder", "a pipe", "pipe", "spoiled", "stop"]


@pytest.mark.parametrize("name", [".", "records", "records/file", "blobs"])
async def test_a_file_in_place_of_a_folder_is_moved_aside(tmp_path: Path, name: str) -> None:
    await folder_batch_store(tmp_path / "batches").records.put(FILE, "a", b"record")
    place = tmp_path / "batches" / name
    shutil.rmtree(place)
    place.write_text("a file")
    shelf = folder_batch_store(tmp_path / "batches")
    await shelf.records.put(FILE, "b", b"record")
    await shelf.blobs.append("b", b"line\n")
    assert await folder_batch_store(tmp_path / "batches").records.get(FILE, "b") == b"record"


async def test_a_failed_or_interrupted_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = folder_batch_store(tmp_path / "batches")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreStalled):
        await shelf.records.put(BATCH, "batch_1", b"record")
    assert not list((tmp_path / "batches/records/batch").iterdir())
    (tmp_path / "batches/records/batch/.batch_2").write_bytes(b"rec")
    folder_batch_store(tmp_path / "batches")
    assert not list((tmp_path / "batches/records/batch").iterdir())


def test_every_folder_is_only_accessible_to_its_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder_batch_store(tmp_path / "batches")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "batches").rglob("*")}
    assert modes | {(tmp_path / "batches").stat().st_mode & 0o777} == {0o700}
