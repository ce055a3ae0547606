"""LiteLLM's proxy between a client and a slow server: `make test-litellm-proxy`."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess
from tools.harness.slow_engine import slow

PROGRAM = Path(__file__).parents[2] / "build" / "litellm-venv" / "bin" / "litellm"
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}
KEY = "sk-" + "0123456789abcdef" * 4
START_S, LIMIT_S = 300.0, 120.0
HEARTBEAT_S = 1.0
SECONDS_PER_1000 = 8.0
COUNT = ", ".join(map(str, range(1, 13)))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    prefix = slow(SECONDS_PER_1000)
    server = ServerProcess("headrace-mini", "--heartbeat-s", str(HEARTBEAT_S), prefix=prefix)
    yield server.wait_until_ready()
    server.stop()


@pytest.fixture(scope="module")
def proxy(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("litellm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": f"{name}/headrace-mini",
                "api_base": server.url + path,
                "api_key": "unused",
            },
        }
        for name, path in PROVIDERS.items()
    ]
    # YAML contains JSON.
    (folder / "config.yaml").write_text(json.dumps({"model_list": models}))
    command = (PROGRAM, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port))
    settings = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | settings, stdout=log, stderr=log
        )
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=LIMIT_S) as client:
            eventually(lambda: is_up(client, process), within_s=START_S)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)


def is_up(client: httpx.Client, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "the proxy has ended"
    try:
        return client.get("/health/liveliness").is_success
    except httpx.ConnectError:
        return False


def slow_question(name: str, num_words: int = 120) -> str:
    """Return a question that is in no cache. With 120 words, its prompt takes about 5 s."""
    return " ".join(f"{name}{i}" for i in range(num_words)) + " Count from 1 to 12."


def streamed(proxy: httpx.Client, path: str, **body: Any) -> tuple[list[dict[str, Any]], float]:
    """Return the events of a stream, and the longest time in seconds without a byte."""
    lines, longest = [""], 0.0
    with proxy.stream("POST", path, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        last = time.monotonic()
        for text in answer.iter_text():
            now = time.monotonic()
            last, longest = now, max(longest, now - last)
            first, *more = text.split("\n")
            lines[-1] += first
            lines += more
    data = [line[6:] for line in lines if line.startswith("data: {")]
    return [json.loads(it) for it in data], longest


def deltas(events: list[dict[str, Any]], name: str) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get(name) or "" for choice in choices)


@pytest.mark.parametrize("name", PROVIDERS)
def test_an_answer_is_whole_although_the_engine_is_killed(
    proxy: httpx.Client, server: ServerProcess, name: str
) -> None:
    def kill() -> None:
        state = f"{server.url}/manage/state"
        eventually(lambda: httpx.get(state).json()["requests"], within_s=LIMIT_S)
        os.kill(httpx.get(state).json()["engine"]["pid"], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    messages = [{"role": "user", "content": slow_question(name[0])}]
    path = "/v1/chat/completions"
    events, _ = streamed(proxy, path, model=name, messages=messages, max_tokens=60)
    killing.join()
    assert deltas(events, "content") == COUNT
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_progress_in_words_passes(proxy: httpx.Client) -> None:
    """The proxy drops heartbeats and progress of chat completions, but no reasoning."""
    events, _ = streamed(
        proxy,
        "/v1/chat/completions",
        model="openai",
        messages=[{"role": "user", "content": slow_question("p", 400)}],
        max_tokens=60,
        return_progress="reasoning",
    )
    assert "Processing the prompt: " in deltas(events, "reasoning_content")
    assert deltas(events, "content") == COUNT


def test_heartbeats_of_responses_pass(proxy: httpx.Client) -> None:
    question = slow_question("r")
    events, longest = streamed(proxy, "/v1/responses", model="openai", input=question)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == COUNT
    assert "keepalive" in [event["type"] for event in events]
    assert longest < 5 * HEARTBEAT_S


def test_heartbeats_of_messages_pass(proxy: httpx.Client) -> None:
    messages = [{"role": "user", "content": slow_question("m")}]
    events, longest = streamed(
        proxy, "/v1/messages", model="anthropic", messages=messages, max_tokens=60
    )
    texts = [it["delta"].get("text", "") for it in events if it["type"] == "content_block_delta"]
    assert "".join(texts) == COUNT
    assert "ping" in [event["type"] for event in events]
    assert longest < 5 * HEARTBEAT_S
