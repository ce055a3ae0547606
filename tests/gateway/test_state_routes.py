import asyncio
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.core.config import HttpConfig, ServerConfig
from headrace.core.messages import Status, StepTrace
from headrace.gateway.app import create_app
from headrace.gateway.state_routes import Snapshot, Watch
from tests.gateway.builders import FakeGeneration, in_loop

STEPS = [StepTrace(4, 35, 0.1, 0.11, 0.12, 0.07, ""), StepTrace(4, 0, 0, 0.03, 0.03, None, "")]


def client_of(generation: FakeGeneration, **http: Any) -> TestClient:
    app = create_app(generation, ServerConfig(http=HttpConfig(**http)))  # type: ignore[arg-type]
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def busy() -> FakeGeneration:
    generation = FakeGeneration()
    generation.status = Status(4, 1, 2048, 90, 0, 2, missed={"model": 3})
    generation.steps = STEPS
    return generation


def test_the_state_shows_work_steps_and_missed_targets() -> None:
    state = client_of(busy()).get("/manage/state").json()
    assert (state["state"], state["running"]) == ("ok", 4)
    assert (state["engine"]["state"], state["engine"]["pid"]) == ("up", 4711)
    assert state["waiting"] == {"requests": 1, "tokens": 2048}
    assert state["missed"] == {"model": 3}
    mixed, decode = state["steps"]
    assert mixed == {
        "kind": "mixed",
        "decoding": 4,
        "prompt_tokens": 35,
        "predicted_ms": 100,
        "actual_ms": 110,
        "elapsed_ms": 120,
        "room_ms": 70,
        "cause": "",
    }
    assert (decode["kind"], decode["room_ms"]) == ("decode", None)


def test_a_server_that_has_not_worked_yet_has_a_state_too() -> None:
    state = client_of(FakeGeneration()).get("/manage/state").json()
    assert (state["running"], state["steps"], state["uptime_s"] >= 0) == (0, [], True)


@pytest.mark.parametrize(
    ("http", "headers", "status"),
    [
        ({}, {}, 200),
        ({}, {"host": "somewhere.example"}, 403),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"api_key": ("k",)}, {}, 401),
        ({"api_key": ("k",), "host": "0.0.0.0"}, {"x-api-key": "k"}, 200),
    ],
)
def test_state_is_for_this_machine_or_for_keys(http: Any, headers: Any, status: int) -> None:
    assert client_of(busy(), **http).get("/manage/state", headers=headers).status_code == status


async def watch(shown: list[Snapshot], num_frames: int, heartbeat_s: float = 100) -> list[str]:
    """The first frames of a watch that sees these snapshots, the last one for ever."""
    frames: list[str] = []
    enough = asyncio.Event()

    async def receive() -> Any:
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if body := message.get("body"):
            frames.append(body.decode())
        if len(frames) == num_frames:
            enough.set()

    def look() -> Snapshot:
        return shown.pop(0) if len(shown) > 1 else shown[0]

    app = Watch(look, lambda snapshot: {"uptime_s": 1} | snapshot, 0, heartbeat_s)
    async with asyncio.timeout(10):
        await app({"type": "http"}, receive, send)
    return frames[:num_frames]


@in_loop
async def test_a_stream_shows_the_state_at_once_and_after_each_change() -> None:
    frames = await watch([{"n": 1}, {"n": 1}, {"n": 2}], 2)
    assert [json.loads(frame.split("data: ")[1]) for frame in frames] == [
        {"uptime_s": 1, "n": 1},
        {"uptime_s": 1, "n": 2},
    ]


@in_loop
async def test_a_stream_without_changes_shows_signs_of_life() -> None:
    frames = await watch([{"n": 1}], 3, heartbeat_s=0)
    assert frames[1] == frames[2] == "event: heartbeat\ndata: {}\n\n"
