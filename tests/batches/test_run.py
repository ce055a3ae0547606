"""Tests that a batch run answers each line once despite kills, full disks and waits."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.batches import answers
from headrace.batches import run as running
from headrace.batches.answers import LineCheck
from headrace.batches.files import Files
from headrace.batches.folder import folder_batch_store
from headrace.batches.records import (
    BATCH,
    CANCELED,
    OPEN,
    STOP,
    BatchRecord,
    encode_record,
    read_record,
)
from headrace.batches.run import BatchDependencies, BatchRun
from headrace.batches.store import BatchStore, ClaimLost
from headrace_common.config.settings import BatchConfig
from headrace_common.errors import RequestError
from tests.batches.fakes import FakeAnswers, FullBlobs
from tests.batches.test_stores import lapse, opened_in_redis
from tools.harness.redis_servers import needs_redis

LATER = RequestError("server_overloaded", "not now", retry_after_s=0.0)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(answers, "MOST_WAIT_S", 0.0)
    monkeypatch.setattr(running, "TICK_S", 0.01)


class Scene:
    """One batch of lines that a test can run several times."""

    def __init__(self, place: Path | BatchStore, num_lines: int = 20, api: str = "openai") -> None:
        self.answers = FakeAnswers()
        shelf = folder_batch_store(place) if isinstance(place, Path) else place
        self.blobs = FullBlobs(shelf.blobs)
        self.shelf = BatchStore(shelf.records, self.blobs)
        files = Files(self.shelf, BatchConfig())
        check = LineCheck(self.blobs, None, self.answers, 1000)
        self.bench = BatchDependencies(self.shelf, files, self.answers, check, 1000, 1000)
        self.batch = BatchRecord(
            "batch_1", "ann", api, "/v1/completions", "in", int(time.time()), 3600
        )
        error_id = "errors" if api == "openai" else None
        begun = {"status": "in_progress", "num_lines": num_lines}
        files_of = {"output_id": "out", "error_id": error_id}
        self.batch = msgspec.structs.replace(self.batch, **begun, **files_of)
        self.ids = [f"l{number}" for number in range(num_lines)]

    async def prepare(self) -> "Scene":
        lines = (json.dumps({"custom_id": id, "body": {}}).encode() + b"\n" for id in self.ids)
        await self.blobs.append("in", b"".join(lines))
        await self.shelf.records.put(BATCH, self.batch.id, encode_record(self.batch))
        await self.shelf.records.put(OPEN, self.batch.id, b"")
        return self

    async def stored(self) -> BatchRecord:
        batch = read_record(await self.shelf.records.get(BATCH, self.batch.id), BatchRecord)
        assert batch is not None
        return batch

    async def begin(self) -> "asyncio.Task[None]":
        run = BatchRun(self.bench, await self.stored(), lambda: 4)
        return asyncio.create_task(run.run())

    async def results(self, id: str) -> list[dict[str, Any]]:
        return [json.loads(it) for it in (await self.blobs.read(id, 0, 1 << 20)).splitlines()]


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def test_every_line_is_answered_with_limited_concurrency(tmp_path: Path) -> None:
    scene = await Scene(tmp_path).prepare()
    await (await scene.begin())
    found = await scene.results("out")
    assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
    assert all(it["response"]["body"] == {"of": it["custom_id"]} for it in found)
    assert scene.answers.most_in_work == 4
    assert Counter(scene.answers.forgotten) == Counter(it.key for it in scene.answers.asked)
    batch = await scene.stored()
    assert batch.status == "completed" and batch.counts == {"succeeded": 20}
    assert await scene.shelf.records.all(OPEN) == []


@pytest.mark.parametrize("num_asked", range(1, 20, 2))
async def test_a_run_that_was_killed_at_any_point_is_continued(
    num_asked: int, tmp_path: Path
) -> None:
    scene = await Scene(tmp_path).prepare()
    task = await scene.begin()
    await until(lambda: len(scene.answers.asked) >= num_asked)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await (await scene.begin())
    found = await scene.results("out")
    assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
    assert len({it["id"] for it in found}) == 20


async def test_a_temporary_error_is_retried_and_not_stored(tmp_path: Path) -> None:
    scene = await Scene(tmp_path).prepare()
    scene.answers.refusals = {id: [LATER] * 3 for id in scene.ids[:5]}
    await (await scene.begin())
    assert len(await scene.results("out")) == 20
    assert await scene.results("errors") == []


async def test_results_wait_for_a_full_disk_and_none_is_lost(tmp_path: Path) -> None:
    scene = await Scene(tmp_path).prepare()
    scene.blobs.num_full = 30
    await (await scene.begin())
    assert scene.blobs.num_full == 0
    found = await scene.results("out")
    assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)


@needs_redis
async def test_lines_whose_results_a_failover_lost_are_answered_again(tmp_path: Path) -> None:
    async with opened_in_redis(tmp_path) as (shelf, _):
        scene = await Scene(shelf).prepare()
        scene.blobs.num_lost = 2
        assert await shelf.records.claim(scene.batch.id)
        with pytest.RaisesGroup(ClaimLost):
            await (await scene.begin())
        assert await shelf.records.claim(scene.batch.id)
        await (await scene.begin())
        found = await scene.results("out")
        assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
        batch = await scene.stored()
        assert batch.status == "completed" and batch.counts == {"succeeded": 20}


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_the_remaining_lines_of_a_cancelled_batch_are_marked_as_canceled(
    api: str, tmp_path: Path
) -> None:
    scene = await Scene(tmp_path, api=api).prepare()
    task = await scene.begin()
    await until(lambda: len(scene.answers.asked) >= 6)
    scene.answers.gate.clear()
    await scene.shelf.records.put(STOP, scene.batch.id, b"")
    await task
    batch = await scene.stored()
    assert batch.status == "cancelled" and batch.num_ended == 20
    files = [it for it in (batch.output_id, batch.error_id) if it]
    found = [it for id in files for it in await scene.results(id)]
    assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
    left = [it for it in found if '"canceled"' in json.dumps(it) or it.get("error")]
    assert len(left) == batch.counts[CANCELED] > 0


async def test_cancelling_a_batch_writes_waiting_results_exactly_once(
    tmp_path: Path,
) -> None:
    scene = await Scene(tmp_path).prepare()
    scene.blobs.num_full = many = 1 << 40
    task = await scene.begin()
    await until(lambda: scene.blobs.num_full < many)
    await scene.shelf.records.put(STOP, scene.batch.id, b"")
    while (await scene.stored()).status != "cancelling":
        await asyncio.sleep(0.01)
    scene.blobs.num_full = 0
    await task
    found = [it for id in ("out", "errors") for it in await scene.results(id)]
    assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
    assert (await scene.stored()).counts == {"succeeded": 4, "canceled": 16}


async def test_a_write_of_many_results_is_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_MANY_BYTES", 400)
    scene = Scene(tmp_path, num_lines=50)
    scene.batch = msgspec.structs.replace(scene.batch, created_at=int(time.time()) - 3600)
    await (await (await scene.prepare()).begin())
    found = await scene.results("errors")
    assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
    assert max(scene.blobs.sizes[1:]) < 2 * 400  # the first is the file of lines


@needs_redis
async def test_a_server_whose_claim_expired_leaves_the_batch_to_the_new_holder(
    tmp_path: Path,
) -> None:
    async with opened_in_redis(tmp_path) as (shelf, other):
        scene, rival = await Scene(shelf).prepare(), Scene(other)
        scene.answers.gate.clear()
        assert await shelf.records.claim(scene.batch.id)
        run = BatchRun(scene.bench, scene.batch, lambda: 4)
        task = asyncio.create_task(run.run())
        await until(lambda: len(scene.answers.asked) == 4)
        await lapse(shelf, scene.batch.id)
        with pytest.RaisesGroup(ClaimLost):
            await asyncio.wait_for(task, 5)
        assert await other.records.claim(scene.batch.id)
        await (await rival.begin())
        with pytest.raises(ClaimLost):
            await run._save("cancelling")
        found = await rival.results("out")
        assert Counter(it["custom_id"] for it in found) == Counter(scene.ids)
        assert (await scene.stored()).status == "completed"


@needs_redis
async def test_a_suspended_server_whose_claim_expired_starts_no_more_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "TICK_S", 60.0)
    async with opened_in_redis(tmp_path) as (shelf, other):
        assert other is not None
        scene, share = await Scene(shelf).prepare(), 4
        scene.answers.gate.clear()
        assert await shelf.records.claim(scene.batch.id)
        run = BatchRun(scene.bench, scene.batch, lambda: share)
        task = asyncio.create_task(run.run())
        await until(lambda: len(scene.answers.asked) == 4)
        await lapse(shelf, scene.batch.id)
        assert await other.records.claim(scene.batch.id)
        share = 5
        run._changed.set()
        with pytest.RaisesGroup(ClaimLost):
            await asyncio.wait_for(task, 5)
        assert len(scene.answers.asked) == 4


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("reason", ["cancelled", "expired"])
async def test_a_batch_that_cannot_be_validated_yet_can_be_cancelled_or_expire(
    api: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, api=api)
    scene.batch = msgspec.structs.replace(scene.batch, status="validating", output_id=None)
    if reason == "expired":
        scene.batch = msgspec.structs.replace(scene.batch, created_at=int(time.time()) - 3600)

    async def refuse(lines: bytes) -> None:
        raise LATER

    monkeypatch.setattr(scene.answers, "read_models", refuse)
    task = await (await scene.prepare()).begin()
    if reason == "cancelled":
        await scene.shelf.records.put(STOP, scene.batch.id, b"")
    await asyncio.wait_for(task, 20)
    batch = await scene.stored()
    assert batch.status == reason
    assert await scene.shelf.records.all(OPEN) == []
    if api == "anthropic":
        assert batch.output_id is not None and batch.num_lines == 20
        results = await scene.results(batch.output_id)
        assert Counter(it["custom_id"] for it in results) == Counter(scene.ids)


async def test_a_batch_whose_file_is_gone_fails_with_its_number_of_missing_results(
    tmp_path: Path,
) -> None:
    scene = await Scene(tmp_path).prepare()
    await scene.blobs.remove("in")
    await scene.blobs.append("in", b'{"custom_id":"l0","body":{}}\n')
    await (await scene.begin())
    batch = await scene.stored()
    assert batch.status == "failed" and batch.counts == {"succeeded": 1}
    (fault,) = batch.faults
    assert fault.code == "file_not_found" and "19 of 20 lines" in fault.message


async def test_a_batch_is_not_saved_again_after_its_end(tmp_path: Path) -> None:
    scene = await Scene(tmp_path).prepare()
    run = BatchRun(scene.bench, await scene.stored(), lambda: 4)
    await run.run()
    await scene.shelf.records.remove(BATCH, scene.batch.id)
    await run._save("cancelling")
    assert await scene.shelf.records.all(BATCH) == []


async def test_an_expired_batch_answers_no_further_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.batch = msgspec.structs.replace(scene.batch, created_at=int(time.time()) - 3600)
    scene.answers.gate.clear()
    await (await (await scene.prepare()).begin())
    batch = await scene.stored()
    assert batch.status == "expired" and batch.counts == {"expired": 20}
    assert {it["error"]["code"] for it in await scene.results("errors")} == {"batch_expired"}
