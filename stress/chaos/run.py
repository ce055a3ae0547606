"""Runs server, proxy, clients and faults. At the end, no request may be unfinished."""

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
    """The options of a run. Faults happen until `kills` or `seconds` is reached.

    After the last fault, the streams may end.
    """

    model: Path
    folder: Path
    kills: int
    seed: int
    seconds: float = float("inf")
    patience_s: float = 600.0
    num_clients: int = 10
    # With 2, the same model is served a second time under another name.
    models: int = 1
    # How many models may be in memory at the same time.
    max_models: int | None = None
    # If set, some prompts have this many letters, and prefixes are stored on disk as well.
    long_prompt: int = 0


class Target(Protocol):
    """The target of a run: one server, or a cluster with all its services, at one address.

    `deaths` are the processes that the run ended. `complaints` are log lines that must not appear.
    """

    host: str
    port: int
    deaths: list[Death]

    @property
    def complaints(self) -> list[str]:
        """The log lines that must not appear."""

    @property
    def has_ended(self) -> bool:
        """Whether the site has ended although nobody stopped it."""

    @property
    def last_lines(self) -> list[str]:
        """The last lines of the target's log."""

    def start(self) -> None:
        """Starts the site for the first time."""

    async def ready(self) -> bool:
        """Waits until the target answers; returns False if it has ended or takes too long."""

    async def is_well(self, within_s: float) -> bool:
        """Waits until the site has recovered; returns False after `within_s` seconds."""

    async def is_engine_at_rest(self) -> bool:
        """Return whether no engine of the target computes anything."""

    def was_out(self, began: float, ended: float) -> bool:
        """Return whether a fault explains a broken or refused connection in this period."""

    async def stop(self) -> int:
        """Stops the site normally; returns 0 if it succeeds."""

    async def num_unfinished(self) -> int:
        """Return how many stored streams never ended; call this after `stop`."""

    def close(self) -> None:
        """Ends all processes."""


def site_of(plan: Plan) -> Site:
    """Return a site with one server on this machine."""
    second = ("--model", f"{SECOND}={plan.model}") if plan.models == 2 else ()
    bound = ("--max-models", str(plan.max_models)) if plan.max_models else ()
    disk = ("--prefix-cache-dir", str(plan.folder / "prefixes")) if plan.long_prompt else ()
    return Site(plan.model, plan.folder / "state", (*second, *bound, *disk, *FLAGS))


def _mute(line: str) -> None:
    pass


def _with_blows(site: Site) -> tuple[Target, Blows]:
    return site, ServerBlows(site)


class Run:
    """A run of the plan. `say` receives each line of output immediately."""

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
        fates, host = Fates(f"{plan.seed}/fates", _CUT_SHARE), self.site.host
        self._proxy = Proxy(self.site.port, fates, host=host)
        self._calm = Proxy(self.site.port, Fates("", 0.0), host=host)
        self._is_over = False
        self._num_begun = self._num_restored = 0

    async def run(self) -> str:
        """Return the report; `report.violations` is empty if there were none."""
        try:
            await self._run()
        finally:
            self.site.close()
        return self.report.text()

    async def _run(self) -> None:
        self.site.start()
        assert await self.site.ready(), self.site.last_lines
        url = f"http://{self.site.host}:{self.site.port}"
        self._say(f"the server runs at {url}; collecting undisturbed answers")
        plan = self._plan
        asked = url, plan.seed, plan.models, plan.long_prompt
        catalog = await asyncio.to_thread(make_catalog, *asked)
        self._say(f"{len(catalog)} questions; the faults start")
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
            self._say("no more faults; waiting for the streams to end")
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
        """Checks that nothing runs, waits or is unfinished after the last stream."""
        if self.site.has_ended:
            return
        for _ in range(20):
            if await self.site.is_engine_at_rest():
                break
        else:
            self.report.fail("wrong failure", "the engine still computes after the last stream")
        if not await self.site.is_well(within_s=10):
            self.report.fail("wrong failure", "the server has not recovered after the run")
        if self._plan.long_prompt:
            self._num_restored = await self._tokens_from_disk()
            if not self._num_restored:
                self.report.fail("wrong failure", "no prefix was read from disk")
        if code := await self.site.stop():
            self.report.fail("wrong failure", f"the server exited with code {code} after SIGTERM")
        if number := await self.site.num_unfinished():
            self.report.fail("lost", f"{number} streams never ended")

    async def _tokens_from_disk(self) -> int:
        """Return how many prompt tokens the last server read from disk."""
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.get(f"http://{self.site.host}:{self.site.port}/metrics")
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
            **{f"kills of {kind}": number for kind, number in sorted(faults.kills.items())},
            "cuts": self._proxy.num_cuts,
            "requests": self._num_begun,
            "tokens that the last server read from disk": self._num_restored,
        }

    async def _probe_lag(self) -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(_LAG_PROBE_S)
            now = time.monotonic()
            if (lag := now - asked - _LAG_PROBE_S) > _LAG_PROBE_S:
                self.report.lags.append((now, lag))
