"""Messages between gateway and engine, each a frame of MessagePack; owns no socket."""

import socket

import msgspec

from headrace_common.config.settings import ModelConfig
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    LoadAdapter,
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
from headrace_common.system import framing


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
    | LoadAdapter
    | DropAdapter
    | AdapterRead
)

_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame."""
    return b"".join(framing.frame(_ENCODER.encode(message)))


async def read(reader: framing.FrameReader) -> AnyMessage:
    """Next message; asyncio.IncompleteReadError when the other side is gone."""
    return _DECODER.decode(await framing.read(reader))


def receive(connection: socket.socket) -> AnyMessage | None:
    """Next message, blocking; None when the other side is gone."""
    packed = framing.receive(connection)
    return None if packed is None else _DECODER.decode(packed)
