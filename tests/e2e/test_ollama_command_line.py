"""Tests with the requests of Ollama's command line, taken from its source code.

The bodies have all the fields that its Go types always write. Some response fields are read
without a check, so the command would crash if they were missing.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_encoder

LIMIT_S = 60
AGENT = {"User-Agent": "ollama/0.30.0 (amd64 linux) Go/go1.26", "Accept": "application/json"}
NAMED = {"system": "", "template": "", "verbose": False, "options": None}
GENERATE = {"prompt": "", "suffix": "", "system": "", "template": "", "options": None}
FIGURES = (
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    bert = make_tiny_encoder(tmp_path_factory.mktemp("models") / "bert")
    models = ("--model=mini=headrace-mini", f"--model=bert={bert}")
    with running_server(*models, "--threads", "1", "--max-model-len", "512") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """Yield a client; every command first checks that the server responds."""
    with httpx.Client(base_url=server.url, headers=AGENT, timeout=LIMIT_S) as client:
        assert client.head("/").status_code == 200
        assert client.get("/api/version").json()["version"]
        yield client


def by_name(name: str, is_older: bool) -> dict[str, str]:
    """Return the two fields for a model's name, of which one is empty."""
    return {"model": "", "name": name} if is_older else {"model": name, "name": ""}


def show(client: httpx.Client, name: str, is_older: bool = False) -> httpx.Response:
    return client.post("/api/show", json=by_name(name, is_older) | NAMED)


def lines(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json=body, headers={"Accept": "application/x-ndjson"})
    assert answer.status_code == 200, answer.text
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert not any(line.get("error") for line in found)
    return found


def stop(client: httpx.Client, name: str) -> None:
    assert lines(client, "/api/generate", model=name, **GENERATE, keep_alive="0s")[-1]["done"]


def listed(client: httpx.Client, path: str) -> dict[str, dict[str, Any]]:
    """Return the models of `ollama ls` or `ollama ps`, with the fields of both checked."""
    found = {}
    for model in client.get(path).json()["models"]:
        assert model["digest"][:12] and type(model["size"]) is int
        assert datetime.fromisoformat(model["modified_at"]) <= datetime.now(UTC)
        found[model["name"]] = model
    return found


def test_ls_lists_every_model(client: httpx.Client) -> None:
    assert set(listed(client, "/api/tags")) == {"mini", "bert"}


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("name", ["mini", "mini:latest", "bert"])
def test_show_prints_a_model(client: httpx.Client, name: str, is_older: bool) -> None:
    shown = show(client, name, is_older).json()
    info, arch = shown["model_info"], shown["model_info"]["general.architecture"]
    for field in ("general.parameter_count", f"{arch}.context_length", f"{arch}.embedding_length"):
        assert type(info[field]) is int and info[field] > 0
    assert shown["details"]["quantization_level"] and shown["details"]["parameter_size"]
    assert datetime.fromisoformat(shown["modified_at"])
    assert ("embedding" in shown["capabilities"]) == (name == "bert")
    assert "remote_host" not in shown and "projector_info" not in shown


@pytest.mark.parametrize("think", [None, True, False, "max"])
def test_run_answers_a_prompt(client: httpx.Client, think: Any) -> None:
    assert show(client, "mini").status_code == 200
    loaded = lines(client, "/api/generate", model="mini", **GENERATE, think=think)[-1]
    assert loaded["done"] and loaded["done_reason"] == "load"
    running = listed(client, "/api/ps")["mini"]
    assert running["context_length"] == 512 and running["size_vram"] == 0
    assert datetime.fromisoformat(running["expires_at"]) > datetime.now(UTC)
    asked = GENERATE | {"prompt": "Count from 1 to 5.", "options": {}, "context": []}
    *parts, last = lines(client, "/api/generate", model="mini", **asked, think=think)
    assert "".join(part["response"] for part in parts) and last["done"]
    assert all(type(last[name]) is int for name in FIGURES)
    messages = [{"role": "user", "content": "Count from 1 to 5."}]
    *parts, last = lines(client, "/api/chat", model="mini", messages=messages, options={})
    assert {part["message"]["role"] for part in parts} == {"assistant"} and last["done"]


def test_stop_frees_the_memory(client: httpx.Client) -> None:
    lines(client, "/api/generate", model="mini", **GENERATE)
    stop(client, "mini")
    eventually(lambda: listed(client, "/api/ps") == {})


def test_run_of_an_embedding_model_prints_a_vector(client: httpx.Client) -> None:
    answer = client.post("/api/embed", json={"model": "bert", "input": "Hi", "options": None})
    assert len(answer.json()["embeddings"][0]) > 1
    stop(client, "bert")


@pytest.mark.parametrize("is_older", [False, True])
def test_an_unknown_model_is_not_found_and_its_pull_is_refused(
    client: httpx.Client, is_older: bool
) -> None:
    assert show(client, "nope", is_older).status_code == 404  # `run` then pulls
    pull = by_name("nope", is_older) | {"username": "", "password": ""}
    refused = client.post("/api/pull", json=pull)  # ids on the hub have an owner
    assert refused.status_code == 400 and "hub" in refused.json()["error"]
    answers = [client.request("DELETE", "/api/delete", json=by_name("nope", is_older))]
    answers += [client.post("/api/generate", json=GENERATE | {"model": "nope", "keep_alive": "0s"})]
    for answer in answers:
        assert answer.status_code >= 400 and "nope" in answer.json()["error"]


def test_a_body_that_names_no_model_is_refused(client: httpx.Client) -> None:
    for path, method in (("show", "POST"), ("pull", "POST"), ("delete", "DELETE")):
        answer = client.request(method, f"/api/{path}", json={"model": "", "name": ""})
        assert answer.status_code == 400 and "model" in answer.json()["error"]
