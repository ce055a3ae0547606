"""A whole run: site, proxy, clients, faults, and at the end nothing may be left over."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from stress.catalog import SECOND, Question, make_catalog
from stress.chaos.faults import Blows, Faults, ServerBlows
from stress.chaos.report import Report
from stress.clients import draw_way, live
from stress.http import Exchange
from stress.oracle import verdict
from stress.site import FLAGS, HEARTBEAT_S, Death, Site
from stress.story import RETRYABLE, Story
from stress.witness import Fates, Proxy

_CUT_SHARE = 0.35
_LAG_PROBE_S = 0.05


class Plan(msgspec.Struct, frozen=True):
    """Ends after so many kills or seconds, whichever comes first; then waits for the streams."""

    model: Path
    folder: Path
    kills: int
    seed: int
    seconds: float = float("inf")
    patience_s: float = 600.0
    num_clients: int = 10
    models: int = 1  # with 2 the same model is served a second time, under another name
    max_models: int | None = None  # in memory at a time
    long_prompt: int = 0  # letters of some prompts; prefixes are then on disk, too


class Target(Protocol):
    """The site of a run: a server, or several and all that they stand on, behind one port.

    `deaths` are what was ended from outside; `complaints` what it should not have logged.
    """

    port: int
    deaths: list[Death]

    @property
    def complaints(self) -> list[str]:
        """Lines that its log should not have."""

    @property
    def has_ended(self) -> bool:
        """By itself, when nobody told it to."""

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its log."""

    def start(self) -> None:
        """The first time."""

    async def ready(self) -> bool:
        """Until it answers; False if it has ended or took too long."""

    async def is_well(self, within_s: float) -> bool:
        """Waits so long until it is as it was at the start."""

    async def is_engine_at_rest(self) -> bool:
        """Whether its engines do nothing any more."""

    def was_out(self, began: float, ended: float) -> bool:
        """Whether what was ended explains that a connection of that time broke or was refused."""

    async def stop(self) -> int:
        """Ends it in peace; 0 if it went so."""

    async def num_unfinished(self) -> int:
        """Streams in its store that never ended; called after `stop`."""

    def close(self) -> None:
        """Leaves no process behind."""


def site_of(plan: Plan) -> Site:
    """One server on this machine."""
    second = ("--model", f"{SECOND}={plan.model}") if plan.models == 2 else ()
    bound = ("--max-models", str(plan.max_models)) if plan.max_models else ()
    disk = ("--prefix-cache-dir", str(plan.folder / "prefixes")) if plan.long_prompt else ()
    return Site(plan.model, plan.folder / "state", (*second, *bound, *disk, *FLAGS))


def _mute(line: str) -> None:
    pass


def _with_blows(site: Site) -> tuple[Target, Blows]:
    return site, ServerBlows(site)


