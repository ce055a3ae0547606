"""Tests of tokenizer, health and metrics routes, and of ingestion records."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tools.harness.servers import ServerProcess
from tools.harness.sse import data_in

USER = {"role": "user", "content": "Tell me about a river."}


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_apply_template_returns_the_text_that_chat_tokenizes(server: ServerProcess) -> None:
    text = post(server, "/apply-template", messages=[USER])["prompt"]
    from_text = post(server, "/tokenize", content=text)["tokens"]
    from_messages = post(server, "/tokenize", messages=[USER])["tokens"]
    chat = {"messages": [USER], "max_tokens": 1, "return_token_ids": True}
    from_chat = post(server, "/v1/chat/completions", **chat)["prompt_token_ids"]
    assert from_text == from_messages == from_chat


def test_detokenize_undoes_tokenize(server: ServerProcess) -> None:
    text = "Ein Fluß \N{GRINNING FACE} flows."
    tokens = post(server, "/tokenize", content=text, with_pieces=True)["tokens"]
    ids = [token["id"] for token in tokens]
    assert post(server, "/detokenize", tokens=ids) == {"content": text, "prompt": text}
    pieces = [token["piece"] for token in tokens]
    raw = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert raw.decode() == text


def test_health_answers_during_a_step(server: ServerProcess) -> None:
    prompts = [[10 + i] * 500 for i in range(8)]
    body = {"prompt": prompts, "max_tokens": 1, "cache_prompt": False}
    num_answers = 0
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(post, server, "/v1/completions", **body)
        while not work.done():
            answer = httpx.get(f"{server.url}/health", timeout=15)
            assert answer.json()["status"] == "ok"
            num_answers += 1
    assert len(work.result()["choices"]) == 8
    assert num_answers >= 1


def test_props_and_models_agree(server: ServerProcess) -> None:
    props = httpx.get(f"{server.url}/props").json()
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert props["default_generation_settings"]["n_ctx"] == model["max_model_len"]
    assert props["model_alias"] == model["id"]
    assert model["meta"]["n_params"] > 0


def test_the_openapi_document_is_served(server: ServerProcess) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]


def test_metrics_count_the_usage_that_clients_get(server: ServerProcess) -> None:
    def counted() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    before, num_tokens = counted(), 0
    for _ in range(3):
        body = {"prompt": "one two", "max_tokens": 7, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        num_tokens += answer.json()["usage"]["completion_tokens"]
    after = counted()
    name = "headrace_generated_tokens_total"
    assert after[name] - before[name] >= num_tokens == 21
    name = 'headrace_requests_total{outcome="finished",route="/v1/completions"}'
    assert after[name] - before.get(name, 0) >= 3
    assert after["headrace_engine_up"] == 1


ASKED = {
    "/v1/completions": {"prompt": "A river", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/messages": {"model": "headrace-mini", "messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": "A river", "max_output_tokens": 2},
}


def last_frame(server: ServerProcess, path: str, **body: Any) -> Any:
    """Return the last JSON object of a stream."""
    response = httpx.post(f"{server.url}{path}", json=body | {"stream": True}, timeout=60)
    assert response.status_code == 200, response.text
    return data_in(response.text)[-1]


@pytest.mark.parametrize("path", ASKED)
def test_return_ingestion_adds_a_record_of_how_the_prompt_was_computed(
    server: ServerProcess, path: str
) -> None:
    body = ASKED[path] | {"return_ingestion": True, "cache_prompt": False}
    whole = post(server, path, **body)
    last = last_frame(server, path, **body)
    record = whole["headrace"]["ingestion"]
    assert last.get("response", last)["headrace"] == whole["headrace"]
    assert (record["strategy"], record["boundary"], record["encoder"]) == (
        "native-text",
        "step",
        None,
    )
    assert record["chunks"] >= 1 and record["cached_tokens"] == 0
    usage = whole["usage"]
    assert record["prompt_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert "headrace" not in post(server, path, **ASKED[path], return_ingestion=False)


def test_the_last_chunk_has_both_usage_and_the_ingestion_record(server: ServerProcess) -> None:
    asked = {"return_ingestion": True, "stream_options": {"include_usage": True}}
    last = last_frame(server, "/v1/completions", **ASKED["/v1/completions"], **asked)
    assert last["choices"] == [] and last["usage"] and last["headrace"]["ingestion"]
