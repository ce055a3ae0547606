"""Tests all batches of a server: shares of keys, quotas and expiry."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.batches import batches as module
from headrace.batches.batches import Batches, NewBatch
from headrace.batches.folder import folder_batch_store
from headrace.batches.records import BATCH, OPEN, STOP, BatchRecord, encode_record
from headrace.batches.store import BatchStore
from headrace.streams.store import StoreStalled
from headrace_common.config.settings import BatchConfig, HttpConfig, ServerConfig
from headrace_common.errors import RequestError
from tests.batches.fakes import FakeAnswers
from tests.batches.test_run import until
from tests.batches.test_stores import opened_in_redis
from tools.harness.redis_servers import needs_redis

CONFIG = ServerConfig(batches=BatchConfig(key_file_bytes=1000, max_file_bytes=800))


class Server:
    def __init__(self, shelf: BatchStore, config: ServerConfig = CONFIG) -> None:
        self.shelf = shelf
        self.answers = FakeAnswers()
        self.answers.gate.clear()
        self.batches = Batches(shelf, config, None, self.answers)

    async def begin(self, owner: str, number: int, num_lines: int = 20) -> BatchRecord:
        """Store a batch that was already validated."""
        id = f"batch_{number}"
        now = await self.shelf.records.now()
        batch = BatchRecord(id, owner, "openai", "/v1/completions", f"in{number}", now, 3600)
        batch = msgspec.structs.replace(
            batch, status="in_progress", num_lines=num_lines, output_id=f"out{number}"
        )
        lines = (json.dumps({"custom_id": str(n), "body": {}}) for n in range(num_lines))
        await self.shelf.blobs.append(batch.input_id, "\n".join(lines).encode())
        await self.shelf.records.put(BATCH, id, encode_record(batch))
        await self.shelf.records.put(OPEN, id, id.encode())
        return batch


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    yield Server(folder_batch_store(tmp_path))


async def test_keys_get_equal_shares_regardless_of_their_number_of_batches(server: Server) -> None:
    server.answers.num_at_once = 12
    for number, owner in enumerate(("ann", "bob", "bob", "bob")):
        await server.begin(owner, number)
    task = asyncio.create_task(server.batches.run())
    await until(lambda: len(server.answers.asked) >= 12)
    for _ in range(100):
        await asyncio.sleep(0)
    shares = Counter(it.owner for it in server.answers.asked)
    assert shares == {"ann": 6, "bob": 6} or shares == {"ann": 12, "bob": 6}
    server.answers.gate.set()
    await until(lambda: not server.batches._runs)
    task.cancel()
    keys = Counter(it.key for it in server.answers.asked)
    assert len(keys) == 80 and set(keys.values()) == {1}


async def test_a_line_longer_than_the_body_limit_is_answered(tmp_path: Path) -> None:
    # A request of Anthropic's API becomes a line that is longer than the request.
    config = msgspec.structs.replace(CONFIG, http=HttpConfig(max_body_bytes=20))
    server = Server(folder_batch_store(tmp_path), config)
    await server.begin("ann", 1, num_lines=1)
    server.answers.gate.set()
    task = asyncio.create_task(server.batches.run())
    await until(lambda: len(server.answers.asked) == 1 and not server.batches._runs)
    task.cancel()
    assert (await server.batches.get("ann", "batch_1", "openai")).counts == {"succeeded": 1}


async def test_a_key_only_sees_its_own_batches(server: Server) -> None:
    batch = await server.begin("ann", 1)
    assert [it.id for it in await server.batches.of("ann")] == [batch.id]
    assert await server.batches.of("bob") == []
    with pytest.raises(RequestError) as refused:
        await server.batches.get("bob", batch.id, "openai")
    assert refused.value.code == "batch_not_found"


async def test_a_damaged_record_is_skipped(server: Server) -> None:
    await server.begin("ann", 1)
    for number in (2, 3):
        await server.begin("ann", number)
        await server.shelf.records.put(BATCH, f"batch_{number}", b"\x93damaged")
    server.answers.gate.set()
    task = asyncio.create_task(server.batches.run())
    await until(lambda: len(server.answers.asked) == 20 and not server.batches._runs)
    task.cancel()
    assert [it.id for it in await server.batches.of("ann")] == ["batch_1"]
    with pytest.raises(RequestError):
        await server.batches.get("ann", "batch_2", "openai")


@pytest.mark.parametrize("status", ["failed", "completed", "cancelled", "expired"])
async def test_a_batch_that_ended_before_a_kill_is_not_run_again(
    status: str, server: Server
) -> None:
    ended = (await server.begin("ann", 1)).moved(status, int(time.time()))
    await server.shelf.records.put(BATCH, ended.id, encode_record(ended))
    await server.shelf.records.put(STOP, ended.id, b"canceled")
    async with asyncio.TaskGroup() as tasks:
        await server.batches._look(tasks)
        assert not server.batches._runs
    for kind in (OPEN, STOP):
        assert await server.shelf.records.all(kind) == []
    assert await server.batches.get("ann", ended.id, "openai") == ended


async def test_a_batch_that_a_kill_left_unlisted_is_listed_again(server: Server) -> None:
    begun = await server.begin("ann", 1)
    ended = (await server.begin("ann", 2)).moved("completed", int(time.time()))
    await server.shelf.records.put(BATCH, ended.id, encode_record(ended))
    for batch in (begun, ended):
        await server.shelf.records.remove(OPEN, batch.id)
    await server.batches._sweep()
    assert await server.shelf.records.all(OPEN) == [begun.id.encode()]


async def test_a_file_that_a_batch_needs_is_not_deleted(server: Server) -> None:
    async with await server.batches.files.begin("ann") as upload:
        await upload.write(b"{}\n")
        file = await upload.finish("a", "batch")
    wish = NewBatch("ann", "openai", "/v1/completions", file.id, 3600)
    batch = await server.batches.create(wish)
    with pytest.raises(RequestError) as refused:
        await server.batches.remove_file("ann", file.id)
    assert refused.value.code == "file_in_use"
    with pytest.raises(RequestError) as refused:
        await server.batches.remove(batch)
    assert refused.value.code == "batch_not_ended"
    ended = batch.moved("cancelled", int(time.time()))
    await server.shelf.records.put(BATCH, batch.id, encode_record(ended))
    await server.batches.remove_file("ann", file.id)
    assert await server.batches.files.of("ann") == []


async def test_concurrently_created_batches_do_not_exceed_the_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    async with await server.batches.files.begin("ann") as upload:
        await upload.write(b"{}\n")
        file = await upload.finish("a", "batch")
    wish = NewBatch("ann", "openai", "/v1/completions", file.id, 3600)
    creating = (server.batches.create(wish) for _ in range(4))
    made = await asyncio.gather(*creating, return_exceptions=True)
    assert [isinstance(it, RequestError) for it in made] == [False, False, True, True]


async def test_running_uploads_count_toward_the_quota(server: Server) -> None:
    files = server.batches.files
    async with await files.begin("ann") as first:
        await first.write(b"x" * 700)
        async with await files.begin("ann") as second:
            with pytest.raises(RequestError) as refused:
                await second.write(b"x" * 400)
            assert refused.value.code == "quota_exceeded"
        async with await files.begin("bob") as other:
            await other.write(b"x" * 400)
    async with await files.begin("ann") as third:  # the first was dropped
        with pytest.raises(RequestError) as refused:
            await third.write(b"x" * 801)
        assert refused.value.code == "request_too_large"
        await third.write(b"x" * 800)


async def test_uploads_that_started_together_share_the_quota(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = server.batches.files
    one, two, three, four = [await files.begin("ann") for _ in range(4)]
    async with one:
        await one.write(b"x" * 600)
        await one.finish("a", "batch")
    async with two:
        await two.write(b"x" * 600)
        with pytest.raises(RequestError, match="would have 1200 bytes, and the limit is 1000"):
            await two.finish("b", "batch")
    monkeypatch.setattr("headrace.batches.files.MAX_FILES", 2)
    async with three, four:
        ends = (it.finish("c", "batch") for it in (three, four))
        done = await asyncio.gather(*ends, return_exceptions=True)
    (refused,) = [it for it in done if isinstance(it, RequestError)]
    assert "has 2 files" in refused.message
    assert sorted(it.num_bytes for it in await files.of("ann")) == [0, 600]
    assert await server.shelf.blobs.read(two._id, 0, 10) == b""


async def test_an_upload_with_an_unconfirmed_record_leaves_no_record(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, put = server.batches.files, server.shelf.records.put

    async def put_unconfirmed(*given: Any) -> None:
        await put(*given)
        raise StoreStalled("no answer")

    monkeypatch.setattr(server.shelf.records, "put", put_unconfirmed)
    with pytest.raises(StoreStalled):
        async with await files.begin("ann") as upload:
            await upload.write(b"{}\n")
            await upload.finish("a", "batch")
    assert await files.of("ann") == []


def jump_30_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move this process's wall clock past the end of every batch and file."""
    later = time.time() + 31 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: later)


