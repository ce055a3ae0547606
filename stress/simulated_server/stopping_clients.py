"""Clients of a server with several models that stop streams, also while a model has no engine."""

import asyncio
import json
import signal

from detangle import choice, flip, randint, uniform

from stress.simulated_server.fleet_clients import FleetClient, GivesUp
from stress.simulated_server.fleet_world import NAMES, FleetWorld
from stress.simulated_server.http import Broken
from stress.simulated_server.requests import Request
from stress.simulated_server.world import lose_models


class StoppingClient(FleetClient):
    """A client that stops each of its streams after a short time."""

    async def run(self) -> None:
        for _ in range(randint(1, 3)):
            await asyncio.sleep(uniform(0.0, 10.0))
            self.name = choice(self.world.served_names() or NAMES)
            try:
                await self.stops(self.world.new_request().longer())
            except GivesUp as reason:
                self.world.counts[f"gives up: {reason}"] += 1

    async def stops(self, request: Request) -> None:
        """Stop a stream. The stop holds even if the engine is lost and comes back."""
        connection = await self._post(request, {"idempotency-key": request.key})
        stream_id = connection.headers["x-stream-id"]
        connection.close()
        await asyncio.sleep(uniform(0.0, choice((0.5, 5.0))))
        if flip(0.5):
            self._lose_engines()
            await asyncio.sleep(uniform(0.0, choice((0.1, 5.0))))
        server = self.world.server
        state = await self._cancel(stream_id)
        last = (await self._events_of(stream_id))[-1]
        is_same = server is self.world.server
        if state in ("finished", "cancelled", "failed") or is_same:
            has_finished = last["kind"] == "finish"
            assert has_finished == (state == "finished"), f"{stream_id} was {state}, then {last}"
            self.world.counts["stopped streams"] += 1
        if last["kind"] == "error" and last["code"] != "cancelled":
            self._failed(last["code"], request)

    def _lose_engines(self) -> None:
        """Kill the engines of the model, which are then given up."""
        server = self.world.server
        if self.world.is_up and not self.world.is_calm and server is not None:
            mine = [it for it in server.engines() if it.has_loaded]
            for engine in mine:
                if engine.config.served_model_name[0] == self.name:
                    self.world.faults.note("engine: killed from outside")
                    engine.die(-signal.SIGKILL)
            lose_models(self.world)

    async def _cancel(self, stream_id: str) -> str:
        """Return the state of the stream after the stop."""
        while True:
            try:
                connection = self.send("POST", f"/v1/streams/{stream_id}/cancel")
                if await connection.begin() == 200:
                    state: str = json.loads(await connection.read())["state"]
                    return state
                await self._refused(connection)
            except Broken:
                await asyncio.sleep(1.0)


async def stops_streams(world: FleetWorld) -> None:
    await StoppingClient(world).run()
