"""Tests the lists of models in the formats of different clients."""

from typing import Any

import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient

from headrace_common.config.settings import HttpConfig, ServerConfig
from tests.gateway.builders import READY, FakeGeneration, FakeModel, app_of

ANTHROPIC = {"anthropic-version": "2023-06-01"}
NAMES = ["headrace-mini", "org/other"]
LIMITS = ("context_length", "context_window", "max_context_length")
CODEX_NEEDS = {
    "slug", "display_name", "description", "supported_reasoning_levels", "shell_type", "visibility",
    "supported_in_api", "priority", "upgrade", "base_instructions", "supports_reasoning_summaries",
    "support_verbosity", "default_verbosity", "apply_patch_tool_type", "truncation_policy",
    "supports_parallel_tool_calls", "experimental_supported_tools", "availability_nux",
}  # fmt: skip
"""The fields of an entry that Codex 0.63 to 0.169 requires."""


def client_of(generation: FakeGeneration | None = None, **http: Any) -> TestClient:
    config = ServerConfig(http=HttpConfig(**http))
    app = app_of(generation or FakeGeneration(), config)
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def unread() -> FakeGeneration:
    """Return a fake generation whose model was never read."""
    generation = FakeGeneration()
    host = generation.fleet.hosts.first
    host.known, host.ready = None, None  # type: ignore[assignment]
    return generation


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_each_model_lists_its_context_length_under_the_usual_names(path: str) -> None:
    for entry in client_of().get(path).json()["data"]:
        assert [entry[name] for name in LIMITS] == [128, 128, 128]
        assert entry["max_model_len"] == 128
    one = client_of().get("/v1/models/org/other").json()
    assert one["context_window"] == 128


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_an_unread_model_is_listed_without_its_context_length(path: str) -> None:
    listed = client_of(unread()).get(path).json()
    for entry in listed["data"]:
        assert not entry.keys() & set(LIMITS)
    for entry in listed["models"]:
        assert "context_window" not in entry and "input_modalities" not in entry


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models?client_version=0.169.0"])
def test_the_catalog_for_codex_has_every_field_that_it_requires(path: str) -> None:
    models = client_of().get(path).json()["models"]
    assert [entry["slug"] for entry in models] == NAMES
    for place, entry in enumerate(models):
        assert entry.keys() >= CODEX_NEEDS
        assert entry["context_window"] == entry["max_context_window"] == 128
        assert entry["input_modalities"] == ["text"] and entry["priority"] == place
        assert entry["truncation_policy"] == {"mode": "tokens", "limit": 32}
        assert entry["supports_parallel_tool_calls"] and entry["base_instructions"]


def test_a_model_that_generates_no_text_is_not_in_the_catalog_for_codex() -> None:
    embeds = FakeModel(ready=replace(READY, tasks=("embed",)))
    listed = client_of(FakeGeneration(model=embeds)).get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == NAMES and listed["models"] == []


def test_anthropics_clients_get_models_in_their_own_shape() -> None:
    client = client_of()
    listed = client.get("/v1/models", headers=ANTHROPIC).json()
    assert {**listed, "data": None} == {
        "data": None, "first_id": NAMES[0], "last_id": NAMES[1], "has_more": False,
    }  # fmt: skip
    assert listed["data"][1] == {
        "type": "model",
        "id": "org/other",
        "display_name": "org/other",
        "created_at": "2026-09-21T14:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 128,
        "max_tokens": 128,
    }
    assert client.get("/v1/models/org/other", headers=ANTHROPIC).json() == listed["data"][1]
    unknown = client_of(unread()).get("/v1/models", headers=ANTHROPIC).json()["data"][0]
    assert (unknown["created_at"], unknown["max_tokens"]) == ("1970-01-01T00:00:00Z", None)


def test_anthropics_clients_get_the_list_in_pages() -> None:
    client = client_of()

    def ids(**query: Any) -> tuple[list[str], bool]:
        page = client.get("/v1/models", headers=ANTHROPIC, params=query).json()
        return [entry["id"] for entry in page["data"]], page["has_more"]

    assert ids(limit=1) == (NAMES[:1], True)
    assert ids(limit=1, after_id=NAMES[0]) == (NAMES[1:], False)
    assert ids(limit=1, before_id=NAMES[1]) == (NAMES[:1], False)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/models/claude", 404, "not_found_error"),
        ("/v1/models?limit=x", 400, "invalid_request_error"),
        ("/v1/models?after_id=nobody", 400, "invalid_request_error"),
    ],
)
def test_anthropics_clients_get_errors_in_their_own_shape(
    path: str, status: int, kind: str
) -> None:
    answer = client_of().get(path, headers=ANTHROPIC)
    assert (answer.status_code, answer.json()["type"]) == (status, "error")
    assert answer.json()["error"]["type"] == kind
    assert answer.headers["request-id"] == answer.json()["request_id"]


def test_a_missing_key_is_refused_in_the_clients_own_shape() -> None:
    client = client_of(api_key=("k",))
    refused = client.get("/v1/models", headers=ANTHROPIC).json()
    assert refused["error"]["type"] == "authentication_error"
    assert "request_id" not in client.get("/v1/models").json()
