"""Tests that killed servers restore prefixes from disk and give the same answers."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    """Return the text and the number of cached prompt tokens."""
    body = httpx.post(f"{server.url}/v1/completions", json=BODY | fields, timeout=120).json()
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(timeout=30)


@pytest.mark.slow
def test_a_restarted_server_restores_the_prompt_from_disk(model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        before = answer(server)
        time.sleep(1)  # a kill may lose the last second
        kill(server)
    with serving(model, tmp_path) as server:
        text, cached = answer(server)
        assert (text, 0) == before
        assert cached >= (TOKENS - 1) // 32 * 32 - 256
        assert answer(server, cache_salt="another")[1] == 0, "another salt shares no prefix"


def test_an_interrupted_prefill_resumes_and_a_killed_engine_restores_its_streams(
    model: str, tmp_path: Path
) -> None:
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
        assert cached >= processed - 32, "at most one second of blocks is lost"
        assert answer(server, cache_prompt=False)[0] == text
        whole = answer(server, max_tokens=600)[0]
        time.sleep(1)  # a kill may lose the last second
        before = disk_figure(server, "tokens_total")
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
        assert disk_figure(server, "tokens_total") - before > TOKENS / 2


def test_serving_goes_on_while_the_disk_is_full(model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server, full_disk_of_engine(server):
        text, cached = answer(server)
        assert (text, cached) == answer(server, cache_prompt=False)
        assert answer(server)[1] > 0, "the prefix is cached in memory"
        eventually(lambda: any("cannot be written to" in line for line in server.lines))
        assert sum("cannot be written to" in line for line in server.lines) == 1
    assert not list(tmp_path.glob("*/*-*-*"))


@contextmanager
def full_disk_of_engine(server: ServerProcess) -> Iterator[None]:
    limits = resource.prlimit(server.engine_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.engine_pid, resource.RLIMIT_FSIZE, (1, limits[1]))
    with full_disk(server):
        yield


@pytest.mark.slow
def test_two_servers_share_a_folder_while_one_of_them_evicts(model: str, tmp_path: Path) -> None:
    """Let both servers use the same prompts; the one with a small limit evicts files of both."""
    few = ("--prefix-cache-disk-bytes", str(6 << 20))  # room for 4 of 12 prompts
    prompts = [PROMPT[n:2000] + PROMPT[:n] for n in range(6)]

    def ask(server: ServerProcess, seed: int) -> list[tuple[int, str, int]]:
        dice, said = random.Random(seed), []
        for _ in range(30):
            number = dice.randrange(len(prompts))
            salt = str(dice.randrange(2))
            said.append((number, *answer(server, prompt=prompts[number], cache_salt=salt)))
        return said

    # Memory holds only one prompt, so the other prompts must come from disk.
    small = ("--dtype", "bfloat16", "--max-model-len", "2560", "--kv-cache-memory-bytes", "2200000")
    with serving(model, tmp_path / "none", *small) as server:
        expected = [answer(server, prompt=prompt, cache_prompt=False)[0] for prompt in prompts]
    with (
        serving(model, tmp_path / "disk", *small) as roomy,
        serving(model, tmp_path / "disk", *small, *few) as narrow,
        ThreadPoolExecutor(2) as pool,
    ):
        said = list(pool.map(ask, (roomy, narrow), (1, 2)))
        hits = [disk_figure(server, "hits") for server in (roomy, narrow)]
        wrote = [disk_figure(server, "written_bytes") for server in (roomy, narrow)]
        lines = roomy.lines + narrow.lines
    for number, text, _ in said[0] + said[1]:
        assert text == expected[number]
    assert all(hits) and all(wrote), (hits, wrote)
    assert not [line for line in lines if "WARNING" in line or "Traceback" in line]


def disk_figure(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = (line for line in lines if line.startswith(f"headrace_disk_prefix_{name}"))
    return sum(float(line.split()[1]) for line in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_during_a_20_000_token_prefill_loses_at_most_one_second(tmp_path: Path) -> None:
    """Compare the tokens on disk after SIGKILL with the progress that the server reported."""
    folder = tmp_path / "tiny"
    model = str(make_tiny_model(folder, max_position_embeddings=24576, num_hidden_layers=2))
    prompt, dice, known = PROMPT * 4, random.Random(0), 0
    prompt = prompt[:20_000]
    with serving(model, tmp_path / "none", *WIDE) as server:
        expected = answer(server, prompt=prompt)[0]
    while known < 19_900:
        with serving(model, tmp_path / "disk", *WIDE) as server:
            seen = read_until_killed(server, prompt, dice.uniform(0.3, 2.5))
        at = seen[-1][0]
        computed = max((done for when, done in seen if when < at - 1), default=0)
        known = on_disk(tmp_path / "disk")
        print(f"computed {seen[-1][1]}, a second before {computed}, on disk {known}")
        assert known >= computed - 32, "more than the last second of blocks is lost"
    with serving(model, tmp_path / "disk", *WIDE) as server:
        assert answer(server, prompt=prompt) == (expected, 19_968)


WIDE = ("--max-step-tokens", "256")


def read_until_killed(
    server: ServerProcess, prompt: str, seconds: float
) -> list[tuple[float, int]]:
    """Send the prompt and kill the server `seconds` after its first progress event."""
    fields = BODY | {"prompt": prompt, "stream": True, "return_progress": True}
    seen: list[tuple[float, int]] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=fields, timeout=300) as body:
        for line in body.iter_lines():
            if "prompt_progress" in line:
                progress = json.loads(line.removeprefix("data: "))["prompt_progress"]
                seen.append((time.monotonic(), progress["processed"]))
            if seen and time.monotonic() > seen[0][0] + seconds:
                break
        kill(server)
    return seen


def on_disk(root: Path) -> int:
    """Return how many tokens of the prompt are stored without a gap from its start."""
    ends = {}
    for path in root.glob("*/*-*-*"):
        first, end = map(int, path.name.split("-")[1:])
        ends[first] = max(end, ends.get(first, 0))
    known = 0
    while known in ends:
        known = ends[known]
    return known * 32
