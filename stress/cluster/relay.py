"""A TCP relay that delays, stalls and loses bytes. A kernel without netem cannot do this.

    python -m stress.cluster.relay LISTEN_PORT HOST PORT CONTROL_SOCKET

The relay runs on the machine of the connecting side. Each line that is written to the control
socket is a JSON object with fields of `Weather`, which apply to all connections from then on.

TCP repeats lost packets, so a loss appears as a stall of one connection. Each connection draws its
own delays, so bytes of two connections can overtake each other; bytes of one connection cannot.
"""

import asyncio
import contextlib
import random
import sys
import time
from pathlib import Path

import msgspec

_CHUNK = 1 << 16


class Weather(msgspec.Struct, frozen=True):
    """Describes how bytes travel.

    `delay_s` and `spread_s`: each piece takes this long, and a random time up to `spread_s` more.
    `stall`: the probability that a piece takes `stall_s` longer, as a repeated packet does.
    `up` and `down`: whether bytes to the server, and bytes from the server, arrive; else they wait.
    `loses`: whether bytes that would wait are discarded instead, as if their sender had given up.
    """

    delay_s: float = 0.0
    spread_s: float = 0.0
    stall: float = 0.0
    stall_s: float = 0.2
    up: bool = True
    down: bool = True
    loses: bool = False


CALM = Weather()


class Relay:
    """Relays connections to one server; `weather` may be replaced at any time."""

    def __init__(self, host: str, port: int, seed: str = "") -> None:
        self.weather = CALM
        self._target = host, port
        self._random = random.Random(seed)
        self._changed = asyncio.Event()

    def set(self, weather: Weather) -> None:
        self.weather = weather
        self._changed.set()
        self._changed = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side closes or breaks it."""
        try:
            # A connection needs packets in both directions.
            await self._passable("up")
            await self._passable("down")
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.create_task(self._carry(reader, up_writer, "up")),
            asyncio.create_task(self._carry(up_reader, writer, "down")),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        up_writer.transport.abort()
        writer.transport.abort()

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: str
    ) -> None:
        """Carry pieces in order. Each has a time at which it is due, so delays do not add up."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(pieces, target, way))
        try:
            while piece := await source.read(_CHUNK):
                pieces.put_nowait((time.monotonic() + self._delay_s(), piece))
            pieces.put_nowait((time.monotonic() + self._delay_s(), b""))
            await sending
        finally:
            sending.cancel()

    async def _send(
        self,
        pieces: "asyncio.Queue[tuple[float, bytes]]",
        target: asyncio.StreamWriter,
        way: str,
    ) -> None:
        while True:
            due_at, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            if self.weather.loses and not getattr(self.weather, way):
                continue
            await self._passable(way)
            if not piece:
                return
            target.write(piece)
            await target.drain()

    def _delay_s(self) -> float:
        now = self.weather
        stall_s = now.stall_s if self._random.random() < now.stall else 0.0
        return now.delay_s + self._random.uniform(0.0, now.spread_s) + stall_s

    async def _passable(self, way: str) -> None:
        while not getattr(self.weather, way):
            await self._changed.wait()


async def serve(port: int, host: str, target_port: int, control: Path) -> None:
    """Relay until cancelled."""
    relay = Relay(host, target_port)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            relay.set(msgspec.json.decode(line, type=Weather))
            writer.write(b"ok\n")
        writer.close()

    data = await asyncio.start_server(relay.accept, "127.0.0.1", port)
    controlled = await asyncio.start_unix_server(listen, control)
    async with data, controlled:
        await asyncio.gather(data.serve_forever(), controlled.serve_forever())


async def command(control: Path, weather: Weather) -> None:
    """Change the weather of the relay with this control socket; return when it has changed."""
    reader, writer = await asyncio.open_unix_connection(control)
    writer.write(msgspec.json.encode(weather) + b"\n")
    assert await reader.readline() == b"ok\n"
    writer.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
