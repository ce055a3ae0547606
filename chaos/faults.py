"""When what is ended: seeded draws of a moment and a fault."""

import asyncio
import random
import signal

from chaos.site import Site
from chaos.witness import Proxy

_FAULTS = (
    *(["engine"] * 13),
    *(["server"] * 3),
    *(["both"] * 1),
    *(["term"] * 1),
    *(["freeze"] * 2),
)
_MOMENTS = {
    "accepted": b"HTTP/1.1 200",
    "prompt": b'"prompt_progress"',
    "tokens": b'"token_ids":[',
    "last token": b'"finish_reason":"',
    "end": b"[DONE]",
}
_FALLBACK_S = 3.0
_NOTICED_S = 0.3  # within which a server knows of a death
_WELL_WITHIN_S = 300.0


class Faults:
    """`num_kills` counts processes ended by SIGKILL; after each, somebody gets a token."""

    def __init__(self, site: Site, proxy: Proxy, seed: int) -> None:
        self.num_kills = 0
        self.num_server_kills = 0
        self.problems: list[str] = []
        self._site = site
        self._proxy = proxy
        self._random = random.Random(f"{seed}/faults")

    async def strike(self) -> str:
        """Waits for a moment, ends something, waits until tokens come again; says what it was."""
        await self._moment()
        fault = self._random.choice(_FAULTS)
        await self._do(fault)
        if fault in ("engine", "freeze") and self._random.random() < 0.25:
            await asyncio.sleep(self._random.uniform(0.0, 4.0))  # while it loads, or just has
            await self._do(self._random.choice(("engine", "server")))
        await asyncio.sleep(_NOTICED_S)
        if not await self._site.is_well(_WELL_WITHIN_S):
            self.problems.append(f"not well {_WELL_WITHIN_S:g} s after {fault}")
        elif not await self._proxy.saw(_MOMENTS["tokens"], _WELL_WITHIN_S):
            self.problems.append(f"no token of any stream in {_WELL_WITHIN_S:g} s after {fault}")
        return fault

    async def _moment(self) -> None:
        if self._random.random() < 0.4:
            await asyncio.sleep(self._random.uniform(0.05, 2.0))
            return
        pattern = _MOMENTS[self._random.choice(sorted(_MOMENTS))]
        await self._proxy.saw(pattern, _FALLBACK_S)
        await asyncio.sleep(self._random.choice((0.0, 0.0, 0.003, 0.03)))

    async def _do(self, fault: str) -> None:
        if fault == "engine":
            self.num_kills += self._site.kill_engine()
        elif fault == "freeze":
            await self._site.freeze_engine(self._random.choice((0.5, 2.0, 12.0)))
        elif fault == "term":
            await self._restart(signal.SIGTERM)
        else:
            await self._restart(signal.SIGKILL, with_engine=fault == "both")
            self.num_kills += 2 if fault == "both" else 1
            self.num_server_kills += 1

    async def _restart(self, number: int, with_engine: bool = False) -> None:
        await self._site.kill_server(number, with_engine)
        if self._random.random() < 0.7 and not await self._site.ready():
            self.problems.append("the server did not start again")
