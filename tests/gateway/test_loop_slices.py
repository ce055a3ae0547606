"""Tests how much event loop time reading a long log takes, for one or many readers."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any
from unittest import mock

import pytest
from starlette.applications import Starlette

from headrace.protocols.dialect import WireFrames
from headrace.streams.events import AnyEvent
from headrace.workers.job_queue import OWNER
from headrace.workers.loop_slices import SLICE_S, slice_of_loop
from headrace_common.config.settings import ServerConfig
from tests.gateway.builders import (
    FakeGeneration,
    OneStream,
    app_of,
    ended,
    ended_stream,
    make_record,
    make_request,
    tokens,
)

RECORD = make_record(make_request(response_options={"stream": True}))
NUM_EVENTS = 1003
EVENTS = f"/v1/streams/{RECORD.id}/events"
ASKED = [(EVENTS, "view=wire&after=1000.0"), ("/v1/stream", "conv_id=c&from=99999999")]
STATE = f"/v1/streams/{RECORD.id}"
Messages = list[dict[str, Any]]


class Rendered(list[int]):
    """The numbers of the rendered events; rendering one takes a twentieth of a slice."""

    def render(self, frames: WireFrames, event: AnyEvent) -> list[bytes]:
        self.append(event.seq)
        until = time.perf_counter() + SLICE_S / 20
        while time.perf_counter() < until:
            pass
        return [b"x"]


@pytest.fixture
def rendered() -> Iterator[Rendered]:
    seen = Rendered()
    with mock.patch.object(WireFrames, "render", lambda *given: seen.render(*given)):
        yield seen


def app_of_long_log() -> Starlette:
    generation = FakeGeneration()
    generation.streams = OneStream(ended_stream(RECORD, *[tokens("Hi", 5)] * 1000, ended()))
    return app_of(generation, ServerConfig())


def ask(app: Starlette, path: str, query: str, left: asyncio.Event) -> asyncio.Task[Messages]:
    """Start a GET whose client disconnects when `left` is set."""
    coming = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if coming:
            return coming.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def answer() -> Messages:
        sent: Messages = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode()}
        scope |= {"headers": [(b"host", b"localhost")], "scheme": "http", "root_path": ""}
        await app(scope | {"server": ("localhost", 80)}, receive, send)
        return sent

    return asyncio.create_task(answer())


async def until_begun(rendered: Rendered) -> None:
    while not rendered:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("path", "query"), [*ASKED, (STATE, "")])
async def test_disconnected_readers_cost_almost_no_rendering(
    path: str, query: str, rendered: Rendered
) -> None:
    app, gone = app_of_long_log(), asyncio.Event()
    gone.set()
    asking = [ask(app, path, query, gone) for _ in range(200)]
    assert await asyncio.gather(*asking) == [[]] * 200
    assert len(rendered) < 100


async def test_a_log_is_measured_once_for_many_readers(rendered: Rendered) -> None:
    app, stays = app_of_long_log(), asyncio.Event()
    asking = [ask(app, *ASKED[1], stays) for _ in range(20)]
    answers = await asyncio.gather(*asking)
    assert [answer[0]["status"] for answer in answers] == [416] * 20
    assert len(rendered) == NUM_EVENTS


@pytest.mark.parametrize(("path", "query"), [*ASKED, (STATE, ""), (EVENTS, "view=wire")])
async def test_other_tasks_run_after_each_slice(path: str, query: str, rendered: Rendered) -> None:
    app, leaves = app_of_long_log(), asyncio.Event()
    asking = [ask(app, path, query, leaves) for _ in range(50)]
    most = before = 0
    for _ in range(60):
        await asyncio.sleep(0)
        most, before = max(most, len(rendered) - before), len(rendered)
    assert before > 60
    assert most <= 20 + 50  # a slice, and the first event of each
    leaves.set()
    await asyncio.gather(*asking)


@pytest.mark.parametrize(("path", "query"), [*ASKED, (STATE, ""), (EVENTS, "view=wire")])
async def test_rendering_stops_when_the_client_disconnects(
    path: str, query: str, rendered: Rendered
) -> None:
    leaves = asyncio.Event()
    asking = ask(app_of_long_log(), path, query, leaves)
    await until_begun(rendered)
    leaves.set()
    await asking
    assert len(rendered) < 200


async def test_a_second_reader_continues_the_count_of_one_that_disconnects(
    rendered: Rendered,
) -> None:
    app, leaves, stays = app_of_long_log(), asyncio.Event(), asyncio.Event()
    first, second = ask(app, *ASKED[1], leaves), ask(app, *ASKED[1], stays)
    await until_begun(rendered)
    leaves.set()
    assert await first == []
    assert (await second)[0]["status"] == 416
    assert list(rendered) == list(range(NUM_EVENTS))


async def test_waiting_tasks_get_slices_in_turn() -> None:
    order: list[str] = []

    async def work(name: str) -> None:
        for _ in range(3):
            await slice_of_loop()
            order.append(name)
            time.sleep(2 * SLICE_S)  # noqa: ASYNC251

    works: list[Coroutine[Any, Any, None]] = [work("a"), work("b"), work("c")]
    await asyncio.gather(*works)
    assert order == list("abc") * 3


async def test_a_key_with_few_requests_gets_as_many_slices_as_a_busy_one() -> None:
    order: list[str] = []

    async def work(owner: str) -> None:
        OWNER.set(owner)
        for _ in range(3):
            await slice_of_loop()
            order.append(owner)
            time.sleep(2 * SLICE_S)  # noqa: ASYNC251

    await asyncio.gather(*(work(owner) for owner in ("many",) * 5 + ("one",)))
    assert order.index("one") <= 2 and [*order[:7]].count("one") == 3
