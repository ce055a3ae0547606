import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from headrace.gateway import state_routes
from headrace.gateway.auth import Auth
from headrace.gateway.model_entries import model_kind
from headrace.gateway.model_routes import ModelRoutes
from headrace.gateway.polled_events import PolledState, Watch
from headrace.gateway.state_routes import ManageRoutes, Snapshot
from headrace.generation.event_builder import ChoiceProgress
from headrace.streams.events import Finish, Timings, Usage
from headrace.streams.record import Names
from headrace_common.config.settings import HttpConfig, ServerConfig
from headrace_common.messages import LaneFacts, Status, StepTrace
from headrace_common.plan import SourceSpec
from tests.gateway.builders import READY, FakeGeneration, NoStreams, app_of, ended

STEPS = [StepTrace(4, 35, 0.1, 0.11, 0.12, 0.07, ""), StepTrace(4, 0, 0, 0.03, 0.03, None, "")]


def client_of(generation: FakeGeneration, **http: Any) -> TestClient:
    app = app_of(generation, ServerConfig(http=HttpConfig(**http)))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def busy() -> FakeGeneration:
    generation = FakeGeneration()
    generation.fleet.hosts.first.engine.status = Status(4, 1, 2048, 90, 0, 2, missed={"model": 3})
    generation.fleet.hosts.first.engine.steps.extend(STEPS)
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


@pytest.mark.parametrize(
    ("highest", "last", "shown", "reason"),
    [
        (0.2, 0.2, 200, "set by --max-stall-ms"),
        (0.5, None, 200, "the default"),
        (0.5, 0.3125, 312, "raised from 200 ms: shorter steps would process prompts too slowly"),
    ],
)
def test_the_state_and_props_show_the_stall_target_and_why(
    highest: float, last: float | None, shown: int, reason: str
) -> None:
    generation = FakeGeneration()
    host = generation.fleet.hosts.first
    host.ready = msgspec.structs.replace(READY, max_stall_s=0.2, highest_stall_s=highest)
    if last is not None:
        host.engine.steps.append(msgspec.structs.replace(STEPS[0], stall_target=last))
    client = client_of(generation)
    for state in (client.get("/manage/state").json()["engine"], client.get("/props").json()):
        assert (state["stall_target_ms"], state["stall_target_reason"]) == (shown, reason)


def test_the_state_is_available_before_the_first_request() -> None:
    state = client_of(FakeGeneration()).get("/manage/state").json()
    assert (state["running"], state["steps"], state["uptime_s"] >= 0) == (0, [], True)


