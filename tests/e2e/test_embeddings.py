"""Tests of embeddings from a generative model, with the openai package and over plain HTTP."""

import asyncio
import base64
import socket
import threading
from array import array
from typing import Any

import httpx
import msgspec
import openai
import pytest

from headrace import AsyncClient, Client
from headrace_common.errors import RequestFailed
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess

TEXTS = ["Hello there", "The quick brown fox jumps over the lazy dog. " * 40, "x"]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: ServerProcess, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def distance(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_embeddings_have_unit_length(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="headrace-mini", input=TEXTS)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    for entry in answer.data:
        assert sum(value * value for value in entry.embedding) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 500


def test_base64_equals_float(server: ServerProcess) -> None:
    packed = post(server, input=TEXTS, encoding_format="base64").json()["data"]
    plain = post(server, input=TEXTS).json()["data"]
    for one, other in zip(packed, plain, strict=True):
        assert array("f", base64.b64decode(one["embedding"])).tolist() == other["embedding"]


def test_token_ids_get_the_same_vectors_as_their_text(server: ServerProcess) -> None:
    ids = [post(server, "/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    of_ids, of_texts = post(server, input=ids).json(), post(server, input=TEXTS).json()
    assert of_ids["usage"] == of_texts["usage"]
    for one, other in zip(of_ids["data"], of_texts["data"], strict=True):
        assert distance(one["embedding"], other["embedding"]) < 1e-2  # bfloat16
    alone = post(server, input=ids[0]).json()["data"]
    assert distance(alone[0]["embedding"], of_ids["data"][0]["embedding"]) < 1e-2


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": ["a", 1]}, "invalid_type", "input[1]"),
        ({"input": [1, 2, 1 << 20]}, "invalid_value", "input[2]"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
        ({"input": ["a", "b " * 9000]}, "context_length_exceeded", "input[1]"),
        ({"input": "a", "dimensions": 5}, "invalid_value", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "invalid_value", "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "unsupported_parameter", None),
    ],
)
def test_an_invalid_embedding_request_names_the_parameter(
    server: ServerProcess, body: dict[str, Any], code: str, param: str | None
) -> None:
    answer = post(server, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert param is None or error["param"] == param


def test_a_rerank_request_to_a_generative_model_suggests_a_cross_encoder(
    server: ServerProcess,
) -> None:
    error = post(server, "/v1/rerank", query="a", documents=["b"]).json()["error"]
    assert error["code"] == "unsupported_operation" and "cross-encoder" in error["message"]


def test_embedding_during_generation_is_served(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model="headrace-mini", prompt="Count", max_tokens=4000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    with stream:
        next(iter(stream))
        answer = post(server, input=[f"number {i}" for i in range(200)])
        assert len(answer.json()["data"]) == 200
        next(iter(stream))  # the stream is still running


def test_concurrent_embedding_requests_get_their_own_vectors(server: ServerProcess) -> None:
    alone = [post(server, input=text).json()["data"][0]["embedding"] for text in TEXTS]
    got: dict[int, list[dict[str, Any]]] = {}

    def embed(number: int) -> None:
        got[number] = post(server, input=[TEXTS[number]] * 90).json()["data"]

    threads = [threading.Thread(target=embed, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, entries in got.items():
        assert [entry["index"] for entry in entries] == list(range(90))
        assert all(distance(e["embedding"], alone[number]) < 1e-2 for e in entries)


def test_a_disconnected_client_frees_its_embedding_requests(server: ServerProcess) -> None:
    def engine() -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"{server.url}/manage/state").json()
        return state

    body = msgspec.json.encode({"input": ["some words that take a while " * 100] * 1500})
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        eventually(lambda: engine()["running"] > 0, within_s=60)
    eventually(lambda: not engine()["running"] and not engine()["waiting"]["requests"], 60)


def test_the_python_clients_return_the_same_vectors_as_the_route(server: ServerProcess) -> None:
    expected = [entry["embedding"] for entry in post(server, input=TEXTS).json()["data"]]

    async def ask() -> Any:
        async with AsyncClient(server.url) as client:
            return await client.embed(TEXTS)

    with Client(server.url) as client:
        assert all(map(lambda a, b: distance(a, b) < 1e-2, client.embed(TEXTS), expected))
        assert distance(client.embed(TEXTS[0]), expected[0]) < 1e-2
        assert len(client.embed([5, 6, 7])) == len(expected[0])
        with pytest.raises(RequestFailed) as refused:
            client.embed(["a", ""])
        assert refused.value.param == "input[1]"
    assert all(map(lambda a, b: distance(a, b) < 1e-2, asyncio.run(ask()), expected))
