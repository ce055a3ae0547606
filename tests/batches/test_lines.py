"""Tests that lines read in pieces have the numbers that an editor shows."""

from pathlib import Path

import msgspec
import pytest

from headrace.batches import lines
from headrace.batches.folder import folder_batch_store
from headrace.batches.lines import answered, chunks_of, lines_of
from headrace.batches.records import BatchRecord
from headrace.batches.store import Blobs
from headrace.protocols.batch_lines import FORMS

TEXT = b"one\n\n  \nfour\n" + b"x" * 30 + b"\nsix\nseven"


@pytest.fixture
async def blobs(tmp_path: Path) -> Blobs:
    return folder_batch_store(tmp_path).blobs


@pytest.mark.parametrize("piece", range(1, 60))
async def test_a_file_has_the_same_lines_however_it_is_split(
    piece: int, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE", piece)
    await blobs.append("a", TEXT)
    found = [it async for it in lines_of(blobs, "a", 100)]
    assert found == [(1, b"one"), (4, b"four"), (5, b"x" * 30), (6, b"six"), (7, b"seven")]


@pytest.mark.parametrize("piece", range(1, 25))
async def test_a_line_that_is_too_long_is_skipped_but_numbered(
    piece: int, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE", piece)
    await blobs.append("a", TEXT)
    chunks = [it async for it in chunks_of(blobs, "a", 25)]
    assert [it.first for it in chunks if it.lines is None] in ([5], [])
    found = [it async for it in lines_of(blobs, "a", 25)]
    kept = [it for it in found if not it[1].startswith(b"x")]
    assert kept == [(1, b"one"), (4, b"four"), (6, b"six"), (7, b"seven")]


@pytest.mark.parametrize("piece", [1, 7, 100, 1000])
async def test_the_answered_lines_are_found_from_the_results(
    piece: int, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "PIECE", piece)
    batch = BatchRecord("batch_1", "", "openai", "/v1/completions", "in", 0, 60)
    batch = msgspec.structs.replace(batch, output_id="out", error_id="errors")
    form = FORMS["openai"]
    body = b'{"text":"{\\"id\\":\\"batch_req_00_9\\""}'
    for number in (3, 1):
        id = f"batch_req_0f_{number}"
        await blobs.append("out", form.answered(id, "batch_req_0f_7", 200, body))
    await blobs.append("errors", form.missed("batch_req_0f_2", "b", "expired"))
    await blobs.append("errors", form.missed("batch_req_0f_4", "c", "expired")[:-5])
    found = await answered(blobs, batch)
    assert found.numbers == {1, 2, 3}
    assert found.counts == {"succeeded": 2, "errored": 1}
    assert found.sizes["errors"] == len(form.missed("batch_req_0f_2", "b", "expired"))


async def test_the_outcomes_of_messages_are_counted_from_the_results(blobs: Blobs) -> None:
    batch = BatchRecord("msgbatch_1", "", "anthropic", "/v1/messages", "in", 0, 60)
    batch = msgspec.structs.replace(batch, output_id="out")
    form = FORMS["anthropic"]
    await blobs.append("out", form.answered("batch_req_0f_1", "a", 200, b"{}"))
    await blobs.append("out", form.answered("batch_req_0f_2", "b", 400, b"{}"))
    await blobs.append("out", form.missed("batch_req_0f_3", "c", "canceled"))
    found = await answered(blobs, batch)
    assert found.counts == {"succeeded": 1, "errored": 1, "canceled": 1}
