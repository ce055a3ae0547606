"""Messages as bytes between two processes: a length, then MessagePack; owns no socket."""

import socket
import struct
from typing import Protocol

import msgspec

from headrace.config.settings import ModelConfig
from headrace.core.messages import (
    Cancel,
    LoadFailed,
    Loading,
    Message,
    Outputs,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Status,
    Submit,
)


class Start(Message, frozen=True):
    """First message to an engine process: what to load."""

    config: ModelConfig


AnyMessage = (
    Submit
    | Cancel
    | Shutdown
    | Ping
    | Pong
    | Start
    | Loading
    | Ready
    | LoadFailed
    | Outputs
    | Status
)

_LENGTH = struct.Struct("<I")
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_ENCODER = msgspec.msgpack.Encoder()


class _FrameReader(Protocol):
    """The part of asyncio.StreamReader that `read` needs."""

    async def readexactly(self, n: int) -> bytes: ...


def encode(message: Message) -> bytes:
    """One frame."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read(reader: _FrameReader) -> AnyMessage:
    """Next message; asyncio.IncompleteReadError when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _DECODER.decode(await reader.readexactly(length))


def receive(connection: socket.socket) -> AnyMessage | None:
    """Next message, blocking; None when the other side is gone."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _LENGTH.unpack(head)[0])
    return None if body is None else _DECODER.decode(body)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
