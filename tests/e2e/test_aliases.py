"""Tests of model aliases over HTTP: every route accepts them and echoes the name it was sent."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.batch_lines import in_lines, line, results
from tests.e2e.test_every_route import DRAWING, EMBEDDING, LIMIT_S, RANKING, READING, ask
from tests.e2e.test_realtime import open_socket
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_encoder, make_tiny_model

NAMES = {"claude-sonnet-4-5": "talks", "gpt-4o": "talks", "ada": "vectors", "rank[1]-x": "ranks"}
"""Model names that clients send, and the model that serves each."""
ALIASES = ("claude-*=talks", "gpt-4o=talks", "ada=vectors", "rank[1]*=ranks", "ranks=talks")
EMBEDDING_ONE = {"/api/embeddings": {"prompt": "one"}}
ROUTES = {
    **{path: (body, "talks") for path, body in {**DRAWING, **READING}.items()},
    **{path: (body, "vectors") for path, body in {**EMBEDDING, **EMBEDDING_ONE}.items()},
    **{path: (body, "ranks") for path, body in RANKING.items()},
    "/api/show": ({}, "talks"),
    "/models/load": ({}, "talks"),
}
CASES = [
    (path, body, alias, model)
    for path, (body, model) in ROUTES.items()
    for alias, meant in NAMES.items()
    if meant == model
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_tiny_encoder(root / "ranks", "BertForSequenceClassification")  # sorts first
    make_tiny_model(root / "talks")
    make_tiny_encoder(root / "vectors")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    flags = ("--threads", "1", "--kv-cache-memory-bytes", str(16 << 20))
    aliases = [f"--alias={alias}" for alias in ALIASES]
    with running_server("--models-dir", str(root), *flags, *aliases) as running:
        yield running


def model_in(answer: httpx.Response) -> Any:
    """Return the answer's `model` field, which not every route has."""
    return answer.json().get("model")


@pytest.mark.parametrize(("path", "body", "alias", "model"), CASES)
def test_a_route_answers_the_same_to_an_alias_and_to_the_model_name(
    server: ServerProcess, path: str, body: dict[str, Any], alias: str, model: str
) -> None:
    own, other = ask(server, path, body, model), ask(server, path, body, alias)
    assert other.status_code == own.status_code, other.text
    assert own.is_success or path == "/infill"  # the tiny model has no infill tokens
    assert model_in(other) == (alias if model_in(own) == model else None)


@pytest.mark.parametrize("path", ["/props", "/slots", "/tokenizer_info"])
def test_the_model_query_parameter_accepts_an_alias(server: ServerProcess, path: str) -> None:
    own, other = (
        httpx.get(f"{server.url}{path}", params={"model": name}) for name in ("talks", "gpt-4o")
    )
    assert own.is_success and other.json() == own.json()


def test_streams_name_the_alias_in_every_chunk(server: ServerProcess) -> None:
    body = {"model": "claude-x", "prompt": "one", "max_tokens": 3, "stream": True}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S).text
    chunks = [json.loads(it[6:]) for it in text.splitlines() if it.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"claude-x"}


def test_a_stored_response_keeps_the_alias(server: ServerProcess) -> None:
    body = {"input": "one", "max_output_tokens": 2, "store": True}
    made = ask(server, "/v1/responses", body, "gpt-4o").json()
    found = httpx.get(f"{server.url}/v1/responses/{made['id']}").json()
    assert made["model"] == found["model"] == "gpt-4o"
    more = {"input": "two", "max_output_tokens": 2, "previous_response_id": made["id"]}
    assert ask(server, "/v1/responses", more, "claude-x").json()["model"] == "claude-x"


def test_a_websocket_accepts_an_alias(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        socket.ask("1", {"model": "gpt-4o", "prompt": "one", "max_tokens": 2})
        assert socket.end("1")["kind"] == "finish"
        assert socket.event("1", "accepted")["model"] == "gpt-4o"


def test_a_batch_line_accepts_an_alias(server: ServerProcess) -> None:
    http = httpx.Client(base_url=server.url, timeout=LIMIT_S)
    lines = [line("1", {"model": "gpt-4o", "prompt": "one", "max_tokens": 2}, "/v1/completions")]
    files = {"file": ("lines.jsonl", in_lines(lines))}
    file = http.post("/v1/files", data={"purpose": "batch"}, files=files).json()
    wish = {"input_file_id": file["id"], "completion_window": "24h", "endpoint": "/v1/completions"}
    id = http.post("/v1/batches", json=wish).json()["id"]
    eventually(lambda: http.get(f"/v1/batches/{id}").json()["status"] == "completed", LIMIT_S)
    output = http.get(f"/v1/batches/{id}").json()["output_file_id"]
    (answer,) = results(http.get(f"/v1/files/{output}/content").content)
    assert answer["response"]["body"]["model"] == "gpt-4o"


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_model_lists_include_aliases_with_their_model_but_no_patterns(
    server: ServerProcess, path: str
) -> None:
    listed = httpx.get(f"{server.url}{path}").json()
    shown = {entry["id"]: entry.get("alias_of") for entry in listed["data"]}
    assert shown == {
        "ranks": None, "talks": None, "vectors": None, "gpt-4o": "talks", "ada": "vectors",
    }  # fmt: skip
    one = httpx.get(f"{server.url}/v1/models/claude-x").json()
    assert (one["id"], one["alias_of"]) == ("claude-x", "talks")
    assert "gpt-4o" in {it["name"] for it in httpx.get(f"{server.url}/api/tags").json()["models"]}
    headers = {"anthropic-version": "2023-06-01"}
    entries = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
    assert "gpt-4o (talks)" in {entry["display_name"] for entry in entries}


def test_an_unknown_name_is_refused_with_a_list_of_models_and_aliases(
    server: ServerProcess,
) -> None:
    refused = ask(server, "/v1/completions", {"prompt": "one"}, "gpt-5").json()["error"]
    assert refused["code"] == "model_not_found"
    assert refused["message"].endswith("This server has: ranks, talks, vectors, gpt-4o, ada.")


def test_a_model_added_later_takes_precedence_over_an_alias_until_it_is_removed(
    server: ServerProcess, root: Path
) -> None:
    assert ask(server, "/tokenize", {"content": "one"}, "claude-new").is_success
    shutil.copytree(root / "talks", root / "claude-new")

    def is_answered_by_itself() -> bool:
        asked = {"prompt": "one", "max_tokens": 1}
        ask(server, "/v1/completions", asked, "claude-new").raise_for_status()
        return "claude-new" in {
            entry["id"] for entry in httpx.get(f"{server.url}/v1/models").json()["data"]
        }

    eventually(is_answered_by_itself, LIMIT_S)
    one = httpx.get(f"{server.url}/v1/models/claude-new").json()
    assert (one["root"], "alias_of" in one) == ("claude-new", False)
    shutil.rmtree(root / "claude-new")

    def alias_of() -> Any:
        httpx.get(f"{server.url}/models")  # reads the folder again
        return httpx.get(f"{server.url}/v1/models/claude-new").json().get("alias_of")

    eventually(lambda: alias_of() == "talks", LIMIT_S)