async def test_expired_files_and_batches_are_swept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = server.batches.files
    async with await files.begin("ann") as upload:
        await upload.write(b"one\n")
        file = await upload.finish("a", "batch", keep_s=3600)
    batch = await server.begin("ann", 1)
    ended = batch.moved("completed", int(time.time()))
    await server.shelf.records.put(BATCH, batch.id, encode_record(ended))
    await server.batches._sweep()
    assert await files.of("ann") and await server.batches.of("ann")
    jump_30_days(monkeypatch)
    await server.batches._sweep()
    assert await files.of("ann") == [] == await server.batches.of("ann")
    assert await server.shelf.blobs.read(file.id, 0, 10) == b""


@needs_redis
async def test_a_server_with_a_wrong_clock_deletes_no_file_and_expires_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_in_redis(tmp_path) as (shelf, _):
        server = Server(shelf)
        async with await server.batches.files.begin("ann") as upload:
            await upload.write(b"one\n")
            await upload.finish("a", "batch")
        await server.begin("ann", 1)
        jump_30_days(monkeypatch)
        await server.batches._sweep()
        assert len(await server.batches.files.of("ann")) == 1
        server.answers.gate.set()
        task = asyncio.create_task(server.batches.run())
        await until(lambda: server.answers.asked and not server.batches._runs)
        task.cancel()
        [batch] = await server.batches.of("ann")
        assert batch.status == "completed"
