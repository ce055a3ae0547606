"""Work that ends with its client."""

import asyncio
from typing import Any

import pytest

from headrace.core.errors import RequestError
from headrace.gateway.delivery import while_connected


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("nobody ends this wait")


def test_a_refusal_in_the_work_reaches_the_client_as_it_is() -> None:
    async def work() -> None:
        raise RequestError("server_restarting", "The server restarts.")

    with pytest.raises(RequestError):
        asyncio.run(while_connected(stays, work()))
