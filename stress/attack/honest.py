"""Two honest clients beside every attack, and scales: what the others cost them, in figures."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import httpx

from stress.catalog import CHAT, GREEDY, Question, ask_undisturbed
from stress.clients import live
from stress.compare import Violation
from stress.http import Call, exchange
from stress.oracle import verdict
from stress.site import Site
from stress.story import Story, Way
from stress.witness import Fates, Proxy
from tools.harness.processes import children, is_engine, proportional_bytes

HEARTBEAT_S = 1.0
PROBE_S = 0.1
_CUT_SHARE = 0.2
_PAUSE_S = 0.5  # after a refusal
_PATIENCE_S = 300.0

Samples = list[tuple[float, float]]
"""When, and how many seconds (or bytes)."""


class Quantiles(NamedTuple):
    p50: float
    p99: float
    worst: float


def quantiles(values: Iterable[float]) -> Quantiles:
    found = sorted(values) or [0.0]
    return Quantiles(found[len(found) // 2], found[int(len(found) * 0.99)], found[-1])


def within(samples: Samples, began: float, ended: float) -> list[float]:
    return [value for at, value in samples if began <= at <= ended]


class Prober:
    """Asks /health ten times a second, whether or not the last answer has come."""

    def __init__(self, site: Site) -> None:
        self.samples: Samples = []  # by the time at which it was asked
        self.problems: list[tuple[float, str]] = []
        self.lags: Samples = []  # how late this program itself was
        self._site = site
        self._pending: dict[asyncio.Task[None], float] = {}

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due += PROBE_S
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            self.lags.append((now, now - due))
            asking = asyncio.create_task(self._ask())
            self._pending[asking] = now
            asking.add_done_callback(self._pending.pop)
            due = max(due, now - PROBE_S)

    def pending(self) -> Samples:
        """Requests that have no answer yet, by how long they have waited."""
        now = time.monotonic()
        return [(at, now - at) for at in self._pending.values()]

    def close(self) -> None:
        for asking in list(self._pending):
            asking.cancel()

    async def _ask(self) -> None:
        made = await exchange(self._site.port, Call("GET", "/health"))
        self.samples.append((made.began, time.monotonic() - made.began))
        if made.got.status != 200 or b'"ok"' not in made.got.body:
            said = f"{made.got.status} {bytes(made.got.body[:100])!r} {made.talk.problem}"
            self.problems.append((made.began, f"health: {said}"))


class Chatter:
    """Asks for the same long answer again and again, and is owed every token of it once."""

    def __init__(self, site: Site, seed: int, say: Callable[[float, Violation], None]) -> None:
        self.gaps: Samples = []  # between data frames, by the time of the later one
        self.num_tokens = self.num_answers = 0
        self.is_over = False
        self.excused_at = 0.0  # an accident: connections may break
        self.forgiven_at = 0.0  # an accident that damages streams themselves
        self._site = site
        self._seed = seed
        self._say = say
        self._proxy = Proxy(site.port, Fates(f"{seed}/fates", _CUT_SHARE), self._hear)
        self._calm = Proxy(site.port, Fates("", 0.0))
        self._question: Question
        self._last: float | None = None
        self._has_token = False
        self._num_cuts = 0

    async def prepare(self, num_tokens: int) -> None:
        """Hears the answer of the server while it is left in peace."""
        await self._proxy.open()
        await self._calm.open()
        body = {
            "messages": [{"role": "user", "content": "Count from 1 to 400."}],
            "max_tokens": num_tokens,
        }
        self._question = await asyncio.to_thread(self._ask_in_peace, body | GREEDY)

    def _ask_in_peace(self, body: dict[str, object]) -> Question:
        with httpx.Client(base_url=f"http://127.0.0.1:{self._site.port}", timeout=120) as client:
            return ask_undisturbed(client, CHAT, body)

    async def run(self) -> None:
        while not self.is_over:
            self.num_answers += 1
            label = f"{self._seed}/chat {self.num_answers}"
            story = Story(label, self._question, Way("event", "key"), _PATIENCE_S)
            self._last, self._has_token = time.monotonic(), False
            await live(story, self._proxy)
            self._last = None
            for violation in await self._judge(story):
                self._say(story.began, violation)
            if story.outcome == "finished":
                self.num_tokens += self._question.num_tokens
            else:
                await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        self._proxy.close()
        self._calm.close()

    @property
    def is_talking(self) -> bool:
        return self._last is not None and self._has_token

    def pending(self) -> Samples:
        """The silence that lasts now."""
        return [] if self._last is None else [self._gap(time.monotonic())]

    def _hear(self, piece: bytes) -> None:
        if b"data: " not in piece or self._last is None:
            return
        now = time.monotonic()
        if self._num_cuts == self._proxy.num_cuts:  # else it is the silence of a cut line
            self.gaps.append(self._gap(now))
        self._num_cuts = self._proxy.num_cuts
        self._last = now
        self._has_token |= b'"token_ids":[' in piece

    def _gap(self, now: float) -> tuple[float, float]:
        """Until its first token a stream waits its turn, and hears no more than heartbeats."""
        assert self._last is not None
        allowed = 0.0 if self._has_token else HEARTBEAT_S
        return now, max(0.0, now - self._last - allowed)

    async def _judge(self, story: Story) -> list[Violation]:
        if self.forgiven_at > story.began:
            return []
        is_excused = self.excused_at > story.began
        return await verdict(story, self._calm, lambda made: is_excused or made.got.is_whole)


def as_seen(gaps: Iterable[float]) -> list[float]:
    """A silence as often as somebody who looks in ten times a second would meet it."""
    return [gap - n * PROBE_S for gap in gaps for n in range(max(1, int(gap / PROBE_S)))]


class Scales:
    """Memory of the server and all its children but the engine, ten times a second."""

    def __init__(self, site: Site) -> None:
        self.samples: Samples = []
        self.rest = 0.0
        self._site = site

    async def run(self) -> None:
        while True:
            self.samples.append((time.monotonic(), await asyncio.to_thread(self.weigh)))
            await asyncio.sleep(PROBE_S)

    def weigh(self) -> float:
        return float(sum(map(proportional_bytes, _family(self._site.pid))))


def _family(pid: int) -> list[int]:
    """A process and those below it, without engines."""
    if is_engine(pid):
        return []
    return [pid, *(one for child in children(pid) for one in _family(child))]


class Stage:
    """One server with its honest clients and its scales."""

    def __init__(self, site: Site, seed: int, say: Callable[[float, Violation], None]) -> None:
        self.site = site
        self.prober = Prober(site)
        self.chatter = Chatter(site, seed, say)
        self.scales = Scales(site)

    async def open(self, num_tokens: int) -> None:
        self.site.start()
        assert await self.site.ready(), self.site.last_lines
        await self.chatter.prepare(num_tokens)
        self.scales.rest = await asyncio.to_thread(self.scales.weigh)
