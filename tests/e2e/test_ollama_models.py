"""Tests of clients of Ollama's API that list several models before any is loaded."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_encoder, make_tiny_model

LIMIT_S = 60
ADMIN = {"X-Api-Key": "the-admin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    models = {
        "mini": "headrace-mini",
        "tiny": make_tiny_model(root / "tiny"),
        "bert": make_tiny_encoder(root / "bert"),
    }
    given = [f"--model={name}={folder}" for name, folder in models.items()]
    keys = ("--api-key", "a-client")
    environment = {"HEADRACE_ADMIN_KEY": ADMIN["X-Api-Key"]}
    flags = ("--threads", "1", "--max-model-len", "512", *keys)
    with running_server(*given, *flags, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=ADMIN, timeout=LIMIT_S) as client:
        yield client


def loaded(client: httpx.Client) -> list[str]:
    return [it["name"] for it in client.get("/api/ps").json()["models"]]


def seen_by_vscode(client: httpx.Client) -> dict[str, dict[str, Any]]:
    """Ask as VS Code's Copilot Chat does, and return the fields that it reads."""
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    found = {}
    for listed in client.get("/api/tags").json()["models"]:
        shown = client.post("/api/show", json={"model": listed["model"]}).json()
        info = shown["model_info"]
        length = info.get(f"{info['general.architecture']}.context_length", 4096)
        found[listed["model"]] = {
            "name": info["general.basename"],
            "context": length,
            "tools": "tools" in shown["capabilities"],
            "vision": "vision" in shown["capabilities"],
        }
    return found


def test_vscode_finds_name_context_and_capabilities_without_loading_a_model(
    client: httpx.Client,
) -> None:
    found = seen_by_vscode(client)
    assert found["mini"] == {"name": "mini", "context": 512, "tools": True, "vision": False}
    assert found["tiny"]["context"] == 512 and found["bert"]["name"] == "bert"
    assert loaded(client) == []


def test_lm_studios_clients_find_types_and_context_lengths_without_loading_a_model(
    client: httpx.Client,
) -> None:
    listed = client.get("/api/v0/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["mini", "tiny", "bert"]
    found = {name: client.get(f"/api/v0/models/{name}").json() for name in ("mini", "bert")}
    assert (found["mini"]["type"], found["bert"]["type"]) == ("llm", "embeddings")
    for entry in (*listed["data"], *found.values()):
        # Zed refuses the whole list if it does not know one of these values.
        assert entry["compatibility_type"] in ("gguf", "mlx") and entry["state"] == "not-loaded"
        assert entry["object"] == "model" and entry["publisher"] == ""
        assert "loaded_context_length" not in entry
    assert found["mini"]["max_context_length"] == 512
    assert found["mini"]["capabilities"] == ["tool_use"] and found["mini"]["quantization"]
    missing = client.get("/api/v0/models/other/name")
    assert missing.status_code == 404 and "mini" in missing.json()["error"]
    assert loaded(client) == []


def test_raycast_finds_sizes_and_capabilities_without_loading_a_model(
    client: httpx.Client,
) -> None:
    capabilities = {}
    for listed in client.get("/api/tags").json()["models"]:
        shown = client.post("/api/show", json={"name": listed["name"]}).json()
        capabilities[listed["name"]] = shown["capabilities"]
        assert shown["details"]["parameter_size"] and shown["details"]["quantization_level"]
        assert listed["size"] > 0 and len(listed["digest"]) == 64
    assert "tools" in capabilities["mini"] and capabilities["bert"] == ["embedding"]
    # The list includes capabilities once /api/show has read them.
    listed = {it["name"]: it for it in client.get("/api/tags").json()["models"]}
    assert {name: it["capabilities"] for name, it in listed.items()} == capabilities
    assert listed["mini"]["details"]["parameter_size"] == "1.60M"
    counts = {it["id"]: it["meta"]["n_params"] for it in client.get("/v1/models").json()["data"]}
    assert 1_590_000 < counts["mini"] < 1_610_000 and all(counts.values())
    assert loaded(client) == []


def test_an_empty_request_loads_or_unloads_a_model(
    client: httpx.Client,
) -> None:
    for path, nothing in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        asked = {"model": "mini:latest", "stream": False, **nothing}
        done = client.post(path, json=asked | {"keep_alive": -1}).json()
        assert (done["done"], done["done_reason"]) == (True, "load")
        (shown,) = client.get("/api/ps").json()["models"]
        assert shown["name"] == "mini" and shown["expires_at"] > shown["modified_at"]
        done = client.post(path, json=asked | {"keep_alive": 0}).json()
        assert (done["done"], done["done_reason"]) == (True, "unload")
        eventually(lambda: loaded(client) == [])


def test_unloading_needs_the_admin_key_and_a_known_model(client: httpx.Client) -> None:
    key = {"X-Api-Key": "a-client"}
    refused = client.post("/api/generate", json={"model": "mini", "keep_alive": 0}, headers=key)
    assert refused.status_code == 403 and "admin key" in refused.json()["error"]
    refused = client.post("/api/generate", json={"model": "nope", "keep_alive": "0s"})
    assert refused.status_code == 404 and "Model 'nope' was not found" in refused.json()["error"]
