"""Both clients' stops, over what lies before the server."""

import asyncio
import contextlib
import time

import pytest

from headrace import AsyncClient, Client
from tests.client.builders import STREAM, Given, ListedServer, accepted, listed_server, tokens

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
