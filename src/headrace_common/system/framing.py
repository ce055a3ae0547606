"""Frames between two processes, each a length and as many bytes; knows nothing of what they say."""

import socket
import struct
from typing import Protocol

LENGTH = struct.Struct("<I")


class FrameReader(Protocol):
    """The part of asyncio.StreamReader that `read` needs."""

    async def readexactly(self, n: int) -> bytes: ...


def frame(*pieces: bytes | bytearray) -> list[bytes | bytearray]:
    """The buffers of one frame; the pieces of what is in it are not copied."""
    return [LENGTH.pack(sum(map(len, pieces))), *pieces]


def send(connection: socket.socket, *contents: bytes) -> None:
    """Sends a frame for each, blocking; the last one may be large, and is not copied."""
    *heads, last = (piece for content in contents for piece in frame(content))
    connection.sendall(b"".join(heads))
    connection.sendall(last)


async def read(reader: FrameReader) -> bytes:
    """The next frame; asyncio.IncompleteReadError when the other side is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def receive(connection: socket.socket) -> bytes | None:
    """The next frame, blocking; None when the other side is gone."""
    head = _receive_exactly(connection, LENGTH.size)
    return None if head is None else _receive_exactly(connection, LENGTH.unpack(head)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Without a copy: a body may be most of what a worker may hold."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        try:
            num_read = connection.recv_into(view[have:])
        except OSError:
            return None
        if num_read == 0:
            return None
        have += num_read
    return data  # type: ignore[return-value]
