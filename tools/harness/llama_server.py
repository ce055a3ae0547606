"""Runs llama-server: either the server of the xllamacpp wheel, or a different program."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tools.harness.processes import free_port

_LOAD_TIMEOUT_S = 300
# llama.cpp's server runs in a separate process, because llama-cpp-python uses the same symbols.
_SERVE = """
import json, signal, sys, xllamacpp
given = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = given["model"]
params.hostnames, params.port = ["127.0.0.1"], given["port"]
params.n_parallel, params.n_ctx = given["streams"], given["positions"] * given["streams"]
params.n_batch = given["batch"]
params.n_ubatch = min(params.n_ubatch, given["batch"])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
params.warmup = True
# The load generator of vLLM 0.32.0 reads no event after a ping.
params.sse_ping_interval = -1
server = xllamacpp.Server(params)
print(xllamacpp.get_system_info(), server.listening_address, flush=True)
signal.pause()
"""


@contextlib.contextmanager
def llama_server(
    model: Path, threads: int = 1, streams: int = 1, positions: int = 1024, batch: int = 2048
) -> Iterator[str]:
    """Starts a server for `streams` sequences of `positions` positions each, and yields its URL.

    `batch` is the largest number of tokens in a step; llama-server's own default is 2,048.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    program = os.environ.get("LLAMA_SERVER")
    if program:
        sizes = {"-m": model, "--host": "127.0.0.1", "--port": port, "-t": threads, "-np": streams}
        sizes |= {"-c": positions * streams, "-b": batch, "-ub": min(512, batch)}
        command = [program, *(str(part) for pair in sizes.items() for part in pair)]
    else:
        given = {"model": str(model), "port": port, "threads": threads, "streams": streams}
        given |= {"positions": positions, "batch": batch}
        command = [sys.executable, "-c", _SERVE, json.dumps(given)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    assert process.stdout
    # A full pipe would block the server.
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        _wait_until_ready(url, process, lines)
        yield url
    finally:
        # The server has no state to save.
        process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join(timeout=5)


def greedy(url: str, prompt: list[int], num: int) -> list[int]:
    """Return greedy tokens from llama-server's own route, without its prompt cache."""
    body: dict[str, Any] = {"prompt": prompt, "n_predict": num, "temperature": 0}
    body |= {"cache_prompt": False, "ignore_eos": True, "return_tokens": True}
    answer = httpx.post(f"{url}/completion", json=body, timeout=300)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def drawn(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Return the next token and the two most probable tokens, with their log probabilities."""
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 2} | more
    answer = httpx.post(f"{url}/completion", json=body, timeout=300)
    found: dict[str, Any] = answer.raise_for_status().json()["completion_probabilities"][0]
    return found


def _wait_until_ready(url: str, process: "subprocess.Popen[str]", lines: list[str]) -> None:
    deadline = time.monotonic() + _LOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"llama-server is not ready:\n{''.join(lines[-20:])}")
