"""Tests the connection to Redis without a Redis server."""

import asyncio

import pytest
import uvloop

from headrace.streams.stores.redis_link import LOST, Link, broken_as_lost


class SwallowingClient:
    """A fake client that answers although its caller was cancelled."""

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


def test_a_connection_that_was_just_closed_counts_as_lost() -> None:
    # This happens if a machine vanishes between two commands; uvloop raises its own error.

    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError):
            writer.writelines([b"PING"])
        with pytest.raises(LOST), broken_as_lost():
            writer.writelines([b"PING"])
        server.close()

    uvloop.run(main())


async def test_a_connection_on_which_two_tasks_wait_counts_as_lost() -> None:
    # This happens if the feed and a request that joins a channel reconnect concurrently.
    reader = asyncio.StreamReader()
    first = asyncio.create_task(reader.readuntil())
    await asyncio.sleep(0)
    with pytest.raises(LOST), broken_as_lost():
        await reader.readuntil()
    first.cancel()


class ClosedClient:
    """A fake client whose connection is closed."""

    async def execute_command(self, *words: object) -> bytes:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")


async def test_a_command_on_a_closed_connection_counts_as_lost() -> None:
    link = Link("redis://localhost:1/0")
    link.client = ClosedClient()  # type: ignore[assignment]
    with pytest.raises(LOST):
        await link.command("PING")


async def test_other_failures_of_a_command_are_not_lost_connections() -> None:
    with pytest.raises(RuntimeError, match="a bug"), broken_as_lost():
        raise RuntimeError("a bug")
