"""Tests why and for how long readers are disconnected."""

import asyncio

import pytest

from headrace.generation.readers import ReaderPause
from headrace_common.errors import RequestError

RESTARTS = RequestError("server_restarting", "The server is restarting.")
STALLED = RequestError("storage_stalled", "The server cannot store streams now.")


@pytest.mark.parametrize("reasons", [(RESTARTS, STALLED), (STALLED, RESTARTS)])
async def test_the_end_of_a_stall_does_not_end_the_pause_of_a_restart(
    reasons: tuple[RequestError, ...],
) -> None:
    pause = ReaderPause()
    for reason in reasons:
        pause.set(reason)
    pause.clear(STALLED)
    with pytest.raises(RequestError) as told:
        await pause.unless(asyncio.sleep(60))
    assert told.value is RESTARTS
    pause.clear(RESTARTS)
    assert await pause.unless(asyncio.sleep(0, "done")) == "done"
