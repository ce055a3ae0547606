import asyncio
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from headrace.gateway.download_wait import DownloadWait, WaitingAnswer, download_wait
from headrace.streams.log import LogGone
from headrace.streams.record import Names
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.request import Text
from headrace_common.worker_jobs import CheckedBody


def wait_for(names: Names | None = None, **fields: object) -> DownloadWait:
    checked = CheckedBody({"stream": True, "model": "m"} | fields, (Text(""),), b"")
    return download_wait("/v1/completions", checked, names or Names(), StreamId("cmpl-1"))


def test_a_sign_of_life_is_a_comment_and_an_empty_chunk() -> None:
    comment, data, *_ = wait_for().sign.decode().split("\n")
    assert comment == ": loading the model"
    assert json.loads(data.removeprefix("data: "))["choices"][0]["text"] == ""


def test_no_sign_of_life_is_sent_if_heartbeats_are_off() -> None:
    assert wait_for(heartbeat=False).sign == b""


@pytest.mark.parametrize("names", [Names(), Names(key="k")])
def test_the_stream_id_of_a_request_with_a_key_is_not_sent_early(names: Names) -> None:
    headers = wait_for(names).headers
    assert ("x-stream-id" in headers) == (names == Names())
    assert headers["x-headrace-loading"] == "true"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("server_overloaded", "Full."), "server_overloaded"),
        (LogGone(), "stream_not_found"),
        (ZeroDivisionError(), "internal_error"),
    ],
)
async def test_any_failure_during_the_wait_ends_in_an_error_frame(
    error: Exception, code: str
) -> None:
    bodies: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        bodies.append(message)

    async def fail() -> ASGIApp:
        raise error

    coming = asyncio.create_task(fail())
    await WaitingAnswer(coming, wait_for(), 1.0)({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert bodies[-1]["more_body"] is False
    told = bodies[-1]["body"].decode().removeprefix("data: ").split("\n")[0]
    assert json.loads(told)["error"]["code"] == code


async def test_a_client_that_disconnects_during_the_wait_causes_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bodies: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        bodies.append(message)

    async def leave() -> ASGIApp:
        await asyncio.sleep(0)
        raise ClientDisconnect

    coming = asyncio.create_task(leave())
    await WaitingAnswer(coming, wait_for(), 1.0)({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert not caplog.records and all(b"error" not in it.get("body", b"") for it in bodies)
