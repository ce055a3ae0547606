"""Tests that frames are received completely or not at all, blocking and in asyncio."""

import asyncio
import socket
import struct
import threading

import pytest

from headrace_common.system import framing

LARGE = bytes(range(256)) * 40_000


async def test_the_parts_of_a_frame_are_read_as_one_frame() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join([*framing.frame(b"a", bytearray(b"b")), *framing.frame()]))
    assert [await framing.read(reader), await framing.read(reader)] == [b"ab", b""]


def test_frames_are_received_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = threading.Thread(target=framing.send, args=(ours, b"", b"head", LARGE))
        sending.start()
        assert [framing.receive(theirs) for _ in range(3)] == [b"", b"head", LARGE]
        sending.join()


def test_pieces_are_not_copied_into_their_frame() -> None:
    piece = bytearray(LARGE)
    assert framing.frame(b"", piece)[-1] is piece


@pytest.mark.parametrize("sent", [b"", b"\4\0", struct.pack("<I", 100) + b"cut"])
def test_a_connection_closed_within_a_frame_reads_as_closed(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(sent)
        assert framing.receive(theirs) is None
