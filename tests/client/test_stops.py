"""Both clients' stops, over what lies before the server."""

import asyncio
import contextlib
import threading
import time

import httpx
import pytest

from headrace import AsyncClient, Client, RequestFailed
from headrace.client import async_client as asynchronous
from headrace.client import client as blocking
from tests.client.builders import STREAM, Given, ListedServer, accepted, listed_server, tokens
from tools.harness.eventually import eventually

BEGUN = (Given(headers={"x-stream-id": STREAM}), Given(body=accepted() + tokens(1, "a")))
CANCEL = f"POST /v1/streams/{STREAM}/cancel"


def leave(server: ListedServer) -> None:
    with Client(server.url) as client, contextlib.closing(client.stream("hi").updates()) as updates:
        next(updates)


async def leave_async(server: ListedServer) -> None:
    async with (
        AsyncClient(server.url) as client,
        contextlib.aclosing(client.stream("hi").updates()) as updates,
    ):
        await anext(updates)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stop_that_a_balancer_lost_is_asked_again(is_async: bool) -> None:
    with listed_server(*BEGUN, Given(502), Given(504), Given(200), Given(500)) as server:
        if is_async:
            asyncio.run(leave_async(server))
        else:
            leave(server)
    assert server.asked[2:] == [CANCEL] * 3


def test_a_server_that_does_not_come_back_keeps_nobody_who_leaves() -> None:
    begun = time.monotonic()
    with listed_server(*BEGUN, Given(503)) as server:
        leave(server)
    assert 1 < server.asked.count(CANCEL) < 9 and time.monotonic() - begun < 30


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_answers_no_stop_is_asked_once(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocking, asynchronous):
        monkeypatch.setattr(module, "STOP_TIMEOUT", httpx.Timeout(0.5))
    with listed_server(*BEGUN, Given(0, is_held=True)) as server:
        if is_async:
            asyncio.run(leave_async(server))
        else:
            leave(server)
    assert server.asked.count(CANCEL) == 1


HELD = Given(body=accepted() + tokens(1, "a"), missing=1000, is_held=True)
"""The first events of a stream that is still running."""


def test_a_client_is_closed_while_a_thread_reads() -> None:
    def read() -> None:
        with contextlib.suppress(RequestFailed):
            list(stream)

    with listed_server(BEGUN[0], HELD, Given()) as server:
        client = Client(server.url)
        stream = client.stream("hi")
        reading = threading.Thread(target=read)
        reading.start()
        eventually(lambda: stream.cursor == 1)
        client.close()
        assert server.asked[2] == CANCEL
    reading.join(60)


def test_an_asynchronous_client_is_closed_while_a_task_reads() -> None:
    async def run() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.stream("hi")
            reading = asyncio.create_task(stream.answer())
            while stream.cursor < 1:
                await asyncio.sleep(0.01)
        with pytest.raises(RequestFailed, match="was closed"):
            await reading

    with listed_server(BEGUN[0], HELD, Given()) as server:
        asyncio.run(asyncio.wait_for(run(), 60))
    assert server.asked[2] == CANCEL
