import json

import pytest

from headrace.core.errors import RequestError
from headrace.gateway.realtime import _FIELDS, _read, _text


def test_a_frame_keeps_its_known_fields_alone() -> None:
    known = {"type": "request", "id": None, "body": {"prompt": "é"}}
    unknown = {str(number): [number, {}] for number in range(1000)}
    fields = _read({"type": "websocket.receive", "text": json.dumps(known | unknown)})
    assert {name: json.loads(bytes(raw)) for name, raw in fields.items()} == known
    assert _text(fields, "type", 64) == "request"
    assert _text(fields, "id", 64) is None is _text(fields, "route", 64)
    every = dict.fromkeys(_FIELDS, "x")
    assert len(_read({"type": "websocket.receive", "text": json.dumps(every)})) == len(_FIELDS)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": }', '{"a": ' + "[" * 100_000, "\ud800"])
def test_a_frame_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        _read({"type": "websocket.receive", "text": text})
    assert refused.value.code == "invalid_json"
