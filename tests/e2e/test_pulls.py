"""Models that a running server downloads, over a small hub of our own, and then serves."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints.small_hub import COMMIT, SmallHub, small_hub
from tests.e2e.test_models import FLAGS, LIMIT_S, ask
from tools.harness.eventually import eventually
from tools.harness.gguf_files import to_gguf
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

ID = "someone/small"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hub") / "small")


@pytest.fixture
def hub(repo: Path) -> Iterator[SmallHub]:
    with small_hub({ID: repo, "someone/other": repo}) as running:
        try:
            yield running
        finally:
            running.flows.set()


@contextlib.contextmanager
def serving(hub: SmallHub, home: Path, *flags: str) -> Iterator[ServerProcess]:
    """A server that began with one model, with its state and its hub's cache in `home`."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub")}
    given = ("--state-dir", str(home / "state"), *FLAGS, *flags)
    with running_server(*given, environment=environment) as server:
        try:
            yield server
        except BaseException:
            print(*server.lines, sep="\n")
            raise


def pull(url: str, model: str = ID) -> httpx.Response:
    return httpx.post(f"{url}/models", json={"model": model}, timeout=LIMIT_S)


def stop(url: str, model: str = ID) -> httpx.Response:
    return httpx.post(f"{url}/models/unload", json={"model": model}, timeout=LIMIT_S)


def delete(url: str, model: str = ID) -> httpx.Response:
    return httpx.delete(f"{url}/models", params={"model": model}, timeout=LIMIT_S)


def statuses(url: str) -> dict[str, Any]:
    entries = httpx.get(f"{url}/models", timeout=LIMIT_S).json()["data"]
    return {entry["id"]: entry["status"] for entry in entries}


def value(url: str, model: str = ID) -> str:
    return str(statuses(url).get(model, {}).get("value"))


def is_half_here(url: str) -> bool:
    """Whether the weights have come as far as they do while the hub does not flow."""
    status = statuses(url)[ID]
    done, total = status.get("bytes_done", 0), status.get("bytes_total", 1)
    return 0.3 < done / total < 1


def fetchers() -> list[str]:
    """Processes that download."""
    found = subprocess.run(
        ["pgrep", "-f", f"checkpoints.fetch {ID}"], capture_output=True, text=True
    )
    return found.stdout.split()


def test_a_model_of_the_catalog_is_pulled_by_its_short_name(repo: Path, tmp_path: Path) -> None:
    file = tmp_path / "gguf" / "Qwen3-0.6B-Q8_0.gguf"
    file.parent.mkdir()
    to_gguf(repo, file, "Q8_0")
    repos = {"unsloth/Qwen3-0.6B-GGUF": file.parent}
    with small_hub(repos) as other, serving(other, tmp_path) as server:
        listed = httpx.get(f"{server.url}/models/available", timeout=LIMIT_S).json()
        (entry,) = (it for it in listed["data"] if it["id"] == "qwen3-0.6b")
        assert entry["fits"] == (entry["memory_bytes"] <= listed["memory_bytes"])
        assert pull(server.url, entry["id"]).json() == {"success": True}
        eventually(lambda: value(server.url, "qwen3-0.6b") == "unloaded", within_s=LIMIT_S)
        assert ask(server.url, "qwen3-0.6b").status_code == 200


def test_a_model_is_downloaded_and_served_beside_the_one_that_was_there(
    hub: SmallHub, tmp_path: Path
) -> None:
    with serving(hub, tmp_path) as server:
        url = server.url
        assert httpx.get(f"{url}/props").json()["role"] == "model"
        hub.flows.clear()
        assert pull(url).json() == {"success": True}
        eventually(lambda: is_half_here(url), LIMIT_S)
        status = statuses(url)[ID]
        assert status["value"] == "downloading"
        done, total = status["bytes_done"], status["bytes_total"]
        assert status["progress"] == {ID: {"done": done, "total": total}}
        assert ask(url, "headrace-mini").status_code == 200
        assert ask(url, ID).status_code == 404
        assert pull(url).json() == {"success": True}  # it goes on
        hub.flows.set()
        eventually(lambda: value(url) == "unloaded", LIMIT_S)
        assert ask(url, ID).json()["model"] == ID
        assert ask(url, "headrace-mini").json()["model"] == "headrace-mini"
        assert statuses(url)[ID]["value"] == statuses(url)["headrace-mini"]["value"] == "loaded"
        assert httpx.get(f"{url}/props").json()["role"] == "router"
        figures = httpx.get(f"{url}/metrics").text
        assert f'headrace_requests_total{{model="{ID}",outcome="finished"' in figures
    (folder,) = (tmp_path / "hub/hub").glob("models--*")
    assert (folder / "snapshots" / COMMIT / "model.safetensors").is_symlink()
    assert not list((folder / "blobs").glob("*.part"))
    with serving(hub, tmp_path, f"--alias=gpt-*={ID}") as again:  # it is still there
        assert ask(again.url, ID).json()["model"] == ID
        assert ask(again.url, "gpt-5").json()["model"] == "gpt-5"
        assert httpx.get(f"{again.url}/health").json()["status"] == "ok"


