"""Tests of models that a running server downloads from a fake hub and then serves."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.checkpoints.small_hub import COMMIT, SmallHub, small_hub
from tests.e2e.test_models import FLAGS, LIMIT_S, ask
from tools.harness.eventually import eventually
from tools.harness.gguf_files import to_gguf
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

ID, OTHER, GATED = "someone/small", "someone/other", "someone/gated"
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the hub's repositories: one model under three names, and a GGUF of the catalog."""
    root = tmp_path_factory.mktemp("hub")
    folder = make_tiny_model(root / "small")
    file = root / "gguf" / "Qwen3-0.6B-Q8_0.gguf"
    file.parent.mkdir()
    to_gguf(folder, file, "Q8_0")
    return {**dict.fromkeys((ID, OTHER, GATED), folder), "unsloth/Qwen3-0.6B-GGUF": file.parent}


@contextlib.contextmanager
def flowing(repos: dict[str, Path]) -> Iterator[SmallHub]:
    """Run a hub that resumes all downloads at the end, so that the server can stop."""
    with small_hub(repos) as running:
        try:
            yield running
        finally:
            running.flows.set()


@pytest.fixture
def hub(repos: dict[str, Path]) -> Iterator[SmallHub]:
    with flowing(repos) as running:
        yield running


class Shared(NamedTuple):
    """A server that started with one model, its hub, and the folder of its caches."""

    url: str
    hub: SmallHub
    home: Path


@pytest.fixture(scope="module")
def shared(repos: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    home = tmp_path_factory.mktemp("home")
    with flowing(repos) as hub, serving(hub, home, "--admin-key", "admin") as server:
        yield Shared(server.url, hub, home)


@contextlib.contextmanager
def serving(hub: SmallHub, home: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run a server with one model whose state and hub cache are in `home`."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub")}
    given = ("--state-dir", str(home / "state"), *FLAGS, *flags)
    with running_server(*given, environment=environment) as server:
        try:
            yield server
        except BaseException:
            print(*server.lines, sep="\n")
            raise


def pull(url: str, model: str = ID) -> httpx.Response:
    return httpx.post(f"{url}/models", json={"model": model}, headers=ADMIN, timeout=LIMIT_S)


def stop(url: str, model: str = ID) -> httpx.Response:
    return httpx.post(f"{url}/models/unload", json={"model": model}, headers=ADMIN, timeout=LIMIT_S)


def delete(url: str, model: str = ID) -> httpx.Response:
    return httpx.delete(f"{url}/models", params={"model": model}, headers=ADMIN, timeout=LIMIT_S)


def statuses(url: str) -> dict[str, Any]:
    entries = httpx.get(f"{url}/models", timeout=LIMIT_S).json()["data"]
    return {entry["id"]: entry["status"] for entry in entries}


def value(url: str, model: str = ID) -> str:
    return str(statuses(url).get(model, {}).get("value"))


def is_half_downloaded(url: str) -> bool:
    """Return whether the download has reached the point at which the hub pauses."""
    status = statuses(url)[ID]
    done, total = status.get("bytes_done", 0), status.get("bytes_total", 1)
    return 0.3 < done / total < 1


def fetchers() -> list[str]:
    """Return the ids of the processes that download."""
    found = subprocess.run(
        ["pgrep", "-f", f"checkpoints.fetch {ID}"], capture_output=True, text=True
    )
    return found.stdout.split()


def test_a_downloaded_model_is_served_next_to_the_first_one(shared: Shared) -> None:
    """Run first, while the shared server still serves a single model."""
    url, hub = shared.url, shared.hub
    assert httpx.get(f"{url}/props").json()["role"] == "model"
    hub.flows.clear()
    assert pull(url).json() == {"success": True}
    eventually(lambda: is_half_downloaded(url), LIMIT_S)
    status = statuses(url)[ID]
    assert status["value"] == "downloading"
    done, total = status["bytes_done"], status["bytes_total"]
    assert status["progress"] == {ID: {"done": done, "total": total}}
    assert ask(url, "headrace-mini").status_code == 200
    assert ask(url, ID).status_code == 404
    assert pull(url).json() == {"success": True}  # the download continues
    hub.flows.set()
    eventually(lambda: value(url) == "unloaded", LIMIT_S)
    assert ask(url, ID).json()["model"] == ID
    assert ask(url, "headrace-mini").json()["model"] == "headrace-mini"
    assert statuses(url)[ID]["value"] == statuses(url)["headrace-mini"]["value"] == "loaded"
    assert httpx.get(f"{url}/props").json()["role"] == "router"
    metrics = httpx.get(f"{url}/metrics", headers=ADMIN).text
    assert f'headrace_requests_total{{model="{ID}",outcome="finished"' in metrics
    folder = shared.home / "hub/hub" / f"models--{ID.replace('/', '--')}"
    assert (folder / "snapshots" / COMMIT / "model.safetensors").is_symlink()
    assert not list((folder / "blobs").glob("*.part"))


def test_a_catalog_model_is_pulled_by_its_short_name(shared: Shared) -> None:
    listed = httpx.get(f"{shared.url}/models/available", timeout=LIMIT_S).json()
    (entry,) = (it for it in listed["data"] if it["id"] == "qwen3-0.6b")
    assert entry["fits"] == (entry["memory_bytes"] <= listed["usable_bytes"])
    assert listed["usable_bytes"] == listed["memory_bytes"] * 3 // 4
    assert pull(shared.url, entry["id"]).json() == {"success": True}
    eventually(lambda: value(shared.url, "qwen3-0.6b") == "unloaded", within_s=LIMIT_S)
    assert ask(shared.url, "qwen3-0.6b").status_code == 200


