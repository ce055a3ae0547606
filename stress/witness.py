"""A TCP proxy that cuts, slows down and records connections of any protocol."""

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable

import msgspec

_RESET = struct.pack("ii", 1, 0)
_CHUNK = 1 << 16
_SLOW_CHUNK, _SLOW_PAUSE_S = 256, 0.01


class Fate(msgspec.Struct, frozen=True):
    """The faults of one connection. `cut`: rst, fin, half (only the client's side) or none."""

    cut: str = "none"
    # How many bytes of the answer, head included, pass before the cut.
    after_bytes: int = 0
    # How many bytes of the answer are read slowly.
    num_slow: int = 0


class Passage:
    """One connection as the proxy saw it, including bytes that the client did not receive."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.began = time.monotonic()
        self.answer = bytearray()
        # Pairs of a time and the number of bytes that had arrived by then.
        self.arrivals: list[tuple[float, int]] = []
        self.was_cut = False
        self.done = asyncio.Event()

    def note(self, piece: bytes) -> None:
        self.answer += piece
        self.arrivals.append((time.monotonic(), len(self.answer)))


class Fates:
    """Draws what happens to each connection. The fraction `share` is cut, and a tenth is slow."""

    def __init__(self, seed: str, share: float) -> None:
        self._random = random.Random(seed)
        self._share = share

    def draw(self) -> Fate:
        is_cut = self._random.random() < self._share
        cut = self._random.choice(("rst", "rst", "fin", "fin", "half")) if is_cut else "none"
        # Logarithmic, so that cuts hit heads, first frames and late frames alike.
        after = int(10 ** self._random.uniform(0, 4.8))
        num_slow = self._random.choice((2_000, 20_000)) if self._random.random() < 0.1 else 0
        return Fate(cut, after, num_slow)


def _ignore(piece: bytes) -> None:
    pass


class Proxy:
    """Forwards connections to `port` of `host`. The client's port identifies its connection.

    `hear` receives the server's bytes as they arrive.
    """

    def __init__(
        self,
        port: int,
        fates: Fates,
        hear: Callable[[bytes], None] = _ignore,
        host: str = "127.0.0.1",
    ) -> None:
        self.port = 0
        self.num_cuts = 0
        # If set, no more connections are cut.
        self.is_calm = False
        self._target = host, port
        self._fates = fates
        self._hear = hear
        self._passages: dict[int, Passage] = {}
        self._watchers: list[tuple[bytes, asyncio.Future[None]]] = []
        self._server: asyncio.Server

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()

    def passage(self, client_port: int) -> Passage | None:
        """Return the newest connection from that port, and forget it."""
        return self._passages.pop(client_port, None)

    async def saw(self, pattern: bytes, within_s: float) -> bool:
        """Waits until a server sends the pattern; returns False after `within_s` seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (pattern, future)
        self._watchers.append(entry)
        try:
            await asyncio.wait_for(future, within_s)
        except TimeoutError:
            return False
        finally:
            self._watchers.remove(entry)
        return True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passage = Passage(Fate() if self.is_calm else self._fates.draw())
        self._passages[writer.get_extra_info("peername")[1]] = passage
        try:
            await self._carry(passage, reader, writer)
        except OSError:
            _reset(writer)
        finally:
            writer.close()
            passage.done.set()

    async def _carry(
        self, passage: Passage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        up_reader, up_writer = await _connect(self._target, is_slow=passage.fate.num_slow > 0)
        answering = asyncio.create_task(self._answer(passage, up_reader, writer, up_writer))
        asking = asyncio.create_task(_pump(reader, up_writer))
        try:
            await asyncio.wait((answering, asking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            answering.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)
            if passage.was_cut and passage.fate.cut == "rst":
                _reset(up_writer)
            up_writer.close()

    async def _answer(
        self,
        passage: Passage,
        source: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        server: asyncio.StreamWriter,
    ) -> None:
        fate = passage.fate
        while piece := await source.read(_size(passage)):
            before = len(passage.answer)
            passage.note(piece)
            self._tell(piece)
            is_due = fate.cut != "none" and len(passage.answer) >= fate.after_bytes
            if is_due and not passage.was_cut:
                passage.was_cut = True
                self.num_cuts += 1
                if fate.cut == "half":
                    server.write_eof()
                else:
                    client.write(piece[: fate.after_bytes - before])
                    await _flush(client)
                    if fate.cut == "rst":
                        _reset(client)
                    return
            client.write(piece)
            await client.drain()
            if before < fate.num_slow:
                await asyncio.sleep(_SLOW_PAUSE_S)

    def _tell(self, piece: bytes) -> None:
        self._hear(piece)
        for pattern, future in self._watchers:
            if pattern in piece and not future.done():
                future.set_result(None)


async def _connect(
    target: tuple[str, int], is_slow: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not is_slow:
        return await asyncio.open_connection(*target)
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(narrow, target)
    except OSError:
        narrow.close()
        raise
    return await asyncio.open_connection(sock=narrow, limit=1024)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(_CHUNK):
            target.write(piece)
            await target.drain()


async def _flush(writer: asyncio.StreamWriter) -> None:
    """Hands the bytes to the kernel. A reset may still discard them, as in a real network."""
    with contextlib.suppress(OSError):
        await writer.drain()


def _size(passage: Passage) -> int:
    return _SLOW_CHUNK if len(passage.answer) < passage.fate.num_slow else _CHUNK


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