def test_health_reports_the_ages_of_the_last_step_and_the_oldest_silent_stream() -> None:
    generation = FakeGeneration()
    client = client_of(generation)
    unknown = {"last_step_age_s": None, "silent_stream_age_s": None}
    assert client.get("/health").json() == {"status": "ok"} | unknown
    generation.metrics.engine.show_status(Status(4, 1, 2048, 90, 0, 2), READY)
    live = [SimpleNamespace(silent_s=age, state="prompt", num_readers=1) for age in (0.5, 61.04)]
    generation.streams = type("Live", (NoStreams,), {"__iter__": lambda self: iter(live)})()
    shown = client.get("/health").json()
    assert shown["silent_stream_age_s"] == 61.0 and 0 <= shown["last_step_age_s"] < 60
    assert client.get("/manage/state").json()["silent_stream_age_s"] == 61.0
    assert "headrace_silent_stream_age_seconds 61.04" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("http", "headers", "status"),
    [
        ({}, {}, 200),
        ({}, {"host": "somewhere.example"}, 403),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"api_key": ("k",)}, {"x-api-key": "k"}, 403),
        ({"api_key": ("k",), "admin_key": "a"}, {"x-api-key": "k"}, 403),
        ({"api_key": ("k",), "admin_key": "a"}, {"x-api-key": "a"}, 200),
        ({"host": "0.0.0.0", "admin_key": "a"}, {"authorization": "Bearer a"}, 200),
        ({"admin_key": "a"}, {}, 401),
        ({"admin_key": "a"}, {"x-api-key": "b"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/manage/state", "/manage/live", "/manage/history", "/metrics"])
def test_the_state_requires_a_local_request_or_the_admin_key(
    path: str, http: Any, headers: Any, status: int
) -> None:
    assert client_of(busy(), **http).get(path, headers=headers).status_code == status


def test_the_admin_key_is_also_valid_for_client_routes() -> None:
    client = client_of(busy(), api_key=("k",), admin_key="a")
    assert client.get("/v1/models", headers={"x-api-key": "a"}).status_code == 200
    assert client.get("/v1/models", headers={"x-api-key": "b"}).status_code == 401


def test_a_drain_is_visible_repeatable_and_can_be_undone() -> None:
    client = client_of(busy())
    for _ in range(2):
        assert client.post("/manage/drain").json() == {"status": "draining", "streams": 0}
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert int(health.headers["Retry-After"]) >= 1
    assert client.get("/props").json()["state"] == "draining"
    assert client.get("/health/live").status_code == 200
    assert client.delete("/manage/drain").json() == {"status": "ok", "streams": 0}
    assert client.get("/health").status_code == 200


def test_changing_the_model_list_requires_the_admin_key() -> None:
    client = client_of(busy(), api_key=("k",), admin_key="a")
    sent = [client.put("/manage/desired", json={}, headers={"x-api-key": key}) for key in "ka"]
    assert [one.json()["error"]["code"] for one in sent] == ["forbidden", "unsupported_operation"]


@pytest.mark.parametrize(
    ("http", "key", "code"),
    [
        ({}, "", "unsupported_operation"),  # of a server with one model; it was let in
        ({"host": "0.0.0.0"}, "", "unsupported_operation"),
        ({"api_key": ("k",)}, "k", "forbidden"),
        ({"api_key": ("k",), "admin_key": "a"}, "k", "forbidden"),
        ({"api_key": ("k",), "admin_key": "a"}, "a", "unsupported_operation"),
        ({"admin_key": "a"}, "", "invalid_api_key"),
    ],
)
def test_unloading_a_model_requires_the_admin_key_if_keys_are_set(
    http: Any, key: str, code: str
) -> None:
    client, body = client_of(busy(), **http), {"model": "headrace-mini"}
    error = client.post("/models/unload", json=body, headers={"x-api-key": key}).json()["error"]
    assert error["code"] == code
    assert ("admin key" in error["message"]) == (code != "unsupported_operation")
    if "api_key" in http:  # what every request does, a client's key may do
        assert client.post("/models/load", json=body, headers={"x-api-key": "k"}).is_success


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_changing_adapters_requires_the_admin_key_if_keys_are_set(path: str) -> None:
    client = client_of(busy(), api_key=("k",), admin_key="a")
    sent = [client.post(path, json={}, headers={"x-api-key": key}) for key in "ka"]
    codes = [one.json()["error"]["code"] for one in sent]
    assert codes == ["forbidden", "missing_required_parameter"]


def test_a_page_of_another_origin_cannot_drain_a_server_without_keys() -> None:
    generation = busy()
    foreign = {"origin": "https://evil.example"}
    assert client_of(generation).post("/manage/drain", headers=foreign).status_code == 403
    assert generation.state == "ok"


def stream_of(owner: str, choice_progress: dict[int, ChoiceProgress]) -> Any:
    record = SimpleNamespace(names=Names(owner=owner))
    return SimpleNamespace(record=record, choice_progress=lambda: choice_progress)


def test_a_key_sees_its_own_requests_in_slots_and_the_admin_key_sees_all() -> None:
    generation = busy()
    config = HttpConfig(api_key=("ann", "bob"), admin_key="boss")
    ann = Auth(config).owner(Headers({"x-api-key": "ann"}))
    others = {number: ChoiceProgress(0, 50, 50, 0, 1, None) for number in range(7)}
    generation.fleet.hosts.first.streams = [
        stream_of("other", others),
        stream_of(ann, {8: ChoiceProgress(0, 20, 12, 4, 3, None)}),
    ]
    client = client_of(generation, api_key=("ann", "bob"), admin_key="boss")
    route, seen = "/slots?fail_on_no_slot=1", {}
    for key in ("ann", "bob", "boss"):
        answer = client.get(route, headers={"x-api-key": key})
        if answer.is_success:
            assert len(answer.json()) == 8
            seen[key] = [it["id_task"] for it in answer.json() if it["is_processing"]]
    assert seen == {"ann": [8], "bob": []}  # all are busy, and the admin is told
    assert len(client.get("/slots", headers={"x-api-key": "boss"}).json()) == 8


def test_slots_describe_the_running_sequences() -> None:
    generation = busy()
    choice_progress = {
        7: ChoiceProgress(0, 20, 12, 4, 3, None),
        9: ChoiceProgress(1, 20, 20, 4, 5, 6),
    }
    generation.fleet.hosts.first.streams = [stream_of("", choice_progress)]
    first, second, *idle = client_of(generation).get("/slots").json()
    assert first == {
        "id": 0,
        "is_processing": True,
        "id_task": 7,
        "model": "headrace-mini",
        "n_ctx": 128,
        "n_prompt_tokens": 20,
        "n_prompt_tokens_processed": 12,
        "n_prompt_tokens_cache": 4,
        "next_token": [{"n_decoded": 3, "n_remain": -1}],
    }
    assert (second["id_task"], second["next_token"]) == (9, [{"n_decoded": 5, "n_remain": 6}])
    assert idle == [{"id": id, "is_processing": False} for id in range(2, 8)]
    assert client_of(generation).get("/slots?fail_on_no_slot=1").status_code == 200


def test_fail_on_no_slot_returns_503_if_all_slots_are_busy() -> None:
    generation = busy()
    choice_progress = {
        n: ChoiceProgress(n, 2, 2, 0, 1, 1) for n in range(9)
    }  # one has lost its memory
    generation.fleet.hosts.first.streams = [stream_of("", choice_progress)]
    assert len(client_of(generation).get("/slots").json()) == 8
    refused = client_of(generation).get("/slots?fail_on_no_slot=1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_idle_slot")


def test_metrics_have_vllms_names_if_configured() -> None:
    assert "vllm:" not in client_of(busy()).get("/metrics").text
    shown = client_of(busy(), vllm_metrics=True).get("/metrics").text
    assert 'vllm:num_requests_waiting{engine="0",model_name="headrace-mini"} ' in shown


async def watch(shown: list[Snapshot], num_frames: int, heartbeat_s: float = 100) -> list[str]:
    """Return the first frames of a watch over these snapshots; the last one is repeated."""

    def read() -> Snapshot:
        return shown.pop(0) if len(shown) > 1 else shown[0]

    routes = ManageRoutes(FakeGeneration())  # type: ignore[arg-type]
    app = Watch(PolledState(read, routes.changed, 0), b": \n\n", heartbeat_s)
    return await frames_of(app, num_frames)


async def frames_of(app: ASGIApp, num_frames: int) -> list[str]:
    frames: list[str] = []
    enough = asyncio.Event()

    async def receive() -> Any:
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert (b"x-accel-buffering", b"no") in message["headers"]
        if body := message.get("body"):
            frames.append(body.decode())
        if len(frames) == num_frames:
            enough.set()

    async with asyncio.timeout(10):
        await app({"type": "http"}, receive, send)
    return frames[:num_frames]


async def test_the_state_stream_sends_the_state_first_and_after_each_change() -> None:
    frames = await watch([{"n": 1}, {"n": 1}, {"n": 2}], 2)
    shown = [json.loads(frame.split("data: ")[1]) for frame in frames]
    assert [one["n"] for one in shown] == [1, 2] and all("uptime_s" in one for one in shown)


async def test_the_state_stream_sends_heartbeats_while_nothing_changes() -> None:
    frames = await watch([{"n": 1}], 3, heartbeat_s=0)
    assert frames[1] == frames[2] == ": \n\n"


async def test_all_watchers_share_one_reading_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    generation, readings = FakeGeneration(), 0

    def read(*_: object) -> Any:
        nonlocal readings
        readings += 1
        return [{"id": "a", "status": {"value": "loaded"}}]

    monkeypatch.setattr(state_routes, "snapshot", read)
    monkeypatch.setattr(ModelRoutes, "_entries", read)
    manage = ManageRoutes(generation)  # type: ignore[arg-type]
    models = ModelRoutes(generation, None)  # type: ignore[arg-type]
    monkeypatch.setattr(manage, "_with_uptime", lambda shown: {"shown": shown})
    manage._watched.interval_s = models._statuses.interval_s = 100
    for number, route in enumerate((manage.stream, models.events), 1):
        for _ in range(3):
            (frame,) = await frames_of(await route(None), 1)  # type: ignore[arg-type]
            assert "loaded" in frame
        assert readings == number


@pytest.mark.parametrize(
    "kind, facts",
    [
        ("text", {}),
        ("image-text", {"facts": LaneFacts(encoder="whole")}),
        ("seq2seq", {"facts": LaneFacts(encoder="whole"), "source": SourceSpec((1,))}),
        ("embedding", {"tasks": ("embed",)}),
        ("ranking", {"tasks": ("score",)}),
    ],
)
def test_a_model_is_listed_with_its_kind(kind: str, facts: dict[str, Any]) -> None:
    assert model_kind(msgspec.structs.replace(READY, **facts)) == kind


def test_a_model_requested_by_its_path_is_reported_by_its_name() -> None:
    finish = Finish(seq=0, at_ms=0, ends=(ended().end,), usage=Usage(2, 1), timings=Timings())
    client = client_of(FakeGeneration(ended(), finish))
    path = "/models/mini.gguf"  # as versions before called a model without a name
    for route, field in (("completions", "prompt"), ("embeddings", "input")):
        answer = client.post(f"/v1/{route}", json={"model": path, field: "a"})
        assert answer.status_code == 200 and path not in answer.text
    assert client.get(f"/v1/models/{path}").json()["id"] == "headrace-mini"
    assert path not in client.get("/v1/models").text + client.get("/props").text
