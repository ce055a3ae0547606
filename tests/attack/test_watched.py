"""Tests that the checks of the attack tests find planted faults."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stress.attack.target import Target
from stress.attack.watched import Watched, watched_server
from stress.http import Reply
from stress.site import Site

PLANTED = Path(__file__).parent / "planted"


def target(folder: Path, found: list[str]) -> Target:
    return Target(Site("none", folder), "planted", folder, 1, found.append)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ends", "server has ended"),
        pytest.param("stalls", "/health/live took", marks=pytest.mark.slow),
        pytest.param("grows", "MB over rest", marks=pytest.mark.slow),
        pytest.param("complains", "in the log, 1 times: Traceback", marks=pytest.mark.slow),
        ("is deaf", "SIGTERM took"),
    ],
)
@pytest.mark.timeout(200)
def test_a_planted_server_fault_is_found(tmp_path: Path, fault: str, words: str) -> None:
    found: list[str] = []
    sign = tmp_path / "misbehave now"
    path = os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    planted = {"PLANTED": fault, "PLANTED_AT": str(sign), "PYTHONPATH": path}

    async def run() -> None:
        watching = watched_server(target(tmp_path, found), tmp_path, environment=planted)
        async with watching as watched:
            sign.touch()
            await until(lambda: bool(found) or fault in ("complains", "is deaf"), 20.0, watched)

    asyncio.run(run())
    assert any(words in it for it in found), found


async def until(condition: Callable[[], bool], within_s: float, watched: Watched) -> None:
    ended = time.monotonic() + within_s
    while not condition() and time.monotonic() < ended:
        await watched.check("a planted fault")
        await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_server_without_a_fault_passes(tmp_path: Path) -> None:
    found: list[str] = []

    async def run() -> None:
        async with watched_server(target(tmp_path, found), tmp_path) as watched:
            assert await watched.check("nothing")

    asyncio.run(run())
    assert found == []


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, b'{"error":{"message":"In /tmp/x/config.json","code":"load_failed"}}', "/tmp/"),
        (500, b'{"error":{"message":"Traceback (most","code":"load_failed"}}', "Traceback"),
        (400, b'{"error":{"message":"In template.py, line 4","code":"load_failed"}}', ".py"),
        (0, b"", "no answer"),
    ],
)
def test_an_error_message_that_leaks_internals_is_found(
    tmp_path: Path, status: int, body: bytes, words: str
) -> None:
    found: list[str] = []
    answer = Reply()
    answer.status, answer.body = status, bytearray(body)
    Watched(target(tmp_path, found), Site("none", tmp_path)).judge("x", answer)
    assert len(found) == 1
    assert words in found[0]


def test_a_plain_error_message_passes(tmp_path: Path) -> None:
    found: list[str] = []
    answer = Reply()
    answer.status, answer.body = 500, bytearray(b'{"error":{"message":"config.json is no JSON."}}')
    Watched(target(tmp_path, found), Site("none", tmp_path)).judge("x", answer)
    assert found == []
