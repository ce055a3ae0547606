"""Tests of several models on one server, which are loaded on demand.

`make test-models` runs all tests; the suite skips those that load many models.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import Client
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_in, data_of
from tools.harness.tiny_models import make_tiny_model

ASKED = {"prompt": "one two", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
FLAGS = (
    *("--threads", "1", "--max-model-len", "512", "--kv-cache-memory-bytes", str(16 << 20)),
    *("--heartbeat-s", "1"),
)
LIMIT_S = 60
many_loads = pytest.mark.skipif("MANY_LOADS" not in os.environ, reason="make test-models")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: make_tiny_model(root / name) for name in ("a", "b")}
    (root / "bad").mkdir()
    (root / "bad" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    return found | {"bad": root / "bad"}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    given = [f"--model={name}={folder}" for name, folder in folders.items()]
    with running_server(*given, "--max-models", "1", *FLAGS) as running:
        yield running


def status_of(url: str, name: str) -> dict[str, Any]:
    entries = httpx.get(f"{url}/models", timeout=LIMIT_S).json()["data"]
    found: dict[str, Any] = next(entry["status"] for entry in entries if entry["id"] == name)
    return found


def ask(url: str, model: str, **fields: Any) -> httpx.Response:
    body = {**ASKED, "model": model, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)


def pids(url: str, *names: str) -> list[int]:
    """Return the process ids of the models' engines."""
    state = httpx.get(f"{url}/manage/state", timeout=LIMIT_S).json()
    found = {model["model"]: model["engine"]["pid"] for model in state["models"]}
    return [found[name] for name in names]


def starts(url: str) -> dict[str, int]:
    state = httpx.get(f"{url}/manage/state", timeout=LIMIT_S).json()
    return {model["model"]: model["engine"]["starts"] for model in state["models"]}


def test_16_concurrent_requests_share_one_load_and_another_model_evicts_it(
    server: ServerProcess,
) -> None:
    url = server.url
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    before = starts(url)["a"]

    async def burst(model: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            body = {**ASKED, "model": model}
            posts = (client.post(f"{url}/v1/completions", json=body) for _ in range(16))
            return await asyncio.gather(*posts)

    answers = asyncio.run(burst("a"))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert {answer.json()["model"] for answer in answers} == {"a"}
    assert starts(url)["a"] == before + 1
    assert status_of(url, "a")["value"] == "loaded"
    assert ask(url, "b").json()["model"] == "b"
    assert status_of(url, "a")["value"] == "unloaded"
    assert status_of(url, "b")["value"] == "loaded"


def test_an_embedding_request_loads_its_model(server: ServerProcess) -> None:
    body = {"input": "one two", "model": "a"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=LIMIT_S)
    assert (answer.status_code, answer.json()["model"]) == (200, "a")


def test_an_unknown_model_is_a_404_that_lists_the_served_models(server: ServerProcess) -> None:
    answer = ask(server.url, "c")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "a, b, bad" in answer.json()["error"]["message"]


def test_a_failed_load_is_reported_and_does_not_affect_other_models(server: ServerProcess) -> None:
    answer = ask(server.url, "bad")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "load_failed")
    assert status_of(server.url, "bad")["failed"] is True
    body = {"content": "hello", "model": "bad"}
    refused = httpx.post(f"{server.url}/tokenize", json=body, timeout=LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "load_failed")
    reason = "bad is not served now (model_corrupt). config.json of bad has no valid vocab_size"
    assert f"ERROR headrace.fleet.fleet: {reason}" in "".join(server.lines)
    assert ask(server.url, "a").status_code == 200


@many_loads
def test_models_are_loaded_and_unloaded_on_demand(server: ServerProcess) -> None:
    url = server.url
    assert httpx.post(f"{url}/models/load", json={"model": "b"}).json() == {"success": True}
    eventually(lambda: status_of(url, "b")["value"] == "loaded", LIMIT_S)
    assert httpx.post(f"{url}/models/unload", json={"model": "b"}).json() == {"success": True}
    eventually(lambda: status_of(url, "b")["value"] == "unloaded", LIMIT_S)
    assert httpx.post(f"{url}/models/load", json={"model": "c"}).status_code == 404


def test_text_routes_use_the_model_named_in_the_request(server: ServerProcess) -> None:
    body = {"content": "hello", "model": "b"}
    answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200 and answer.json()["count"] > 0
    shown = httpx.get(f"{server.url}/props", params={"model": "b"}, timeout=LIMIT_S).json()
    assert shown["model_alias"] == "b"


