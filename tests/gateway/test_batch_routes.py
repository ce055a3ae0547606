"""Batches over HTTP: a refused one leaves nothing behind."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headrace.batches import batches
from headrace.batches.folder import folder_shelf
from headrace.config.settings import HttpConfig, ServerConfig
from headrace.gateway.app import create_app
from tests.gateway.builders import FakeGeneration

CONFIG = ServerConfig(http=HttpConfig(allowed_host=("testserver",)))
PARAMS = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def test_the_requests_of_a_refused_message_batch_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(FakeGeneration(), CONFIG, shelf=folder_shelf(tmp_path))  # type: ignore[arg-type]
    client = TestClient(app)
    asked = {"requests": [{"custom_id": "a", "params": PARAMS}]}
    monkeypatch.setattr(batches, "MAX_OPEN", 0)
    refused = client.post("/v1/messages/batches", json=asked)
    assert refused.status_code == 400 and "unfinished batches" in refused.text
    assert not [it for it in tmp_path.rglob("*") if it.is_file()]
    monkeypatch.setattr(batches, "MAX_OPEN", 1)
    assert client.post("/v1/messages/batches", json=asked).status_code == 200
    assert len(list((tmp_path / "blobs").iterdir())) == 1
