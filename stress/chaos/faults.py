"""Draws faults and the times at which they happen from a seed."""

import asyncio
import random
import signal
from collections import Counter
from typing import Protocol

from stress.site import Site
from stress.witness import Proxy

MOMENTS = {
    "accepted": b"HTTP/1.1 200",
    "prompt": b'"prompt_progress"',
    "tokens": b'"token_ids":[',
    "last token": b'"finish_reason":"',
    "end": b"[DONE]",
}
_FALLBACK_S = 3.0
# Within this time a server notices that its engine has died.
_NOTICED_S = 0.3
_WELL_WITHIN_S = 300.0
# The probability of a second fault, if the first fault allows a second one.
_AGAIN = 0.25


class Well(Protocol):
    """A site that can report that it has recovered."""

    async def is_well(self, within_s: float) -> bool:
        """Waits until the site has recovered; returns False after `within_s` seconds."""


class Blows(Protocol):
    """The faults that a site can suffer.

    `kinds` contains a likely fault several times.
    """

    kinds: tuple[str, ...]

    def second(self, fault: str) -> tuple[str, ...]:
        """Return the faults that may happen within seconds after this fault."""

    async def do(self, fault: str, rng: random.Random) -> int:
        """Causes the fault; returns how many processes it ended by SIGKILL."""


class Faults:
    """Causes one fault after another. `kills` counts the processes ended by SIGKILL, by kind.

    After each fault, some stream must receive a token again.
    """

    def __init__(self, site: Well, blows: Blows, proxy: Proxy, seed: int) -> None:
        self.kills = Counter[str]()
        self.problems: list[str] = []
        self._site = site
        self._blows = blows
        self._proxy = proxy
        self._random = random.Random(f"{seed}/faults")

    @property
    def num_kills(self) -> int:
        return self.kills.total()

    async def strike(self) -> str:
        """Waits for a drawn event, causes a fault, and waits for new tokens; returns the fault."""
        await self._moment()
        fault = self._random.choice(self._blows.kinds)
        await self._do(fault)
        more = self._blows.second(fault)
        if more and self._random.random() < _AGAIN:
            # The pause lets the second fault happen while the new engine is loading, or soon after.
            await asyncio.sleep(self._random.uniform(0.0, 4.0))
            again = self._random.choice(more)
            await self._do(again)
            fault += f", {again}"
        await asyncio.sleep(_NOTICED_S)
        if not await self._site.is_well(_WELL_WITHIN_S):
            self.problems.append(f"no recovery within {_WELL_WITHIN_S:g} s after {fault}")
        elif not await self._proxy.saw(MOMENTS["tokens"], _WELL_WITHIN_S):
            self.problems.append(f"no token of any stream in {_WELL_WITHIN_S:g} s after {fault}")
        return fault

    async def _do(self, fault: str) -> None:
        self.kills[fault] += await self._blows.do(fault, self._random)

    async def _moment(self) -> None:
        if self._random.random() < 0.4:
            await asyncio.sleep(self._random.uniform(0.05, 2.0))
            return
        pattern = MOMENTS[self._random.choice(sorted(MOMENTS))]
        await self._proxy.saw(pattern, _FALLBACK_S)
        await asyncio.sleep(self._random.choice((0.0, 0.0, 0.003, 0.03)))


class ServerBlows:
    """The faults of one server and its engine."""

    kinds = (
        *(["engine"] * 13),
        *(["server"] * 3),
        *(["both"] * 1),
        *(["term"] * 1),
        *(["freeze"] * 2),
    )

    def __init__(self, site: Site) -> None:
        self._site = site

    def second(self, fault: str) -> tuple[str, ...]:
        return ("engine", "server") if fault in ("engine", "freeze") else ()

    async def do(self, fault: str, rng: random.Random) -> int:
        if fault == "engine":
            return int(self._site.kill_engine())
        if fault == "freeze":
            await self._site.freeze_engine(rng.choice((0.5, 2.0, 12.0)))
            return 0
        if fault == "term":
            await self._restart(signal.SIGTERM, rng)
            return 0
        await self._restart(signal.SIGKILL, rng, with_engine=fault == "both")
        return 2 if fault == "both" else 1

    async def _restart(self, number: int, rng: random.Random, with_engine: bool = False) -> None:
        await self._site.kill_server(number, with_engine)
        if rng.random() < 0.7 and not await self._site.ready():
            self._site.complaints.append("the server did not start again")