@contextlib.contextmanager
def at_work(url: str, client: httpx.Client) -> Iterator[None]:
    """Keep a stream of `a` running by stopping its engine with SIGSTOP."""
    ask(url, "a")
    (pid,) = pids(url, "a")
    body = {**ASKED, "stream": True, "model": "a"}
    os.kill(pid, signal.SIGSTOP)
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as busy:
            assert busy.status_code == 200
            yield
            with contextlib.suppress(ProcessLookupError):  # killed as unresponsive
                os.kill(pid, signal.SIGCONT)
            assert "[DONE]" in "".join(busy.iter_lines())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@many_loads
def test_a_stream_gets_heartbeats_while_its_model_waits_for_another_to_unload(
    server: ServerProcess,
) -> None:
    url, body = f"{server.url}/v1/completions", {**ASKED, "stream": True}
    with contextlib.ExitStack() as undo:
        client = undo.enter_context(httpx.Client(timeout=LIMIT_S))
        with at_work(server.url, client):
            waiting = undo.enter_context(client.stream("POST", url, json={**body, "model": "b"}))
            lines = waiting.iter_lines()
            first = [next(line for line in lines if line) for _ in range(3)]
            assert status_of(server.url, "b")["value"] == "unloaded"
            # A third stream, for the loaded model, waits behind it.
            late = undo.enter_context(client.stream("POST", url, json={**body, "model": "a"}))
            late_id = late.headers["x-stream-id"]
            eventually(lambda: state_of(server.url, late_id) == "loading", LIMIT_S)
        data = list(data_of((*first, *lines)))
        assert {chunk["id"] for chunk in data} == {waiting.headers["x-stream-id"]}
        # The stream started before the model's fingerprint was known.
        named = [chunk["system_fingerprint"] for chunk in data]
        assert named[0] is None and named[-1].startswith("fp_")


def state_of(url: str, stream_id: str) -> str:
    return str(httpx.get(f"{url}/v1/streams/{stream_id}", timeout=LIMIT_S).json()["state"])


CHAT = {"conv_id": "chat 1"}


@contextlib.contextmanager
def waiting_chat(url: str, client: httpx.Client) -> Iterator[Iterator[bytes]]:
    """Stream a conversation that waits until `b` can be loaded."""
    headers = {"X-Conversation-Id": CHAT["conv_id"]}
    body = {**ASKED, "model": "b", "stream": True, "return_progress": True}
    with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as post:
        assert post.status_code == 200 and post.headers["x-stream-id"]
        yield post.iter_raw()


def test_a_stream_waiting_for_its_model_reports_the_load_and_can_be_resumed_and_stopped(
    server: ServerProcess,
) -> None:
    url, updates = f"{server.url}/v1/stream", list[str]()

    def follow() -> str:
        with Client(server.url) as client, client.stream(prompt="a", model="b", max_tokens=4) as it:
            for update in it.updates():
                updates.append(getattr(update, "state", type(update).__name__))
            return it.id

    with ThreadPoolExecutor() as pool, httpx.Client(timeout=LIMIT_S) as client:
        with at_work(server.url, client):
            following = pool.submit(follow)
            with waiting_chat(server.url, client) as parts:
                received = b""
                while received.count(b"data: {") < 4:  # the first chunk, then heartbeats
                    received += next(parts)
                with client.stream("GET", url, params=CHAT) as again:
                    replayed = again.iter_raw()
                    read = b""
                    while len(read) < len(received):
                        read += next(replayed)
                    assert read[: len(received)] == received
                assert client.delete(url, params=CHAT).status_code == 204
                received += b"".join(parts)
            assert b'"code":"cancelled"' in received and b"[DONE]" not in received
            assert client.get(url, params=CHAT).status_code == 404
            eventually(lambda: "loading" in updates, LIMIT_S)
        assert following.result().startswith("cmpl-")
    assert updates[-1] == "Finish" and "Tokens" in updates