def test_a_download_that_was_cut_by_kills_goes_on_where_it_stopped(
    hub: SmallHub, tmp_path: Path
) -> None:
    weights = (hub.repos[ID] / "model.safetensors").stat().st_size
    hub.flows.clear()
    with serving(hub, tmp_path) as server:
        pull(server.url)
        eventually(lambda: is_half_here(server.url), LIMIT_S)
        server.stop(signal.SIGKILL)
        eventually(lambda: not fetchers(), LIMIT_S)  # it ends with its server
    with serving(hub, tmp_path) as again:  # without being asked
        eventually(lambda: is_half_here(again.url), LIMIT_S)
        assert value(again.url) == "downloading"
        (pid,) = fetchers()
        os.kill(int(pid), signal.SIGKILL)
        eventually(lambda: value(again.url) == "unloaded", LIMIT_S)
        assert "was killed" in statuses(again.url)[ID]["error"]["message"]
        hub.flows.set()
        assert pull(again.url).status_code == 200
        eventually(lambda: ask(again.url, ID).status_code == 200, LIMIT_S)
    assert hub.starts[0] == 0 and len(hub.starts) >= 3
    assert min(hub.starts[1:]) > 0.4 * weights, "what had come is not sent again"


@pytest.mark.slow
def test_a_stopped_download_stays_stopped_until_it_is_asked_for(
    hub: SmallHub, tmp_path: Path
) -> None:
    hub.flows.clear()
    with serving(hub, tmp_path) as server:
        pull(server.url)
        eventually(lambda: is_half_here(server.url), LIMIT_S)
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


def test_what_cannot_be_had_is_told_at_once_with_its_remedy(hub: SmallHub, tmp_path: Path) -> None:
    with serving(hub, tmp_path) as server:

        def refused(model: str) -> tuple[int, str, str]:
            answer = pull(server.url, model)
            error = answer.json()["error"]
            return answer.status_code, error["code"], error["message"]

        status, code, message = refused("someone/else")
        assert (status, code) == (404, "model_not_found") and "HF_TOKEN" in message
        status, code, message = refused(f"{ID}:Q4_K_M")
        assert (status, code) == (404, "model_not_found") and "GGUF" in message
        status, code, message = refused("/etc/passwd")
        assert (status, code) == (400, "invalid_value") and "owner/name" in message
        hub.claims["model.safetensors"] = 1 << 50
        status, code, message = refused("someone/other")
        assert (status, code) == (500, "download_failed")
        assert "needs 1073741824 MiB more" in message and "HF_HOME" in message
        hub.token = "hf_secret"
        status, code, message = refused(ID)
        assert (status, code) == (403, "download_denied") and "HF_TOKEN" in message
        hub.token = None
        hub.claims.clear()
        assert pull(server.url).status_code == 200
        assert (
            delete(server.url, "headrace-mini").json()["error"]["code"] == "unsupported_operation"
        )
        assert delete(server.url, "nobody").status_code == 404
        assert statuses(server.url)["someone/other"]["failed"] is True
        told = httpx.put(f"{server.url}/manage/desired", json={"models": [{"model": "x"}]})
        assert told.json()["error"]["code"] == "unsupported_operation"


def test_without_the_hub_the_message_says_so(repo: Path, tmp_path: Path) -> None:
    with small_hub({}) as gone:
        pass
    with serving(gone, tmp_path) as server:
        answer = pull(server.url)
        assert answer.status_code == 404
        assert "HF_ENDPOINT" in answer.json()["error"]["message"]


def test_the_list_is_told_as_events_of_llama_cpps_router(hub: SmallHub, tmp_path: Path) -> None:
    hub.flows.clear()
    with contextlib.ExitStack() as undo:
        url = undo.enter_context(serving(hub, tmp_path)).url
        client = undo.enter_context(httpx.Client(timeout=LIMIT_S))
        answer = undo.enter_context(client.stream("GET", f"{url}/models/sse"))
        data = (line for line in answer.iter_lines() if line.startswith("data: "))
        events = (json.loads(line.removeprefix("data: ")) for line in data)
        first = next(events)
        assert (first["model"], first["event"]) == ("headrace-mini", "model_status")
        assert first["data"] == {"status": "loaded"}
        heard: list[dict[str, Any]] = []

        def hear(event: str) -> dict[str, Any]:
            heard.append(next(events))
            while heard[-1]["event"] != event:
                heard.append(next(events))
            return heard[-1]

        pull(url)
        assert hear("download_progress")["data"][ID]["total"] > 0
        hub.flows.set()
        hear("download_finished")
        delete(url)
        hear("model_remove")
    assert {event["model"] for event in heard} == {ID}


def test_the_admin_key_alone_downloads_and_deletes(hub: SmallHub, tmp_path: Path) -> None:
    keys = ("--api-key", "client", "--admin-key", "admin")
    with serving(hub, tmp_path, *keys) as server:
        for key, status in (("client", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": ID}
            answer = httpx.post(f"{server.url}/models", json=body, headers=headers, timeout=LIMIT_S)
            assert answer.status_code == status
        assert pull(server.url).status_code == 401
