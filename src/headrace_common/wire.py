"""Encodes messages between gateway and engine as frames of MessagePack. It owns no socket."""

import logging
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

logger = logging.getLogger(__name__)


class Start(Message, frozen=True):
    """The first message to an engine process: what to load."""

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
    """Encode a message as one frame."""
    packed = _ENCODER.encode(message)
    return framing.LENGTH.pack(len(packed)) + packed


async def read(reader: framing.FrameReader) -> AnyMessage | None:
    """Return the next message, or None if the other side is gone or sent something else.

    This function does not call `framing.read`, which saves a call per step.
    """
    try:
        (length,) = framing.LENGTH.unpack(await reader.readexactly(framing.LENGTH.size))
        return _DECODER.decode(await reader.readexactly(length))
    # asyncio.IncompleteReadError is a subclass of EOFError.
    except (EOFError, ConnectionError):
        return None
    except msgspec.DecodeError:
        logger.exception("A message between the gateway and an engine could not be decoded")
        return None


def receive(connection: socket.socket) -> AnyMessage | None:
    """Block until the next message, and return it; None if the other side is gone."""
    packed = framing.receive(connection)
    return None if packed is None else _DECODER.decode(packed)
