"""Tests of the relay, which delays, stalls and loses bytes but keeps their order."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stress.cluster.relay import CALM, Relay, Weather, command, serve
from tools.harness.processes import free_port


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while line := await reader.readline():
            writer.write(line)


@contextlib.asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Relay, int]]:
    """Yield a relay to a server that echoes lines, and the relay's port."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    relay = Relay("127.0.0.1", server.sockets[0].getsockname()[1])
    front = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    yield relay, front.sockets[0].getsockname()[1]
    front.close()
    server.close()


class Line:
    """A connection to the relay."""

    @classmethod
    async def open(cls, port: int) -> "Line":
        line = cls()
        line.reader, line.writer = await asyncio.open_connection("127.0.0.1", port)
        return line

    async def ask(self, text: str, within_s: float = 10) -> str:
        self.writer.write(f"{text}\n".encode())
        async with asyncio.timeout(within_s):
            return (await self.reader.readline()).decode().strip()


async def test_a_delay_applies_in_both_directions() -> None:
    async with relayed() as (relay, port):
        line = await Line.open(port)
        assert await line.ask("quick") == "quick"
        relay.set(Weather(delay_s=0.2))
        began = time.monotonic()
        assert await line.ask("slow") == "slow"
        assert time.monotonic() - began >= 0.4
        line.writer.close()


async def test_connections_overtake_each_other_but_their_bytes_do_not() -> None:
    async with relayed() as (relay, port):
        slow, quick = await Line.open(port), await Line.open(port)
        assert await slow.ask("a") == "a"
        relay.set(Weather(delay_s=0.5))
        slow.writer.write(b"first\n")
        await asyncio.sleep(0.1)
        relay.set(CALM)
        assert await quick.ask("overtakes", 0.3) == "overtakes"
        assert await slow.ask("second") == "first"
        assert (await slow.reader.readline()) == b"second\n"
        for line in (slow, quick):
            line.writer.close()


@pytest.mark.parametrize("way", ["up", "down"])
async def test_bytes_of_a_blocked_direction_arrive_later(way: str) -> None:
    async with relayed() as (relay, port):
        line = await Line.open(port)
        assert await line.ask("a") == "a"
        relay.set(Weather(**{way: False}))
        with pytest.raises(TimeoutError):
            await line.ask("b", 0.2)
        relay.set(CALM)
        assert await line.reader.readline() == b"b\n"
        line.writer.close()


async def test_bytes_of_a_blocked_direction_can_be_lost() -> None:
    async with relayed() as (relay, port):
        line = await Line.open(port)
        assert await line.ask("a") == "a"
        relay.set(Weather(down=False, loses=True))
        with pytest.raises(TimeoutError):
            await line.ask("b", 0.2)
        relay.set(CALM)
        assert await line.ask("c") == "c"
        line.writer.close()


async def test_the_relay_can_be_controlled_through_a_socket(tmp_path: Path) -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    target, port, control = server.sockets[0].getsockname()[1], free_port(), tmp_path / "control"
    serving = asyncio.create_task(serve(port, "127.0.0.1", target, control))
    while not control.exists():
        await asyncio.sleep(0.01)
    line = await Line.open(port)
    await command(control, Weather(stall=1.0, stall_s=0.2))
    began = time.monotonic()
    assert await line.ask("stalled") == "stalled"
    assert time.monotonic() - began >= 0.4
    line.writer.close()
    serving.cancel()
    server.close()
