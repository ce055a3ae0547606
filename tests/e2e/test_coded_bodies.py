"""Tests of compressed request bodies on a real server."""

import gzip
import json

import httpx
import pytest
from backports import zstd

from tools.harness.servers import ServerProcess

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


def post(server: ServerProcess, coding: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": coding}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, content=body, headers=headers, timeout=60)


def test_a_compressed_body_gets_the_same_answer_as_a_plain_one(server: ServerProcess) -> None:
    plain = json.dumps(CHAT).encode()
    bodies = {"identity": plain, "gzip": gzip.compress(plain), "zstd": zstd.compress(plain, 3)}
    answers = {coding: post(server, coding, body).json() for coding, body in bodies.items()}
    texts = {answer["choices"][0]["message"]["content"] for answer in answers.values()}
    assert len(texts) == 1


def test_a_decompression_bomb_is_a_413(server: ServerProcess) -> None:
    bomb = zstd.compress(b" " * 1_000_000_000)
    assert len(bomb) < 100_000
    response = post(server, "zstd", bomb)
    assert response.status_code == 413 and "--max-body-bytes" in response.json()["error"]["message"]


def test_an_unknown_content_encoding_is_a_415_that_lists_supported_ones(
    server: ServerProcess,
) -> None:
    response = post(server, "br", b"{}")
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, zstd, identity"


@pytest.mark.parametrize(
    "body", [b"", b"{}", zstd.compress(b"{}")[:-1], zstd.compress(b"") * 1000], ids=range(4)
)
def test_a_corrupt_zstd_body_is_a_400(server: ServerProcess, body: bytes) -> None:
    response = post(server, "zstd", body)
    assert response.status_code == 400 and "zstd" in response.json()["error"]["message"]
