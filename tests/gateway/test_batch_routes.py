"""Tests batches over HTTP: refused batches, large answers, form fields and deleted files."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headrace.batches import answers, batches
from headrace.batches.answers import LineAnswers, LineRequest
from headrace.batches.folder import folder_batch_store
from headrace.batches.lines import PIECE
from headrace.batches.records import FileRecord
from headrace.gateway.file_routes import content_of
from headrace.intake.intake import Intake
from headrace_common.config.settings import HttpConfig, ServerConfig
from tests.gateway.builders import FakeGeneration, app_of
from tests.gateway.test_http_server import served

CONFIG = ServerConfig(http=HttpConfig(allowed_host=("testserver",)))
PARAMS = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def test_the_requests_of_a_refused_message_batch_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(FakeGeneration(), CONFIG, shelf=folder_batch_store(tmp_path))
    client = TestClient(app)
    asked = {"requests": [{"custom_id": "a", "params": PARAMS}]}
    monkeypatch.setattr(batches, "MAX_OPEN", 0)
    refused = client.post("/v1/messages/batches", json=asked)
    assert refused.status_code == 400 and "unfinished batches" in refused.text
    assert not [it for it in tmp_path.rglob("*") if it.is_file()]
    monkeypatch.setattr(batches, "MAX_OPEN", 1)
    assert client.post("/v1/messages/batches", json=asked).status_code == 200
    assert len(list((tmp_path / "blobs").iterdir())) == 1


async def test_a_batch_line_fails_if_its_answer_is_too_large_to_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generation = FakeGeneration()
    intake = Intake(generation, CONFIG)  # type: ignore[arg-type]
    of_lines = LineAnswers(generation, intake)  # type: ignore[arg-type]
    line = {"custom_id": "a", "body": {"model": "headrace-mini", "input": ["Hi"] * 9}}
    asked = LineRequest("/v1/embeddings", "ann", "batch:1", json.dumps(line).encode())
    whole = await of_lines.answer(asked)
    assert whole.status == 200
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", len(whole.body) - 1)
    custom_id, status, body = await of_lines.answer(asked)
    assert (custom_id, status) == ("a", 413)
    assert f"has {len(whole.body)} bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "names", [[str(number) for number in range(17)], ["a" * 600, "b" * 600], ["c" * 1025]]
)
def test_a_form_with_too_many_or_too_long_field_names_is_refused(
    tmp_path: Path, names: list[str]
) -> None:
    app = app_of(FakeGeneration(), CONFIG, shelf=folder_batch_store(tmp_path))
    client = TestClient(app)
    file = {"file": ("a.jsonl", b"{}\n")}
    few = {"purpose": "batch", "a": "", "b": ""}
    assert client.post("/v1/files", data=few, files=file).status_code == 200
    refused = client.post("/v1/files", data=dict.fromkeys(names, ""), files=file)
    assert refused.status_code == 400 and "16 fields" in refused.text


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_download_of_a_file_deleted_meanwhile_does_not_look_complete(
    tmp_path: Path, is_deleted: bool
) -> None:
    whole = b"x" * (PIECE + 9)
    blobs = folder_batch_store(tmp_path).blobs
    await blobs.append("file-a", whole)
    read = blobs.read

    async def read_once(id: str, start: int, most: int) -> bytes:
        piece = await read(id, start, most)
        if is_deleted:
            await blobs.remove(id)
        return piece

    blobs.read = read_once  # type: ignore[method-assign]
    file = FileRecord("file-a", "ann", "a", "batch", len(whole), 0, 0)
    async with served(content_of(blobs, file)) as (_, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        got = await reader.read()
    assert got.count(b"x") == (PIECE if is_deleted else len(whole))
    assert got.endswith(b"\r\n0\r\n\r\n") != is_deleted
