"""Tests of servers of version 0.1 and of this version that share their folders in turn."""

import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import __version__
from tools.harness.servers import ServerProcess

ROOT = Path(__file__).parents[2]
COMMIT = "fad3571"
"""The last commit whose files on disk have the format of version 0.1."""
THIS = (sys.executable, "-m", "headrace")
LONG = " ".join(map(str, range(200)))
Serve = Callable[[tuple[str, ...]], AbstractContextManager[ServerProcess]]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the command that runs version 0.1 with the packages of these tests."""
    folder = tmp_path_factory.mktemp("old")
    packed = folder / "old.tar"
    subprocess.run(["git", "archive", "-o", packed, COMMIT, "src"], cwd=ROOT, check=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    about = folder / "src/headrace-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace\nVersion: 0.1.0\n")
    return ("env", f"PYTHONPATH={folder / 'src'}", *THIS)


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Return a function that runs a version with the same folders for streams and prefixes."""

    @contextmanager
    def running(program: tuple[str, ...]) -> Iterator[ServerProcess]:
        folders = (
            "--state-dir",
            str(tmp_path / "state"),
            "--prefix-cache-dir",
            str(tmp_path / "p"),
        )
        server = ServerProcess(*folders, "--threads", "1", program=program)
        try:
            yield server.wait_until_ready()
        finally:
            server.stop()

    return running


def version(server: ServerProcess) -> str:
    running_version: str = httpx.get(f"{server.url}/manage/state").json()["version"]
    return running_version


def respond(server: ServerProcess, words: str, **fields: Any) -> dict[str, Any]:
    body = {"input": words, "store": True, "temperature": 0, "max_output_tokens": 20, **fields}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=120)
    return dict(answer.raise_for_status().json())


def stored(server: ServerProcess, response: dict[str, Any]) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/v1/responses/{response['id']}").raise_for_status().json())


def stream(server: ServerProcess, name: str, num_bytes: int = 1 << 20) -> bytes:
    """Return the body of a durable stream, or its first `num_bytes` bytes."""
    body = {"messages": [{"role": "user", "content": "Count from 1 to 150."}], "stream": True}
    headers = {"X-Conversation-Id": name}
    url, read = f"{server.url}/v1/chat/completions", b""
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
        for piece in answer.iter_bytes():
            read += piece
            if len(read) >= num_bytes:
                break
    return read


def again(server: ServerProcess, name: str) -> bytes:
    url = f"{server.url}/v1/stream"
    return httpx.get(url, params={"conv_id": name, "from": 0}, timeout=120).content


def cached(server: ServerProcess) -> int:
    body = {"prompt": LONG, "max_tokens": 1, "temperature": 0}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_each_version_reads_the_streams_of_the_other(serve: Serve, old: tuple[str, ...]) -> None:
    with serve(old) as server:
        assert version(server) == "0.1.0"
        first, whole = respond(server, "Spell the word banana."), stream(server, "whole")
    with serve(THIS) as server:
        assert version(server) == __version__ != "0.1.0"
        assert stored(server, first) == first
        assert again(server, "whole") == whole and whole.endswith(b"data: [DONE]\n\n")
        second = respond(server, "And apple.", previous_response_id=first["id"])
        of_this = stream(server, "of this")
    with serve(old) as server:
        assert stored(server, first) == first and stored(server, second) == second
        assert again(server, "whole") == whole and again(server, "of this") == of_this
        assert respond(server, "And pear.", previous_response_id=second["id"])["output"]


@pytest.mark.parametrize("upgrade", [True, False])
def test_a_stream_of_the_other_version_keeps_its_text_and_ends_with_model_changed(
    serve: Serve, old: tuple[str, ...], upgrade: bool
) -> None:
    before, after = (old, THIS) if upgrade else (THIS, old)
    with serve(before) as server:
        began = stream(server, "cut", num_bytes=4000)
        running_version = version(server)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serve(after) as server:
        read = again(server, "cut")
        assert read.startswith(began) and len(began) >= 4000
        assert b"model_changed" in read
        assert f"Headrace {version(server)} instead of Headrace {running_version}".encode() in read


def test_each_version_keeps_its_own_prefixes(serve: Serve, old: tuple[str, ...]) -> None:
    with serve(old) as server:
        assert cached(server) == 0
    with serve(THIS) as server:
        assert cached(server) == 0
    for program in (old, THIS):
        with serve(program) as server:
            assert cached(server) > 256
