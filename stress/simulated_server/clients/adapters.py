"""Clients of adapters: they load an adapter, name it in requests, and unload it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from detangle import choice, flip, randint, uniform
from safetensors.numpy import save_file

from headrace_common.checkpoints.adapters import CONFIG, WEIGHTS, name_adapter
from stress.simulated_server.clients.common import (
    CHAT,
    Backoff,
    ask,
    code_of,
    names_of,
)
from stress.simulated_server.clients.events import check, read_events
from stress.simulated_server.http import ADMIN_KEY, Broken, connect
from stress.simulated_server.processes import adapted
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

NUM_FOLDERS = 2


class AdapterUser:
    """A client with an adapter under a name of its own. Two names may stand for the same files."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self._folder = _folder(world.folder, randint(1, NUM_FOLDERS))
        self._fingerprint = name_adapter(name, self._folder, "").fingerprint
        # The server that has loaded the adapter. After a restart, the adapter is loaded again.
        self._server: object = None

    @property
    def is_loaded(self) -> bool:
        """Return whether the running server has loaded the adapter."""
        return self._world.server is self._server

    async def load(self) -> None:
        body = {"lora_name": self.name, "lora_path": str(self._folder)}
        backoff = Backoff()
        while True:
            server = self._world.server
            status, answer = await self._operate("load", body)
            # If the answer to an earlier try was lost, the adapter is already served.
            if status == 200 or (status == 400 and b"already served" in answer):
                self._server = server
                return
            if status == 400:
                assert b"file is damaged" in answer, f"{self.name} is refused: {answer!r}"
                assert self._world.faults.injected["engine: adapter cannot be read"]
            await backoff.pause()

    async def unload(self) -> None:
        """Unload the adapter; requests can no longer name it."""
        backoff = Backoff()
        while (await self._operate("unload", {"lora_name": self.name}))[0] not in (200, 404):
            await backoff.pause()

    async def _operate(self, what: str, body: dict[str, str]) -> tuple[int, bytes]:
        """Return the answer of an operator's request; the status is 0 without an answer."""
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        try:
            connection = connect(self._world.server, "POST", f"/v1/{what}_lora_adapter", key, body)
            answer = await connection.read()
        except Broken:
            return 0, b""
        world, status = self._world, connection.status
        is_known = status in (200, 400, 404, 429, 503) or world.may_fail(code_of(answer))
        assert is_known, f"{what} {self.name}: {status} {answer!r}"
        return status, answer

    async def begin(self, request: Request) -> str:
        """Start a stream with the adapter, and return its id."""
        backoff = Backoff()
        body = request.body(is_stream=True, model=self.name)
        while True:
            server = self._world.server
            try:
                connection = connect(server, "POST", CHAT, names_of(request), body)
                if await connection.begin() == 200:
                    connection.close()
                    return connection.headers["x-stream-id"]
                code = code_of(await connection.read())
                if code == "model_not_found":
                    assert server is not self._server, f"{self.name} is not served any more"
                    await self.load()
                elif connection.status not in (429, 503):
                    assert self._world.may_fail(code), f"{self.name}: {code}"
            except Broken:
                pass
            await backoff.pause()

    async def finish(self, request: Request, stream_id: str) -> None:
        """Read a stream, whose tokens must come from the adapter."""
        events = await read_events(self._world, request, stream_id)
        seed = adapted(request.seed, self._fingerprint)
        check(self._world, request._replace(seed=seed), events)
        self._world.counts["streams of adapters"] += 1

    async def is_refused(self, request: Request) -> None:
        """Check that the adapter is not served any more."""
        body: dict[str, Any] = request.body(is_stream=False, model=self.name)
        backoff = Backoff()
        while True:
            try:
                connection = connect(self._world.server, "POST", CHAT, {}, body)
                await connection.read()
                assert connection.status != 200, f"{self.name} is served after its unload"
                if connection.status == 404:
                    return
            except Broken:
                pass
            await backoff.pause()


def _folder(parent: Path, number: int) -> Path:
    """Return a folder with an adapter in PEFT's format; each number has other weights."""
    folder = parent / f"adapter {number}"
    if not folder.exists():
        folder.mkdir(parents=True)
        module = "model.layers.0.self_attn.q_proj"
        options = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
        (folder / CONFIG).write_text(json.dumps(options))
        factors = {"A": np.full((1, 8), number, np.float32), "B": np.ones((8, 1), np.float32)}
        save_file(
            {f"base_model.model.{module}.lora_{it}.weight": value for it, value in factors.items()},
            folder / WEIGHTS,
        )
    return folder


async def uses_an_adapter(world: World, request: Request) -> None:
    """Read streams of an adapter over kills; its unload waits for the last stream."""
    user = AdapterUser(world, f"adapter-{request.key}")
    await user.load()
    for _ in range(randint(0, 2)):
        one = world.new_request()
        await user.finish(one, await user.begin(one))
    stream_id = await user.begin(request)
    if flip(0.5):
        await asyncio.sleep(uniform(0.0, choice((0.1, 2.0))))
    else:
        await user.finish(request, stream_id)
    server = world.server
    has_adapter = user.is_loaded
    await user.unload()
    if has_adapter and server is world.server:
        _, shown = await ask(world, "GET", f"/v1/streams/{stream_id}")
        state = json.loads(shown)["state"]
        has_ended = state in ("finished", "failed") or server is not world.server
        assert has_ended, f"{user.name} is unloaded, but {stream_id} is {state}"
    await user.is_refused(world.new_request())
    await user.finish(request, stream_id)
    world.counts["adapters unloaded"] += 1
