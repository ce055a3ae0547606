"""Tests work that is cancelled when its client disconnects."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from headrace.gateway.delivery import unless_left, while_connected
from headrace_common.errors import RequestError


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody ends this wait")


def test_an_error_raised_by_the_work_reaches_the_client_unchanged() -> None:
    async def work() -> None:
        raise RequestError("server_restarting", "The server restarts.")

    with pytest.raises(RequestError):
        asyncio.run(while_connected(stays, work()))


async def test_work_that_outlives_its_client_for_too_long_is_cancelled() -> None:
    async def left() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def soon() -> int:
        await asyncio.sleep(0)
        return 5

    async def never() -> None:
        await asyncio.Event().wait()

    assert await unless_left(left, soon(), patience_s=None) == 5
    assert await unless_left(left, soon(), patience_s=10) == 5
    with pytest.raises(ClientDisconnect):
        await unless_left(left, never())
