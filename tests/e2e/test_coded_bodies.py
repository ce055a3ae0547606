"""A real server decodes request bodies, and refuses those that would cost too much."""

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


def test_a_coded_body_gets_the_answer_of_a_plain_one(server: ServerProcess) -> None:
    plain = json.dumps(CHAT).encode()
    bodies = {"identity": plain, "gzip": gzip.compress(plain), "zstd": zstd.compress(plain, 3)}
    answers = {coding: post(server, coding, body).json() for coding, body in bodies.items()}
    texts = {answer["choices"][0]["message"]["content"] for answer in answers.values()}
    assert len(texts) == 1


def test_a_gigabyte_in_30_kb_is_a_413(server: ServerProcess) -> None:
    bomb = zstd.compress(b" " * 1_000_000_000)
    assert len(bomb) < 100_000
    response = post(server, "zstd", bomb)
    assert response.status_code == 413 and "--max-body-bytes" in response.json()["error"]["message"]


def test_an_unknown_coding_is_a_415_that_lists_the_known_ones(server: ServerProcess) -> None:
    response = post(server, "br", b"{}")
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, zstd, identity"


@pytest.mark.parametrize(
    "body", [b"", b"{}", zstd.compress(b"{}")[:-1], zstd.compress(b"") * 1000], ids=range(4)
)
def test_a_damaged_body_is_a_400(server: ServerProcess, body: bytes) -> None:
    response = post(server, "zstd", body)
    assert response.status_code == 400 and "zstd" in response.json()["error"]["message"]