def test_model_changes_are_sent_as_the_events_of_llama_cpps_router(shared: Shared) -> None:
    shared.hub.flows.clear()
    with contextlib.ExitStack() as undo:
        client = undo.enter_context(httpx.Client(timeout=LIMIT_S))
        answer = undo.enter_context(client.stream("GET", f"{shared.url}/models/sse"))
        data = (line for line in answer.iter_lines() if line.startswith("data: "))
        events = (json.loads(line.removeprefix("data: ")) for line in data)
        first = next(events)
        assert (first["model"], first["event"]) == ("headrace-mini", "model_status")
        assert first["data"] == {"status": "loaded"}

        def next_of(event: str) -> dict[str, Any]:
            found: dict[str, Any] = next(
                it for it in events if (it["model"], it["event"]) == (OTHER, event)
            )
            return found

        pull(shared.url, OTHER)
        assert next_of("download_progress")["data"][OTHER]["total"] > 0
        shared.hub.flows.set()
        next_of("download_finished")
        delete(shared.url, OTHER)
        next_of("model_remove")


def test_a_failed_pull_is_refused_at_once_with_advice(shared: Shared) -> None:
    url, hub = shared.url, shared.hub

    def refused(model: str) -> tuple[int, str, str]:
        answer = pull(url, model)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["message"]

    status, code, message = refused("someone/else")
    assert (status, code) == (404, "model_not_found") and "HF_TOKEN" in message
    status, code, message = refused(f"{GATED}:Q4_K_M")
    assert (status, code) == (404, "model_not_found") and "GGUF" in message
    status, code, message = refused("/etc/passwd")
    assert (status, code) == (400, "invalid_value") and "owner/name" in message
    hub.claims["model.safetensors"] = 1 << 50
    status, code, message = refused(OTHER)
    assert (status, code) == (500, "download_failed")
    assert "needs 1073741824 MiB more" in message and "HF_HOME" in message
    hub.token = "hf_secret"
    status, code, message = refused(GATED)
    assert (status, code) == (403, "download_denied") and "HF_TOKEN" in message
    hub.token = None
    hub.claims.clear()
    assert pull(url, GATED).status_code == 200
    assert delete(url, "headrace-mini").json()["error"]["code"] == "unsupported_operation"
    assert delete(url, "nobody").status_code == 404
    assert statuses(url)[OTHER]["failed"] is True
    document = {"models": [{"model": "x"}]}
    refused_document = httpx.put(f"{url}/manage/desired", json=document, headers=ADMIN)
    assert refused_document.json()["error"]["code"] == "unsupported_operation"


def test_downloads_and_deletions_need_the_admin_key(shared: Shared) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        for method in ("POST", "DELETE"):
            answer = httpx.request(
                method, f"{shared.url}/models", params={"model": ID}, headers=headers
            )
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_an_interrupted_download_resumes_after_kills(hub: SmallHub, tmp_path: Path) -> None:
    weights = (hub.repos[ID] / "model.safetensors").stat().st_size
    with serving(hub, tmp_path) as server:
        pull(server.url, OTHER)
        eventually(lambda: value(server.url, OTHER) == "unloaded", LIMIT_S)
        hub.flows.clear()
        hub.starts.clear()
        pull(server.url)
        eventually(lambda: is_half_downloaded(server.url), LIMIT_S)
        server.stop(signal.SIGKILL)
        eventually(lambda: not fetchers(), LIMIT_S)  # the fetcher exits with its server
    with serving(hub, tmp_path, f"--alias=gpt-*={OTHER}") as again:
        # The restarted server resumes the download by itself.
        eventually(lambda: is_half_downloaded(again.url), LIMIT_S)
        assert value(again.url) == "downloading"
        assert httpx.get(f"{again.url}/health").json()["status"] == "ok"
        assert ask(again.url, "gpt-5").json()["model"] == "gpt-5"  # still served
        (pid,) = fetchers()
        os.kill(int(pid), signal.SIGKILL)
        eventually(lambda: value(again.url) == "unloaded", LIMIT_S)
        assert "was killed" in statuses(again.url)[ID]["error"]["message"]
        hub.flows.set()
        assert pull(again.url).status_code == 200
        eventually(lambda: ask(again.url, ID).status_code == 200, LIMIT_S)
    assert hub.starts[0] == 0 and len(hub.starts) >= 3
    assert min(hub.starts[1:]) > 0.4 * weights, "the download must resume where it stopped"


@pytest.mark.slow
def test_a_stopped_download_stays_stopped_until_it_is_pulled_again(
    hub: SmallHub, tmp_path: Path
) -> None:
    hub.flows.clear()
    with serving(hub, tmp_path) as server:
        pull(server.url)
        eventually(lambda: is_half_downloaded(server.url), LIMIT_S)
        assert stop(server.url).json() == {"success": True}
        assert value(server.url) == "stopped" and not fetchers()
    with serving(hub, tmp_path) as again:
        assert value(again.url) == "stopped" and not fetchers()
        hub.flows.set()
        pull(again.url)
        eventually(lambda: value(again.url) == "unloaded", LIMIT_S)
        assert delete(again.url).json() == {"success": True}
        eventually(lambda: ID not in statuses(again.url), LIMIT_S)
        eventually(lambda: not list((tmp_path / "hub").glob("hub/models--*")), LIMIT_S)
        assert ask(again.url, ID).status_code == 404