class Run:
    """`say` is told what happens while it happens."""

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None] = _mute,
        target: tuple[Target, Blows] | None = None,
    ) -> None:
        self._say = say
        self.report = Report(plan.seed, HEARTBEAT_S + 0.25, say)
        self.site, self._blows = target or _with_blows(site_of(plan))
        self._plan = plan
        self._proxy = Proxy(self.site.port, Fates(f"{plan.seed}/fates", _CUT_SHARE))
        self._calm = Proxy(self.site.port, Fates("", 0.0))
        self._is_over = False
        self._num_begun = self._num_restored = 0

    async def run(self) -> str:
        """The report; `report.violations` is empty if all held."""
        try:
            await self._run()
        finally:
            self.site.close()
        return self.report.text()

    async def _run(self) -> None:
        self.site.start()
        assert await self.site.ready(), self.site.last_lines
        url = f"http://127.0.0.1:{self.site.port}"
        self._say(f"up at {url}; the undisturbed answers first")
        plan = self._plan
        asked = url, plan.seed, plan.models, plan.long_prompt
        catalog = await asyncio.to_thread(make_catalog, *asked)
        self._say(f"{len(catalog)} questions; the first blow falls")
        await self._proxy.open()
        await self._calm.open()
        faults = Faults(self.site, self._blows, self._proxy, self._plan.seed)
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(self._probe_lag())
            clients = [
                tasks.create_task(self._client(number, catalog))
                for number in range(self._plan.num_clients)
            ]
            await self._strike(faults)
            self._is_over = self._proxy.is_calm = True
            self._say("the last blow has fallen; the streams may end")
            await asyncio.wait(clients)
            lag.cancel()
        await self._check_rest()
        self._proxy.close()
        self._calm.close()
        self._count(faults)

    async def _strike(self, faults: Faults) -> None:
        deadline = time.monotonic() + self._plan.seconds
        while faults.num_kills < self._plan.kills and time.monotonic() < deadline:
            fault = await faults.strike()
            self._say(
                f"{fault}; {faults.num_kills} kills, {self._proxy.num_cuts} cuts, "
                f"{self.report.num_stories.total()} of {self._num_begun} requests judged, "
                f"{len(self.report.violations)} violations"
            )
            if self.site.has_ended:
                self.report.fail("wrong failure", f"the server ended: {self.site.last_lines}")
                return

    async def _client(self, number: int, catalog: list[Question]) -> None:
        rng = random.Random(f"{self._plan.seed}/client {number}")
        while not self._is_over:
            self._num_begun += 1
            label = f"{self._plan.seed}/{self._num_begun} of client {number}"
            patience_s = self._plan.patience_s
            story = Story(label, rng.choice(catalog), draw_way(rng), patience_s)
            await live(story, self._proxy)
            found = await verdict(story, self._calm, self._is_explained)
            self.report.add(story, found, self.site.deaths)

    def _is_explained(self, made: Exchange) -> bool:
        is_served = made.got.is_whole and made.got.status not in RETRYABLE
        return is_served or self.site.was_out(made.began, made.ended)

    async def _check_rest(self) -> None:
        """Nothing runs, waits or is unfinished after the last stream."""
        if self.site.has_ended:
            return
        for _ in range(20):
            if await self.site.is_engine_at_rest():
                break
        else:
            self.report.fail("wrong failure", "the engine still computes after the last stream")
        if not await self.site.is_well(within_s=10):
            self.report.fail("wrong failure", "the server is not well after the run")
        if self._plan.long_prompt:
            self._num_restored = await self._tokens_from_disk()
            if not self._num_restored:
                self.report.fail("wrong failure", "nothing was ever read from disk")
        if code := await self.site.stop():
            self.report.fail("wrong failure", f"the server ended with {code} after SIGTERM")
        if number := await self.site.num_unfinished():
            self.report.fail("lost", f"{number} streams never ended")

    async def _tokens_from_disk(self) -> int:
        """By the server that ran last."""
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.get(f"http://127.0.0.1:{self.site.port}/metrics")
        name = "headrace_disk_prefix_tokens_total"
        found = [line for line in answer.text.splitlines() if line.startswith(name)]
        return int(sum(float(line.split()[1]) for line in found))

    def _count(self, faults: Faults) -> None:
        for problem in faults.problems:
            self.report.fail("silent", problem)
        for complaint in self.site.complaints[:20]:
            self.report.fail("wrong failure", f"in the server's log: {complaint}")
        self.report.facts = {
            "kills": faults.num_kills,
            **{f"of them {kind}": number for kind, number in sorted(faults.kills.items())},
            "cuts": self._proxy.num_cuts,
            "requests": self._num_begun,
            "tokens from disk by the last server": self._num_restored,
        }

    async def _probe_lag(self) -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(_LAG_PROBE_S)
            now = time.monotonic()
            if (lag := now - asked - _LAG_PROBE_S) > _LAG_PROBE_S:
                self.report.lags.append((now, lag))
