"""Tests of every model route with loaded, unloaded and broken models of each kind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headrace.protocols.vectors import rerank, score
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_encoder, make_tiny_model

TALK = {"messages": [{"role": "user", "content": "one"}]}
SHORT = {"max_tokens": 2}
DRAWING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": TALK | SHORT,
    "/chat/completions": TALK | SHORT,
    "/api/v0/chat/completions": TALK | SHORT,
    "/v1/completions": {"prompt": "one"} | SHORT,
    "/completion": {"prompt": "one", "n_predict": 2},
    "/completions": {"prompt": "one", "n_predict": 2},
    "/v1/messages": TALK | SHORT,
    "/v1/responses": {"input": "one", "max_output_tokens": 2},
    "/api/chat": TALK | {"options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "one", "options": {"num_predict": 2}, "stream": False},
    "/infill": {"input_prefix": "one", "input_suffix": "two", "n_predict": 2},
}
"""Routes that generate tokens, with a body for each."""
EMBEDDING = {path: {"input": "one"} for path in ("/v1/embeddings", "/api/embed")}
RANKING: dict[str, dict[str, Any]] = {
    **{path: {"query": "one", "documents": ["two"]} for path in rerank.ROUTES},
    **{path: {"text_1": "one", "text_2": ["two"]} for path in score.ROUTES},
}
READING: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "one"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": TALK,
    "/v1/messages/count_tokens": TALK,
    "/v1/responses/input_tokens": {"input": "one"},
}
"""Routes that only tokenize or render text, so they need no engine."""
OWN = {"chat": DRAWING, "vectors": EMBEDDING, "ranks": RANKING}
OTHERS = {
    "chat": ((RANKING, "cross-encoder"),),
    "vectors": ((DRAWING, "/v1/embeddings"), (RANKING, "cross-encoder")),
    "ranks": ((DRAWING, "/v1/rerank"), (EMBEDDING, "/v1/rerank")),
}
"""For each model, routes that it cannot serve and a part of their error message."""
UNSUPPORTED = "/infill"  # the tiny model has no infill tokens
LIMIT_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "chat")
    make_tiny_encoder(root / "vectors")
    make_tiny_encoder(root / "ranks", "BertForSequenceClassification")
    make_tiny_model(root / "damaged")
    weights = root / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    (root / "unread").mkdir()
    (root / "unread" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    flags = ("--max-models", "1", "--threads", "1", "--kv-cache-memory-bytes", str(16 << 20))
    with running_server("--models-dir", str(root), *flags) as running:
        yield running


def ask(server: ServerProcess, path: str, body: dict[str, Any], model: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body | {"model": model}, timeout=LIMIT_S)


def ask_all(
    server: ServerProcess, routes: dict[str, dict[str, Any]], model: str
) -> dict[str, httpx.Response]:
    """Send all requests at once, so that all of them wait for one load of the model."""
    with ThreadPoolExecutor(len(routes)) as pool:
        answers = pool.map(lambda route: ask(server, *route, model), routes.items())
        return dict(zip(routes, answers, strict=True))


def code_of(answer: httpx.Response) -> str:
    """Return the error code, which Ollama's routes have at the top level and others in `error`."""
    shown: dict[str, Any] = answer.json()
    code: str = (shown if "code" in shown else shown["error"])["code"]
    return code


def unload(server: ServerProcess, model: str) -> None:
    assert httpx.post(f"{server.url}/models/unload", json={"model": model}).is_success

    def is_gone() -> bool:
        entries = httpx.get(f"{server.url}/models", timeout=LIMIT_S).json()["data"]
        return any(it["id"] == model and it["status"]["value"] == "unloaded" for it in entries)

    eventually(is_gone, LIMIT_S)


@pytest.mark.parametrize("model", OWN)
def test_a_route_answers_the_same_whether_its_model_is_loaded_or_not(
    server: ServerProcess, model: str
) -> None:
    routes = OWN[model]
    ask(server, *next(iter(routes.items())), model)
    for state in ("loaded", "unloaded"):
        if state == "unloaded":
            unload(server, model)
            check_other_kinds(server, model)
        for path, answer in ask_all(server, routes, model).items():
            status = 400 if path == UNSUPPORTED else 200
            assert answer.status_code == status, (path, state, answer.text)


def check_other_kinds(server: ServerProcess, model: str) -> None:
    """Check that routes for other kinds of models name a route or model that would work."""
    for routes, remedy in OTHERS[model]:
        for path, answer in ask_all(server, routes, model).items():
            assert answer.status_code == 400, (path, answer.text)
            assert path == UNSUPPORTED or remedy in answer.text, (path, answer.text)


@pytest.mark.parametrize("model", ["damaged", "unread"])
def test_every_route_reports_a_model_that_fails_to_load(server: ServerProcess, model: str) -> None:
    is_read = model == "damaged"  # its tokenizer is valid, but its weights are truncated
    for path, answer in ask_all(server, DRAWING | EMBEDDING | RANKING, model).items():
        code = "unsupported_parameter" if is_read and path == UNSUPPORTED else "load_failed"
        assert code_of(answer) == code, (path, answer.text)
        assert f"/{model}" not in answer.text, path  # the error shows no file path
    for path, answer in ask_all(server, READING, model).items():
        assert answer.status_code == (200 if is_read else 500), path
    words = {"damaged": "model.safetensors of damaged is truncated", "unread": "valid vocab_size"}
    assert words[model] in "\n".join(server.lines)
    assert ask(server, "/v1/completions", DRAWING["/v1/completions"], "chat").status_code == 200
