"""Sends and receives frames between two processes. A frame is its length, followed by its bytes."""

import socket
import struct
from typing import Protocol

LENGTH = struct.Struct("<I")


class FrameReader(Protocol):
    """The part of asyncio.StreamReader that `read` needs."""

    async def readexactly(self, n: int) -> bytes: ...


def frame(*pieces: bytes | bytearray) -> list[bytes | bytearray]:
    """Return the buffers of one frame, without copying its pieces."""
    return [LENGTH.pack(sum(map(len, pieces))), *pieces]


def send(connection: socket.socket, *contents: bytes) -> None:
    """Send one frame for each content, blocking. A large last content is not copied."""
    *heads, last = (piece for content in contents for piece in frame(content))
    connection.sendall(b"".join(heads))
    connection.sendall(last)


async def read(reader: FrameReader) -> bytes:
    """Return the next frame. Raises asyncio.IncompleteReadError if the other side is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def receive(connection: socket.socket) -> bytes | None:
    """Block until the next frame, and return it; None if the other side is gone."""
    head = _receive_exactly(connection, LENGTH.size)
    return None if head is None else _receive_exactly(connection, LENGTH.unpack(head)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Receive without a copy, because a body may take most of a worker's memory."""
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
