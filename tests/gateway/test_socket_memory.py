"""Sockets free the messages that they have handled, although their clients stay connected."""

import asyncio
import gc
import sys
import weakref
from typing import Any

import pytest
from starlette.datastructures import Headers

from headrace.gateway.auth import Auth
from headrace.gateway.realtime import RealtimeSocket, RealtimeSockets
from headrace.gateway.request_bodies import Bodies
from headrace.gateway.responses_socket import ResponseSocket, ResponseSockets
from headrace_common.config.settings import ServerConfig
from headrace_common.worker_jobs import CheckedBody
from tests.gateway.builders import FakeGeneration

CONFIG = ServerConfig()


class Message(dict[str, str]):
    """A message that a weak reference can follow."""


class IdleSocket:
    """A socket whose client sends one message and then nothing."""

    def __init__(self, text: str) -> None:
        self.scope = {"path": "/"}
        self.is_idle = asyncio.Event()
        self._messages = [Message(type="websocket.receive", text=text)]
        self.sent = weakref.ref(self._messages[0])

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        self.is_idle.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: object) -> None:
        pass


class WaitingIntake:
    """An intake whose requests wait for their model."""

    def __init__(self) -> None:
        self.is_waiting = asyncio.Event()

    async def read(self, *_: object) -> CheckedBody:
        return CheckedBody({}, (), b"")

    async def open(self, *_: object) -> None:
        self.is_waiting.set()
        await asyncio.Event().wait()


def parts_with(intake: Any) -> tuple[Any, ...]:
    return FakeGeneration(), CONFIG.streams, Auth(CONFIG.http), Bodies(1 << 20), intake


@pytest.mark.parametrize("kind", ["realtime", "responses"])
async def test_an_idle_socket_keeps_no_message(kind: str) -> None:
    socket: Any = IdleSocket('{"type": "hello"}')
    parts = parts_with(None)
    served: Any = (
        RealtimeSocket(RealtimeSockets(*parts), socket, Headers())
        if kind == "realtime"
        else ResponseSocket(ResponseSockets(*parts), socket, Headers())
    )
    running = asyncio.create_task(served.run())
    await socket.is_idle.wait()
    while getattr(served, "_channels", None):
        await asyncio.sleep(0)
    gc.collect()
    assert socket.sent() is None
    running.cancel()
    await asyncio.wait([running])


async def test_a_request_that_waits_for_its_model_keeps_no_frame() -> None:
    body = "x" * 1000
    text = f'{{"type": "request", "id": "a", "route": "/v1/completions", "body": "{body}"}}'
    unused = sys.getrefcount(text)
    intake, socket = WaitingIntake(), IdleSocket(text)
    served = RealtimeSocket(RealtimeSockets(*parts_with(intake)), socket, Headers())  # type: ignore[arg-type]
    running = asyncio.create_task(served.run())
    await intake.is_waiting.wait()
    await socket.is_idle.wait()
    assert sys.getrefcount(text) == unused
    running.cancel()
    await asyncio.wait([running])
