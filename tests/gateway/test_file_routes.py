"""Tests uploads to /v1/files: every byte of a form counts toward a limit."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from headrace.batches.folder import folder_batch_store
from headrace.gateway import file_routes
from headrace.gateway.multipart import STEP_BYTES
from headrace_common.config.settings import BatchConfig, HttpConfig, ServerConfig
from tests.gateway.builders import FakeGeneration, app_of

CONFIG = ServerConfig(
    http=HttpConfig(allowed_host=("testserver",)), batches=BatchConfig(max_file_bytes=1000)
)
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n\r\n'
FORM = PURPOSE + FILE + b"--b--"
EMPTY = b"\r\n" * 20_000


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    app = app_of(FakeGeneration(), CONFIG, shelf=folder_batch_store(tmp_path))
    return TestClient(app)


def send(client: TestClient, *pieces: bytes) -> httpx.Response:
    """Send a form without a content length and return the answer."""

    def body() -> Iterator[bytes]:
        yield from pieces

    headers = {"content-type": "multipart/form-data; boundary=b"}
    return client.post("/v1/files", content=body(), headers=headers)


def test_an_uploaded_form_becomes_a_file(client: TestClient) -> None:
    answer = send(client, EMPTY, FORM)
    assert answer.status_code == 200 and answer.json()["bytes"] == 3
    assert client.get(f"/v1/files/{answer.json()['id']}/content").content == b"{}\n"


@pytest.mark.parametrize(
    "form",
    [
        (EMPTY, EMPTY, FORM),
        (FORM, EMPTY, EMPTY),
        (PURPOSE, FILE, b"--b" + b" " * 70_000, b"\r\n", FILE),
    ],
    ids=["before", "behind", "between"],
)
def test_bytes_around_the_parts_count_toward_the_limit(
    client: TestClient, form: tuple[bytes, ...]
) -> None:
    refused = send(client, *form)
    assert refused.status_code == 413 and "1000 bytes" in refused.text


def test_a_form_whose_content_length_is_too_large_is_refused_unread(client: TestClient) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b", "content-length": "70000"}
    refused = client.post("/v1/files", content=b"", headers=headers)
    assert refused.status_code == 413


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (PURPOSE + FILE, "last boundary"),
        (PURPOSE + FILE + FILE + b"--b--", "two files"),
        (PURPOSE.replace(b"batch", b"") * 1000, "17 parts"),
        (FILE + b"--b--", "purpose"),
        (PURPOSE + b"--b--", "file"),
        (b"--b--", "file"),
        (b"", "last boundary"),
    ],
)
def test_an_invalid_form_is_refused_with_400(client: TestClient, form: bytes, why: str) -> None:
    refused = send(client, form)
    assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def test_parsing_stops_at_the_first_exceeded_limit(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    class Watched(file_routes.FormParser):
        def feed(self, data: bytes):  # type: ignore[no-untyped-def]
            parsed.append(len(data))
            return super().feed(data)

    monkeypatch.setattr(file_routes, "FormParser", Watched)
    assert send(client, PURPOSE.replace(b"batch", b"") * 1000).status_code == 400
    assert parsed == [STEP_BYTES]
