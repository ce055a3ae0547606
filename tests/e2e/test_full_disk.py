"""Tests of streams while the disk is full, and of their resumption afterwards."""

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_responses_socket import open_socket
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_in
from tools.harness.tiny_models import make_tiny_model

BODY = {"prompt": "hi", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
DRAIN_S, BEYOND_S = 3, 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started(tmp_path_factory.mktemp("full")) as running:
        yield running


@contextlib.contextmanager
def started(folder: Path) -> Iterator[ServerProcess]:
    flags = ("--threads", "1", "--heartbeat-s", "1", "--drain-s", str(DRAIN_S))
    with running_server(
        str(make_tiny_model(folder / "tiny")), *flags, "--state-dir", str(folder / "state")
    ) as running:
        yield running


@contextlib.contextmanager
def full_disk(server: ServerProcess) -> Iterator[None]:
    """Set a file size limit so that the server cannot write to any file."""
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # the server has exited
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def asked(server: ServerProcess, name: str) -> Iterator[httpx.Response]:
    """Open a stream of the conversation `name`."""
    url, headers = f"{server.url}/v1/completions", {"X-Conversation-Id": name}
    with httpx.stream("POST", url, json=BODY, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        yield answer


def texts(body: bytes) -> str:
    choices = [choice for frame in data_in(body) for choice in frame.get("choices", ())]
    return "".join(choice["text"] for choice in choices)


def state_of(server: ServerProcess, answer: httpx.Response) -> Any:
    stream_id = answer.headers["x-stream-id"]
    return httpx.get(f"{server.url}/v1/streams/{stream_id}").json()["state"]


def rest(server: ServerProcess, name: str, start: int) -> bytes:
    params: dict[str, str | int] = {"conv_id": name, "from": start}
    return httpx.get(f"{server.url}/v1/stream", params=params, timeout=120).content


def test_a_stalled_stream_ends_early_and_resumes_once_the_disk_has_space(
    server: ServerProcess,
) -> None:
    with asked(server, "alone") as answer:
        alone = answer.read()
    with asked(server, "full") as answer:
        pieces = answer.iter_raw()
        got = next(pieces)
        with full_disk(server):
            got += b"".join(pieces)
            assert b"[DONE]" not in got and b"error" not in got
            assert not texts(rest(server, "full", len(got)))  # a resume still adds no text
    eventually(lambda: state_of(server, answer) == "finished")
    whole = got + rest(server, "full", len(got))
    assert texts(whole) == texts(alone) and whole.endswith(b"data: [DONE]\n\n")
    assert whole == rest(server, "full", 0)
    assert any("can write again" in line for line in server.lines)


def test_event_readers_get_storage_stalled_and_later_streams_work(
    server: ServerProcess,
) -> None:
    with asked(server, "events") as answer:
        url = f"{server.url}/v1/streams/{answer.headers['x-stream-id']}/events"
        with full_disk(server), httpx.stream("GET", url, timeout=60) as events:
            assert "storage_stalled" in events.read().decode()
    eventually(lambda: state_of(server, answer) == "finished")
    with asked(server, "new") as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_websocket_evicts_unstored_responses_while_the_disk_is_full(
    server: ServerProcess,
) -> None:
    kept = {"input": "hi", "max_output_tokens": 1, "store": False}
    with asked(server, "socket") as answer, full_disk(server), open_socket(server) as socket:
        answer.read()  # ends once the store has stalled
        ids = [socket.ask(**kept)["id"] for _ in range(18)]
        places = [f"{server.url}/v1/responses/{id}" for id in ids]
        eventually(lambda: [httpx.get(it).status_code for it in places[:3]] == [404, 404, 200])
    eventually(lambda: {httpx.get(it).status_code for it in places} == {404})


@pytest.mark.slow
@pytest.mark.parametrize("has_stalled", [False, True])
def test_a_server_stops_in_time_although_the_disk_is_full(
    tmp_path: Path, has_stalled: bool
) -> None:
    with started(tmp_path) as server, asked(server, "stop") as answer:
        pieces = answer.iter_raw()
        got = next(pieces)
        with full_disk(server):
            if has_stalled:
                got += b"".join(pieces)
            began = time.monotonic()
            assert server.stop(within_s=60) == 0
            assert time.monotonic() - began < DRAIN_S + BEYOND_S
        got += b"".join(pieces)
    with started(tmp_path) as server:
        eventually(lambda: state_of(server, answer) == "finished")
        assert (got + rest(server, "stop", len(got))).endswith(b"data: [DONE]\n\n")
