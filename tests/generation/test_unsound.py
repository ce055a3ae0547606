"""Tests that only a stream with altered rows fails, with a reason."""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.generation.event_builder import EventBuilder
from headrace.generation.generation import Generation
from headrace.streams.events import Error
from headrace.streams.log import LogUnsound
from headrace.streams.record import Names
from headrace.streams.store import ByConversation, ById
from headrace.streams.stores.sqlite_schema import NAME
from headrace_common.messages import FinishReason
from tests.fleet.fakes import FakeEngine
from tests.generation.fakes import make_request, opened, read, running
from tools.harness.stream_events import opened_sqlite

LIVE = Names(conversation="live", digest=b"1")
ENDED = Names(owner="me", conversation="ended", key="key", digest=b"2")


@contextlib.asynccontextmanager
async def kept(folder: Path, directory: Path) -> AsyncIterator[tuple[Generation, FakeEngine]]:
    """Run a generation that stores its streams in the directory."""
    async with opened_sqlite(directory) as store, running(folder, store) as parts:
        yield parts


async def fill(generation: Generation, engine: FakeEngine) -> None:
    """Create one finished stream and one unfinished stream."""
    ended = await opened(generation, engine, ENDED)
    while not engine.submits:
        await asyncio.sleep(0)
    await engine.start(engine.newest)
    await engine.finish(engine.newest, FinishReason.LENGTH)
    await read(ended)
    await opened(generation, engine, LIVE)


def alter(directory: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(directory / NAME)) as other, other:
        assert other.execute(statement).rowcount > 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE batches SET events = x'80' WHERE n = 2",
        "UPDATE batches SET first_seq = first_seq + 1 WHERE n = 2",
        "DELETE FROM batches WHERE n = 2",
        "UPDATE records SET record = x'80' WHERE n = 2",
        "DELETE FROM records WHERE n = 2",
        "UPDATE streams SET next_seq = 'many' WHERE n = 2",
        "UPDATE streams SET id = CAST(x'ff' AS TEXT), owner = 5 WHERE n = 2",
        "UPDATE streams SET n = 9223372036854775807 WHERE n = 2",
    ],
)
async def test_a_damaged_stream_does_not_prevent_the_server_from_serving(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    async with kept(folder, tmp_path) as parts:
        await fill(*parts)
    alter(tmp_path, statement)
    with caplog.at_level(logging.WARNING):
        async with kept(folder, tmp_path) as (generation, _):
            found = await generation.streams.find("me", ByConversation("me", "ended"))
            assert found and len(await read(found)) > 2
            await generation.open(make_request(), Names(conversation="new", digest=b"3"))
            assert len(generation.streams) == 1
    said = [record for record in caplog.records if "is damaged and was ended" in record.message]
    assert len(said) == 1 and not any(record.exc_info for record in caplog.records)


async def test_a_damaged_stream_is_reported_and_deleted_and_its_key_is_free(
    folder: Path, tmp_path: Path
) -> None:
    name = ByConversation("me", "ended")

    async with kept(folder, tmp_path) as parts:
        await fill(*parts)
    alter(tmp_path, "UPDATE batches SET events = events || x'00' WHERE n = 1 AND first_seq > 0")
    async with kept(folder, tmp_path) as (generation, _):
        streams = generation.streams
        found = await streams.find("me", name)
        assert found
        with pytest.raises(LogUnsound):
            await read(found)
        by_id = ById(found.record.id)
        with pytest.raises(LogUnsound):
            await streams.find("me", by_id)
        assert await streams.find("you", by_id) is None
        assert await streams.find_conversations("me", ["ended"]) == []
        assert await generation.streams.find_equal(ENDED) is None
        await streams.discard("me", by_id)
        assert await streams.find("me", by_id) is None


async def test_a_stream_row_with_an_altered_owner_is_not_given_to_that_owner(
    folder: Path, tmp_path: Path
) -> None:
    async with kept(folder, tmp_path) as parts:
        await fill(*parts)
    alter(tmp_path, "UPDATE streams SET owner = 'you' WHERE n = 1")
    async with kept(folder, tmp_path) as (generation, _):
        assert await generation.streams.find("you", ByConversation("you", "ended")) is None
        with pytest.raises(LogUnsound):
            await generation.streams.find("me", ByConversation("me", "ended"))


async def test_a_stream_that_cannot_be_resumed_ends_and_the_server_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept(folder, tmp_path) as parts:
        await fill(*parts)
    monkeypatch.setattr(EventBuilder, "replay", lambda self, page: 1 / 0)
    async with kept(folder, tmp_path) as (generation, _):
        found = await generation.streams.find("", ByConversation("", "live"))
        assert found
        last = (await read(found))[-1]
        assert isinstance(last, Error) and last.code == "resume_mismatch"
