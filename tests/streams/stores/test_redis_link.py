"""The connection to Redis, without a Redis."""

import asyncio

import pytest

from headrace.streams.stores.redis_link import Link


class SwallowingClient:
    """A client that answers although its caller was cancelled."""

    async def execute_command(self, *words: object) -> bytes:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return b"answer"
        return b""


async def test_a_cancelled_command_ends_although_the_client_swallows_the_cancellation() -> None:
    link = Link("redis://localhost:1/0")
    link.client = SwallowingClient()  # type: ignore[assignment]
    asking = asyncio.create_task(link.command("PING"))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