@pytest.mark.slow
def test_a_conversation_waiting_for_its_model_survives_a_server_kill(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    given = [f"--model={name}={folders[name]}" for name in "ab"]
    flags = [*given, "--state-dir", str(tmp_path / "state"), "--max-models", "1", *FLAGS]
    server = ServerProcess(*flags).wait_until_ready()
    received = b""
    with contextlib.ExitStack() as undo:
        client = undo.enter_context(httpx.Client(timeout=LIMIT_S))
        ask(server.url, "a")
        engines = pids(server.url, "a")
        busy = {**ASKED, "stream": True, "model": "a"}
        os.kill(engines[0], signal.SIGSTOP)
        try:
            undo.enter_context(client.stream("POST", f"{server.url}/v1/completions", json=busy))
            parts = undo.enter_context(waiting_chat(server.url, client))
            while received.count(b"data: {") < 3:
                received += next(parts)
        finally:
            server.stop(signal.SIGKILL)
            for pid in (*engines, server.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    with running_server(*flags) as again:
        url = f"{again.url}/v1/stream"
        rest = httpx.get(url, params={**CHAT, "from": len(received)}, timeout=LIMIT_S)
        assert rest.content.endswith(b"data: [DONE]\n\n")
        whole = httpx.get(url, params=CHAT, timeout=LIMIT_S).content
        assert whole == received + rest.content
        chunks = data_in(whole)
        # The stream started before the model's fingerprint was known.
        assert chunks[0]["system_fingerprint"] is None
        assert chunks[-1]["system_fingerprint"].startswith("fp_")
        text = "".join(c["choices"][0].get("text", "") for c in chunks if c["choices"])
        assert text == ask(again.url, "b").json()["choices"][0]["text"]


def opened(url: str, model: str) -> str:
    """Start a durable stream, disconnect, and return its id."""
    headers = {"Idempotency-Key": f"key {model}"}
    asked = {**ASKED, "stream": True, "max_tokens": 300, "model": model}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=asked, headers=headers, timeout=LIMIT_S
    ) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("id: "))
    return first.removeprefix("id: ").split(":")[0]


@many_loads
def test_durable_streams_of_two_models_finish_after_a_server_kill(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    given = [f"--model={name}={folders[name]}" for name in "ab"]
    flags = [*given, "--state-dir", str(tmp_path / "state"), *FLAGS]
    server = ServerProcess(*flags).wait_until_ready()
    try:
        ask(server.url, "a"), ask(server.url, "b")
        engines = pids(server.url, "a", "b")
        ids = [opened(server.url, name) for name in "ab"]
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        server.stop(signal.SIGKILL)
    finally:
        for pid in (*engines, server.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    # Only one model fits, so the second stream resumes once the first has finished.
    with running_server(*flags, "--max-models", "1") as again:

        def has_finished(id: str) -> bool:
            state = httpx.get(f"{again.url}/v1/streams/{id}", timeout=LIMIT_S).json()
            return bool(state["state"] == "finished")

        for id in ids:
            eventually(lambda id=id: has_finished(id), LIMIT_S)


def test_sigterm_during_a_load_stops_the_server_cleanly(folders: dict[str, Path]) -> None:
    given = [f"--model={name}={folders[name]}" for name in "ab"]
    server = ServerProcess(*given, *FLAGS).wait_until_ready()
    httpx.post(f"{server.url}/models/load", json={"model": "a"})
    assert server.stop(signal.SIGTERM) == 0
    listed = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True)
    assert not listed.stdout


@many_loads
def test_the_memory_limit_and_the_idle_timeout_unload_models(
    folders: dict[str, Path],
) -> None:
    given = [f"--model={name}={folders[name]}" for name in "ab"]
    budget = str(20 << 20)  # one cache of 16 MiB and the weights of a tiny model
    with running_server(*given, *FLAGS, "--models-memory-bytes", budget) as server:
        assert ask(server.url, "a").status_code == 200
        assert ask(server.url, "b").status_code == 200
        assert status_of(server.url, "a")["value"] == "unloaded"
        page = httpx.get(f"{server.url}/metrics").text
        assert 'headrace_requests_total{model="b",outcome="finished"' in page
        assert 'headrace_engine_up{model="a"} 0.0' in page
    with running_server(*given, *FLAGS, "--idle-unload-s", "0.5") as server:
        assert ask(server.url, "a").status_code == 200
        eventually(lambda: status_of(server.url, "a")["value"] == "unloaded", LIMIT_S)
        assert ask(server.url, "a").status_code == 200


@many_loads
def test_streams_of_two_models_survive_an_engine_kill(
    folders: dict[str, Path],
) -> None:
    given = [f"--model={name}={folders[name]}" for name in "ab"]
    with running_server(*given, *FLAGS) as server:
        alone = {name: ask(server.url, name, max_tokens=200).json() for name in "ab"}
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, server.url, name, max_tokens=200) for name in "ab"]
            os.kill(pids(server.url, "a")[0], signal.SIGKILL)
            for name, answer in zip("ab", asked, strict=True):
                text = answer.result().json()["choices"][0]["text"]
                assert text == alone[name]["choices"][0]["text"]
