"""Measures how attacks affect two honest clients and the memory of the server."""

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
# How long the client waits after a refusal, in seconds.
_PAUSE_S = 0.5
_PATIENCE_S = 300.0

Samples = list[tuple[float, float]]
"""Pairs of a time and a value in seconds or bytes."""


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
    """Requests /health ten times a second, even if an earlier request is still waiting."""

    def __init__(self, site: Site) -> None:
        # Pairs of the time at which a request was sent and the seconds until its answer.
        self.samples: Samples = []
        self.problems: list[tuple[float, str]] = []
        # Pairs: the time at which a request was sent, and how many seconds too late this was.
        self.lags: Samples = []
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
        """Return the time and the age of each request that is still unanswered."""
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
    """Requests the same long answer again and again, and checks that every token arrives once."""

    def __init__(self, site: Site, seed: int, say: Callable[[float, Violation], None]) -> None:
        # Silences between data frames. A sample's time is the end of the silence.
        self.gaps: Samples = []
        self.num_tokens = self.num_answers = 0
        self.is_over = False
        # When the last accident ended that could break connections.
        self.excused_at = 0.0
        # When the last accident ended that could damage streams.
        self.forgiven_at = 0.0
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
        """Fetches the answer once from the idle server; later answers must equal it."""
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
        """Return the silence that has not ended yet."""
        return [] if self._last is None else [self._gap(time.monotonic())]

    def _hear(self, piece: bytes) -> None:
        if b"data: " not in piece or self._last is None:
            return
        now = time.monotonic()
        # A gap during which the proxy cut a connection is not the server's fault, so it is not
        # counted.
        if self._num_cuts == self._proxy.num_cuts:
            self.gaps.append(self._gap(now))
        self._num_cuts = self._proxy.num_cuts
        self._last = now
        self._has_token |= b'"token_ids":[' in piece

    def _gap(self, now: float) -> tuple[float, float]:
        """Return the current time and the seconds since the last data frame.

        Until its first token arrives, a stream may be queued and receive only heartbeats. The
        interval of one heartbeat is therefore subtracted.
        """
        assert self._last is not None
        allowed = 0.0 if self._has_token else HEARTBEAT_S
        return now, max(0.0, now - self._last - allowed)

    async def _judge(self, story: Story) -> list[Violation]:
        if self.forgiven_at > story.began:
            return []
        is_excused = self.excused_at > story.began
        return await verdict(story, self._calm, lambda made: is_excused or made.got.is_whole)


def as_waits(gaps: Iterable[float]) -> list[float]:
    """Return the waits of a client that arrives every PROBE_S seconds of each gap.

    A gap of 0.35 s becomes 0.35, 0.25 and 0.15 s, so that a long gap counts as much as the health
    checks that are sent during the same time.
    """
    return [gap - n * PROBE_S for gap in gaps for n in range(max(1, int(gap / PROBE_S)))]


class Scales:
    """Measures the memory of the server and its children without engines, ten times a second."""

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
    """Return a process and all its descendants, without engines."""
    if is_engine(pid):
        return []
    return [pid, *(one for child in children(pid) for one in _family(child))]


class Stage:
    """One server with its honest clients and its memory measurement."""

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
