"""The feed of other gateways' events: one connection, however many streams are followed."""

import asyncio
import contextlib
from collections.abc import Callable

from redis.asyncio.client import PubSub

from headrace.streams.stores.redis_link import LOST, RETRY_S, Link

_PING_S = 2.0


class Feed:
    """`run` is its task. What is published while it is not connected is missed.

    So `on_join` is called each time a channel has been joined: from then on nothing is missed.
    """

    def __init__(
        self, link: Link, on_message: Callable[[str, bytes], None], on_join: Callable[[str], None]
    ) -> None:
        self._link = link
        self._on_message = on_message
        self._on_join = on_join
        self._channels: dict[str, asyncio.Event] = {}  # set while it is joined
        self._to_leave: set[str] = set()
        self._pubsub: PubSub | None = None

    async def join(self, channel: str) -> None:
        """Returns once nothing published from now on is missed."""
        joined = self._channels.get(channel)
        if joined is None:
            joined = self._channels[channel] = asyncio.Event()
            self._to_leave.discard(channel)
            if self._pubsub is not None:
                with contextlib.suppress(*LOST):  # `run` notices too, and joins all anew
                    await self._pubsub.subscribe(channel)
        await joined.wait()

    def leave(self, channel: str) -> None:
        """Leaves the channel, with the next message of any."""
        if self._channels.pop(channel, None) is not None:
            self._to_leave.add(channel)

    async def run(self) -> None:
        while True:
            pubsub = self._link.client.pubsub()
            try:
                await self._listen(pubsub)
            except LOST:
                await asyncio.sleep(RETRY_S)
            finally:
                self._pubsub = None
                for joined in self._channels.values():
                    joined.clear()
                with contextlib.suppress(*LOST):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _listen(self, pubsub: PubSub) -> None:
        known: set[str] = set()
        while missing := self._channels.keys() - known:
            known |= missing
            await pubsub.subscribe(*missing)
        self._pubsub = pubsub
        self._to_leave.clear()
        is_pinged = False
        while True:
            message = await pubsub.get_message(timeout=_PING_S)
            if message is None:
                if is_pinged:
                    raise TimeoutError("no answer to a ping")
                await pubsub.ping()
            else:
                self._take(message["type"], message["channel"], message["data"])
            is_pinged = message is None
            if self._to_leave:
                leaving, self._to_leave = self._to_leave, set()
                await pubsub.unsubscribe(*leaving)

    def _take(self, kind: str, channel: bytes | None, data: bytes) -> None:
        name = (channel or b"").decode()
        if kind == "subscribe" and (joined := self._channels.get(name)) is not None:
            joined.set()
            self._on_join(name)
        elif kind == "message":
            self._on_message(name, data)
