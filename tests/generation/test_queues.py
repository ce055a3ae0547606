from pathlib import Path

import pytest

from headrace.core.errors import RequestError
from tests.generation.fakes import make_request, opened, running


async def test_a_stopped_server_admits_again_unless_it_ends(folder: Path) -> None:
    async with running(folder) as (generation, _):
        queues, host = generation.queues, generation.fleet.hosts.first
        queues.stop()
        with pytest.raises(RequestError, match="shutting down"):
            queues.of(host)
        queues.go_on()
        assert queues.of(host).num_live == 0
        queues.end()
        queues.go_on()
        with pytest.raises(RequestError, match="shutting down"):
            await generation.open(make_request())


async def test_a_stream_of_an_earlier_server_has_a_place_while_nobody_is_admitted(
    folder: Path,
) -> None:
    async with running(folder, max_num_queued_reqs=1) as (generation, engine):
        queues, host = generation.queues, generation.fleet.hosts.first
        await opened(generation, engine)
        queues.stop()
        queues.resume(host).update(1, 1, 5)
        queues.go_on()
        assert queues.of(host).num_waiting == 2


async def test_a_model_that_was_dropped_leaves_no_queue(folder: Path) -> None:
    async with running(folder) as (generation, _):
        queues, host = generation.queues, generation.fleet.hosts.first
        before = queues.of(host)
        generation.fleet.on_gone(host)
        assert queues.of(host) is not before
