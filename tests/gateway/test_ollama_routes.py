from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace import __version__
from headrace_common.config.settings import HttpConfig, ServerConfig
from tests.gateway.builders import FakeGeneration, app_of

CONFIG = ServerConfig(http=HttpConfig(allowed_host=("testserver",)))
CLIENT = TestClient(app_of(FakeGeneration(), CONFIG))


def test_an_unknown_ollama_route_lists_the_existing_ones() -> None:
    for path in ("/api/copy", "/api/chat/more", "/api"):
        answer = CLIENT.get(path)
        assert answer.status_code == 404 and answer.json()["code"] == "route_not_found"
        assert "/api/chat, " in answer.json()["error"] and "/v1/" not in answer.json()["error"]
    assert "/openapi.json" in CLIENT.get("/nope").json()["error"]["message"]


def test_models_are_listed_by_every_name_and_shown_by_one() -> None:
    version = CLIENT.get("/api/version").json()
    assert version["headrace"] == __version__
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # VS Code's and Raycast's
    entry, other = CLIENT.get("/api/tags").json()["models"]
    assert (entry["name"], other["model"], entry["size"]) == ("headrace-mini", "org/other", 4000)
    assert [it["name"] for it in CLIENT.get("/api/ps").json()["models"]] == [entry["name"]]
    shown = CLIENT.post("/api/show", json={"model": entry["name"]}).json()
    assert "completion" in shown["capabilities"]
    for named in ({"name": entry["name"]}, {"model": entry["name"] + ":latest"}):
        assert CLIENT.post("/api/show", json=named).json() == shown
    refused = CLIENT.post("/api/show", json={"model": "nope"})
    assert refused.status_code == 404 and "Model 'nope' was not found" in refused.json()["error"]


def test_the_only_model_is_kept_and_keep_alive_reported_as_ignored() -> None:
    answer = CLIENT.post("/api/generate", json={"model": "headrace-mini", "keep_alive": 0})
    assert answer.json()["done_reason"] == "unload"
    assert answer.headers["X-Headrace-Ignored"] == "keep_alive"


def test_embed_returns_one_vector_per_input() -> None:
    answer = CLIENT.post("/api/embed", json={"input": ["one", "two"]}).json()
    assert [len(vector) for vector in answer["embeddings"]] == [2, 2]
    assert answer["prompt_eval_count"] > 0


def test_the_older_embeddings_route_returns_one_vector() -> None:
    bare = CLIENT.post("/api/embed", json={"input": "one"}).json()["embeddings"]
    assert CLIENT.post("/api/embeddings", json={"prompt": "one"}).json() == {"embedding": bare[0]}


@pytest.mark.parametrize("given", [{"input": ""}, {"input": []}, {"input": None}, {}])
def test_an_empty_input_loads_the_model_and_has_no_vectors(given: dict[str, Any]) -> None:
    answer = CLIENT.post("/api/embed", json={"model": "headrace-mini:latest"} | given)
    assert answer.json() == {"model": "headrace-mini:latest", "embeddings": []}
    older = {"model": "headrace-mini", "prompt": given.get("input")}
    assert CLIENT.post("/api/embeddings", json=older).json() == {"embedding": []}
    for path in ("/api/embed", "/api/embeddings"):
        assert CLIENT.post(path, json={"model": "nope"} | given).status_code == 404
        assert CLIENT.post(path, json={"dimensions": "x"} | given).status_code == 400


@pytest.mark.parametrize(
    ("path", "given"), [("/v1/embeddings", []), ("/v1/embeddings", ""), ("/api/embed", [""])]
)
def test_other_empty_inputs_are_refused(path: str, given: Any) -> None:
    assert CLIENT.post(path, json={"model": "headrace-mini", "input": given}).status_code == 400
