"""Servers that are killed and started again: prompts are not read twice, and answers are equal."""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_full_disk import full_disk
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

TOKENS = 6000
PROMPT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(TOKENS))  # a byte is a token
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(make_tiny_model(folder, max_position_embeddings=8192, num_hidden_layers=6))


@contextmanager
def serving(model: str, disk: Path, *flags: str) -> Iterator[ServerProcess]:
    more = ("--threads", "1", "--max-step-tokens", "64", "--state-dir", "none", *flags)
    with running_server(model, "--prefix-cache-dir", str(disk), *more) as server:
        yield server


def answer(server: ServerProcess, **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = httpx.post(f"{server.url}/v1/completions", json=BODY | fields, timeout=120).json()
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(timeout=30)


def test_a_killed_server_reads_no_prompt_twice(model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        before = answer(server)
        time.sleep(1)  # so much may be lost
        kill(server)
    with serving(model, tmp_path) as server:
        text, cached = answer(server)
        assert (text, 0) == before
        assert cached >= (TOKENS - 1) // 32 * 32 - 256
        assert answer(server, cache_salt="another")[1] == 0, "not that of others"


def test_a_prompt_that_was_cut_by_a_kill_goes_on_where_it_was(model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        fields = BODY | {"stream": True, "return_progress": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=fields, timeout=120) as body:
            seen = []
            for line in body.iter_lines():
                if "prompt_progress" in line:
                    progress = json.loads(line.removeprefix("data: "))["prompt_progress"]
                    seen.append((time.monotonic(), progress["processed"]))
                    if progress["processed"] > TOKENS * 0.7:
                        break
            kill(server)
    at = seen[-1][0]
    processed = max((done for when, done in seen if when < at - 1), default=0)
    with serving(model, tmp_path) as server:
        text, cached = answer(server)
        assert cached >= processed - 32, "a second's blocks at most are lost"
        assert answer(server, cache_prompt=False)[0] == text


def test_an_engine_that_dies_restores_its_streams(model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        whole = answer(server, max_tokens=600)[0]
        time.sleep(1)
        fields = BODY | {"stream": True, "max_tokens": 600}
        got, url, pid = "", f"{server.url}/v1/completions", server.engine_pid
        with httpx.stream("POST", url, json=fields, timeout=120) as body:
            for line in body.iter_lines():
                if line.startswith("data: {"):
                    got += "".join(c["text"] for c in json.loads(line[6:]).get("choices", ()))
                    if got and pid:
                        os.kill(pid, signal.SIGKILL)
                        pid = 0
        assert got == whole
        metrics = httpx.get(f"{server.url}/metrics").text
        (line,) = [x for x in metrics.splitlines() if x.startswith("headrace_disk_prefix_tokens_t")]
        assert float(line.split()[1]) > TOKENS / 2


def test_serving_goes_on_while_the_disk_is_full(model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server, full_disk_of_engine(server):
        text, cached = answer(server)
        assert (text, cached) == answer(server, cache_prompt=False)
        assert answer(server)[1] > 0, "memory has it"
        eventually(lambda: any("cannot be kept" in line for line in server.lines))
        assert sum("cannot be kept" in line for line in server.lines) == 1
    assert not list(tmp_path.glob("*/*-*-*"))


@contextmanager
def full_disk_of_engine(server: ServerProcess) -> Iterator[None]:
    limits = resource.prlimit(server.engine_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.engine_pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    with full_disk(server):
        yield
