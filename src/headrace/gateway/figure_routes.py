"""The figures of this moment and of the last hour, and what other servers of one store tell."""

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
        """Figures of all models together, of each, and of each gateway that shares the store."""
        hosts = self._generation.fleet.hosts.all()
        models = [{"model": it.name, **live([it.metrics.history])} for it in hosts]
        seen: list[SeenGateway] = []
        with contextlib.suppress(StoreStalled):  # nobody can be told or heard now
            seen = await self._generation.streams.store.gateways()
        gateways = [_gateway(one) for one in sorted(seen, key=lambda it: it.about)]
        whole = live(self._histories(request))
        return answer({"live": whole, "models": models, "gateways": gateways})

    async def history(self, request: Request) -> ASGIApp:
        return answer({"every_s": EVERY_S, "points": hour(self._histories(request))})

    def _histories(self, request: Request) -> list[History]:
        """The history of one model, or that of each."""
        hosts = self._generation.fleet.hosts
        named = request.query_params.get("model")
        chosen = hosts.all() if named is None else (hosts.get(named),)
        return [host.metrics.history for host in chosen]


def about(name: str, generation: Generation) -> bytes:
    """The figures that the other servers of a store are told of this one."""
    hosts = generation.fleet.hosts.all()
    shown = live([host.metrics.history for host in hosts])
    return msgspec.json.encode({"name": name, "state": generation.state, "live": shown})


def _gateway(seen: SeenGateway) -> dict[str, Any]:
    """One of another version may tell nothing."""
    try:
        told = msgspec.json.decode(seen.about, type=dict[str, Any])
    except msgspec.DecodeError:
        told = {"name": "unknown", "state": "unknown", "live": None}
    return {**told, "is_this": seen.is_this, "streams": seen.num_streams}
