import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.ids import StreamId
from headrace.core.request import Text
from headrace.gateway.waiting import Wait, wait_of
from headrace.protocols.requests import CheckedBody
from headrace.streams.record import Names


def wait_for(host: Any, names: Names | None = None, **fields: Any) -> Wait:
    checked = CheckedBody({"stream": True, "model": "m"} | fields, (Text(""),), b"")
    id = StreamId("cmpl-1")
    found = wait_of("/v1/completions", checked, names or Names(), id, host)
    assert found is not None
    return found


def test_a_sign_tells_the_share_of_the_weights_as_it_grows() -> None:
    host = SimpleNamespace(share=None)
    wait = wait_for(host, return_progress=True)
    assert wait.sign().startswith(b": loading the model\ndata: {")
    for share in (0.25, 1.0):
        host.share = share
        comment, data, *_ = wait.sign().decode().split("\n")
        assert comment == f": loading the model, {100 * share:.0f} %"
        told = json.loads(data.removeprefix("data: "))
        assert told["loading"] == {"progress": share} and told["choices"][0]["text"] == ""


def test_who_does_not_ask_for_progress_gets_the_frame_that_every_client_knows() -> None:
    data = wait_for(SimpleNamespace(share=0.5)).sign().decode().split("\n")[1]
    assert "loading" not in json.loads(data.removeprefix("data: "))


@pytest.mark.parametrize("names", [Names(), Names(key="k"), Names(conversation="c")])
def test_a_stream_that_may_survive_the_server_is_named_once_there_is_one(names: Names) -> None:
    headers = wait_for(None, names).headers
    assert ("x-stream-id" in headers) == (names == Names())
    assert headers["x-headrace-loading"] == "true"


def test_where_bytes_are_counted_nothing_is_said() -> None:
    assert wait_for(SimpleNamespace(share=0.5), Names(conversation="c")).sign() == b""
