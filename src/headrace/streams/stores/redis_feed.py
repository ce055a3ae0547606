"""Receives other gateways' events of all followed streams over one connection."""

import asyncio
import contextlib
from collections.abc import Callable

from redis.asyncio.client import PubSub

from headrace.streams.stores.redis_link import LOST, RETRY_S, Link, broken_as_lost

_PING_S = 2.0


class Feed:
    """Subscribes to `channel` and to the channels that are joined; `run` is its task.

    The feed misses messages that are published while the feed is not connected. So `on_join` is
    called each time a channel has been joined. The caller must then read earlier events from the
    logs; the feed receives all later messages.
    """

    def __init__(
        self,
        link: Link,
        channel: str,
        on_message: Callable[[str, bytes], None],
        on_join: Callable[[str], None],
    ) -> None:
        self._link = link
        self._on_message = on_message
        self._on_join = on_join
        # The asyncio event of each channel is set while the channel is joined.
        self._channels = {channel: asyncio.Event()}
        self._to_leave: set[str] = set()
        self._pubsub: PubSub | None = None
        # The connection on which a channel could not be joined.
        self._incomplete: PubSub | None = None

    async def join(self, channel: str) -> None:
        """Join a channel; return once the subscription is active."""
        joined = self._channels.get(channel)
        if joined is None:
            joined = self._channels[channel] = asyncio.Event()
            self._to_leave.discard(channel)
            if (pubsub := self._pubsub) is not None:
                try:
                    with broken_as_lost():
                        await pubsub.subscribe(channel)
                except LOST:
                    # The redis client may have connected again by itself, without this channel.
                    # So `run` has to join all channels again.
                    self._incomplete = pubsub
        await joined.wait()

    def leave(self, channel: str) -> None:
        """Leave the channel after the next message of any channel or the next ping."""
        if (joined := self._channels.pop(channel, None)) is not None:
            # A reader may still wait in `join`, for example if its gateway takes over the stream.
            joined.set()
            self._to_leave.add(channel)

    async def run(self) -> None:
        while True:
            pubsub = self._link.client.pubsub()
            try:
                with broken_as_lost():
                    await self._listen(pubsub)
            except LOST:
                await asyncio.sleep(RETRY_S)
            finally:
                self._pubsub = None
                for joined in self._channels.values():
                    joined.clear()
                with contextlib.suppress(*LOST), broken_as_lost():
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
            if self._incomplete is pubsub:
                raise ConnectionResetError("a channel could not be joined")
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
