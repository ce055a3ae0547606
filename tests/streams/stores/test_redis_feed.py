"""Tests receiving events of other gateways without a Redis server."""

import asyncio
from typing import Any, cast

import pytest

from headrace.streams.stores import redis_feed
from headrace.streams.stores.redis_feed import Feed
from headrace.streams.stores.redis_link import Link


class _Link:
    """A fake link, which is also its own client and the client's subscription."""

    def __init__(self) -> None:
        self.channels: list[str] = []
        self.client = self
        self.num_connections = 0
        self.breaks = self.is_pinged = False

    def pubsub(self) -> "_Link":
        self.num_connections += 1
        return self

    async def subscribe(self, *channels: str) -> None:
        if self.breaks:
            # The client has connected again by itself, without the new channel.
            self.breaks = False
            raise ConnectionError("broken")
        self.channels += channels

    async def get_message(self, timeout: float) -> dict[str, Any] | None:
        # The real client raises this error without a subscription.
        if not self.channels:
            raise RuntimeError("pubsub connection not set")
        await asyncio.sleep(timeout)
        is_pinged, self.is_pinged = self.is_pinged, False
        return {"type": "pong", "channel": None, "data": b""} if is_pinged else None

    async def ping(self) -> None:
        self.is_pinged = True

    async def aclose(self) -> None:
        pass


async def test_the_feed_can_start_before_anybody_joins_a_channel() -> None:
    link = _Link()
    feed = Feed(cast(Link, link), "ask", lambda channel, data: None, lambda channel: None)
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(0.01)
    assert not running.done() and link.channels == ["ask"]
    running.cancel()


async def test_a_reader_does_not_wait_for_a_channel_that_was_left() -> None:
    link = _Link()
    feed = Feed(cast(Link, link), "ask", lambda channel, data: None, lambda channel: None)
    joining = asyncio.create_task(feed.join("stream"))
    await asyncio.sleep(0)
    feed.leave("stream")
    await asyncio.wait_for(joining, 10)


async def test_a_channel_that_could_not_be_joined_is_joined_on_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_feed, "_PING_S", 0.01)
    link = _Link()
    feed = Feed(cast(Link, link), "ask", lambda channel, data: None, lambda channel: None)
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(0.005)
    link.breaks = True
    joining = asyncio.create_task(feed.join("stream"))
    async with asyncio.timeout(10):
        while "stream" not in link.channels:
            await asyncio.sleep(0.01)
    assert link.num_connections == 2
    running.cancel()
    joining.cancel()
