import json

import pytest

from headrace.core.ids import StreamId
from headrace.core.jobs import CheckedBody
from headrace.core.request import Text
from headrace.gateway.waiting import Wait, wait_of
from headrace.streams.record import Names


def wait_for(names: Names | None = None, **fields: object) -> Wait:
    checked = CheckedBody({"stream": True, "model": "m"} | fields, (Text(""),), b"")
    found = wait_of("/v1/completions", checked, names or Names(), StreamId("cmpl-1"))
    assert found is not None
    return found


def test_a_sign_is_a_frame_that_every_client_knows() -> None:
    comment, data, *_ = wait_for().sign.decode().split("\n")
    assert comment == ": loading the model"
    assert json.loads(data.removeprefix("data: "))["choices"][0]["text"] == ""


def test_who_wants_no_heartbeat_hears_nothing() -> None:
    assert wait_for(heartbeat=False).sign == b""


@pytest.mark.parametrize("names", [Names(), Names(key="k")])
def test_a_stream_that_may_survive_the_server_is_named_once_there_is_one(names: Names) -> None:
    headers = wait_for(names).headers
    assert ("x-stream-id" in headers) == (names == Names())
    assert headers["x-headrace-loading"] == "true"
