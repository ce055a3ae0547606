"""Tests that messages pass between two processes whole and in order."""

import asyncio
import socket
import struct

import pytest

from headrace_common import wire
from headrace_common.config.settings import ModelConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.messages import (
    Cancel,
    Finished,
    FinishReason,
    Message,
    NewSequence,
    NewToken,
    Outputs,
    Ping,
    Submit,
)
from headrace_common.sampling import Logprobs, Sampling
from headrace_common.wire import Start

SEQUENCE = SequenceId(7)
MESSAGES: list[Message] = [
    Ping(3),
    Start(ModelConfig(model="x", threads=2)),
    Cancel((SEQUENCE,), FinishReason.STOP),
    Submit(
        stream_id=StreamId("cmpl-1"),
        prompts=(b"\1\0\0\0",),
        sequences=(NewSequence(SEQUENCE, 0, 0, b"\2\0\0\0"),),
        sampling=Sampling(logit_bias={5: -1.5}, seed=-(2**63)),
        arrival=1.5,
    ),
    Outputs(
        tokens=(NewToken(SEQUENCE, 9, Logprobs(1, b"\0" * 4, b"\0" * 4)),),
        finished=(Finished(SEQUENCE, FinishReason.LENGTH),),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_socket(message: Message) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(wire.encode(message))
        assert wire.receive(theirs) == message


async def test_messages_in_one_packet_are_read_separately() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(wire.encode(message) for message in MESSAGES))
    assert [await wire.read(reader) for _ in MESSAGES] == MESSAGES


@pytest.mark.parametrize("sent", [b"", b"\4\0", struct.pack("<I", 100) + b"cut"])
async def test_a_message_that_breaks_off_reads_as_end_of_file(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(sent)
        assert wire.receive(theirs) is None
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    reader.feed_eof()
    assert await wire.read(reader) is None


async def test_an_invalid_message_reads_as_end_of_file() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack("<I", 3) + b"abc")
    assert await wire.read(reader) is None
