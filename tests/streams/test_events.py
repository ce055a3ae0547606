"""Tests stored events of earlier versions."""

import msgspec

from headrace.streams.events import AnyEvent, Heartbeat


def test_a_heartbeat_of_an_earlier_version_is_read_and_written_unchanged() -> None:
    old = {"kind": "heartbeat", "seq": 3, "at_ms": 5, "state": "prompt", "form": "data"}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=AnyEvent)
    assert read == Heartbeat(seq=3, at_ms=5, state="prompt", form="data")
    assert msgspec.json.decode(msgspec.json.encode(read)) == old
