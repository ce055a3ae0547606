"""Routes that show current rates and waiting times, and the last hour of this gateway."""

import contextlib
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.http_responses import answer
from headrace.generation.generation import Generation
from headrace.metrics.history import EVERY_S, History, hour, live
from headrace.streams.store import SeenGateway, StoreStalled


class FigureRoutes:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def live(self, request: Request) -> ASGIApp:
        """Return current rates and waits in total, per model and per gateway."""
        hosts = self._generation.fleet.hosts.all()
        models = [{"model": it.name, **live([it.metrics.history])} for it in hosts]
        seen: list[SeenGateway] = []
        # If the store does not respond, the list of gateways is empty.
        with contextlib.suppress(StoreStalled):
            seen = await self._generation.streams.store.gateways()
        gateways = [_gateway(one) for one in sorted(seen, key=lambda it: it.about)]
        whole = live(self._histories(request))
        return answer({"live": whole, "models": models, "gateways": gateways})

    async def history(self, request: Request) -> ASGIApp:
        return answer({"every_s": EVERY_S, "points": hour(self._histories(request))})

    def _histories(self, request: Request) -> list[History]:
        """Return the history of the model in the query.

        Without a model in the query, return the histories of all models.
        """
        hosts = self._generation.fleet.hosts
        named = request.query_params.get("model")
        chosen = hosts.all() if named is None else (hosts.get(named),)
        return [host.metrics.history for host in chosen]


def about(name: str, generation: Generation) -> bytes:
    """Encode this server's current rates and waits for the other servers that share the store."""
    hosts = generation.fleet.hosts.all()
    shown = live([host.metrics.history for host in hosts])
    return msgspec.json.encode({"name": name, "state": generation.state, "live": shown})


def _gateway(seen: SeenGateway) -> dict[str, Any]:
    """Describe a gateway. A gateway of another version may send data that cannot be decoded."""
    try:
        sent = msgspec.json.decode(seen.about, type=dict[str, Any])
    except msgspec.DecodeError:
        sent = {"name": "unknown", "state": "unknown", "live": None}
    return {**sent, "is_this": seen.is_this, "streams": seen.num_streams}
