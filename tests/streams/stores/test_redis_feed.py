"""Receiving other gateways' events, without a Redis server."""

import asyncio
from typing import Any, cast

from headrace.streams.stores.redis_feed import Feed
from headrace.streams.stores.redis_link import Link


class _Link:
    """A fake link, which is also its own client and the client's subscription."""

    def __init__(self) -> None:
        self.channels: list[str] = []
        self.client = self

    def pubsub(self) -> "_Link":
        return self

    async def subscribe(self, *channels: str) -> None:
        self.channels += channels

    async def get_message(self, timeout: float) -> dict[str, Any] | None:
        # As the client does without a subscription.
        if not self.channels:
            raise RuntimeError("pubsub connection not set")
        await asyncio.sleep(timeout)
        return None

    async def ping(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def test_the_feed_can_start_before_anybody_joins_a_channel() -> None:
    link = _Link()
    feed = Feed(cast(Link, link), "ask", lambda channel, data: None, lambda channel: None)
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(0.01)
    assert not running.done() and link.channels == ["ask"]
    running.cancel()
