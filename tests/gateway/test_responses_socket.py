from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from headrace.gateway.auth import Auth
from headrace.gateway.request_bodies import Bodies
from headrace.gateway.responses_socket import ResponseSocket, ResponseSockets
from headrace.intake.intake import Intake
from headrace.streams.record import Names
from headrace.streams.store import ById, StoreStalled
from headrace.streams.stores.memory import MemoryStore
from headrace_common.config.settings import ServerConfig
from headrace_common.ids import StreamId
from tests.generation.fakes import running
from tests.generation.test_registry import ended_id

CONFIG = ServerConfig()
SOCKET: Any = None


class StalledStore(MemoryStore):
    async def forget(self, stream_id: StreamId) -> None:
        raise StoreStalled("The disk is full.")


async def test_responses_that_are_not_stored_are_deleted_even_if_the_store_is_stalled(
    folder: Path,
) -> None:
    async with running(folder, StalledStore()) as (generation, engine):
        intake = Intake(generation, CONFIG)
        parts = (CONFIG.streams, Auth(CONFIG.http), Bodies(1), intake)
        socket = ResponseSocket(ResponseSockets(generation, *parts), SOCKET, Headers())
        for _ in range(3):
            socket._unstored.append(await ended_id(generation, engine, Names(is_kept=True)))
        ids = list(socket._unstored)
        await socket._forget(1)
        found = [await generation.streams.find("", ById(id)) for id in ids]
        assert found[:2] == [None, None] and found[2] is not None
