"""Tests stored records of earlier versions."""

import msgspec

from headrace.streams.record import RENDERING, Record
from tests.gateway.builders import make_record, make_request


def test_a_record_of_an_earlier_version_keeps_its_rendering() -> None:
    now = msgspec.structs.replace(make_record(make_request()), rendering=RENDERING)
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(now))
    assert msgspec.convert(stored, Record).rendering == RENDERING
    del stored["rendering"]
    assert msgspec.convert(stored, Record).rendering == 0
