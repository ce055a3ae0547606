"""Runs servers, honest clients and one attack after another, and judges each attack."""

import asyncio
import contextlib
import random
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

import headrace_common.checkpoints
from stress.attack.accidents import ACCIDENTS, DRAIN_S, NUM_DESCRIPTORS, small_disk
from stress.attack.bodies import BODIES, TEMPLATE_HEAD, WORST
from stress.attack.honest import HEARTBEAT_S, Quantiles, Stage, as_waits, quantiles, within
from stress.attack.hostile import HOSTILE
from stress.attack.target import Attack, Target, until
from stress.attack.tenants import TENANTS
from stress.attack.wires import WIRES
from stress.compare import Violation
from stress.site import Site

ATTACKS: dict[str, Attack] = {
    **WORST,
    **BODIES,
    **WIRES,
    **TENANTS,
    **HOSTILE,
    **ACCIDENTS,
}
# These attacks run only if a run takes two minutes or more, or if the user names them.
LONG = ("accident-freeze-long",)
MAX_HEALTH_S, MAX_GAP_S, MAX_MEMORY = 0.25, 0.5, 500e6

_BOUT_S = 90.0
# Seconds for an attack with hostile files. Such an attack starts its own server, loads models and
# may wait for a hub.
_BOUT_OF_FILES_S = 240.0
_WELL_S = 45.0
# An attack waits this many seconds for the honest stream's first token, then starts anyway.
_TALKS_S = 15.0
_SETUPS = {"accident-descriptors": "few descriptors", "accident-disk-full": "small disk"}
_DAMAGES = ("accident-corrupt-rows", "accident-corrupt-bytes", "accident-disk-full")
_BUG = re.compile(r"Traceback|of a bug")
_COMPLAINT = re.compile(r"Traceback|of a bug|^\S+ \S+ ERROR|^ERROR|^headrace: (?!stopped)")
# At most _MAX_SHOWN problems are shown. If several problems start with the same _SAME characters,
# only the first of these problems is shown.
_MAX_SHOWN, _SAME = 8, 40


class Plan(msgspec.Struct, frozen=True):
    """The attacks to run, in order or shuffled, until `seconds` or `rounds` are over."""

    folder: Path
    names: tuple[str, ...]
    seed: int
    seconds: float = float("inf")
    rounds: int = 1
    first_round: int = 0
    num_each: int = 20
    num_tokens: int = 1500
    is_shuffled: bool = True
    judges_times: bool = False


class Bout(msgspec.Struct):
    """One run of one attack: what it cost and what went wrong."""

    name: str
    number: int
    seconds: float = 0.0
    num_answers: int = 0
    statuses: str = ""
    health: Quantiles = Quantiles(0, 0, 0)
    gaps: Quantiles = Quantiles(0, 0, 0)
    memory: float = 0.0
    problems: list[str] = []

    def line(self) -> str:
        verdict = "held" if not self.problems else f"FAILED {len(self.problems)}"
        return (
            f"{self.name:<27}{self.number:>3}{self.seconds:>7.1f} {_ms(self.health)} "
            f"{_ms(self.gaps)}{self.memory / 1e6:>7.0f}  {verdict:<10} {self.statuses}"
        )


HEADINGS = (
    f"{'':37} {'health, ms':^21} {'stream gaps, ms':^21} {'MB over':>7}\n"
    f"{'attack':<27}{'no.':>3}{'s':>7} {'p50':>7}{'p99':>7}{'worst':>7} "
    f"{'p50':>7}{'p99':>7}{'worst':>7}{'rest':>7}  verdict    answers"
)


def _ms(found: Quantiles) -> str:
    return "".join(f"{1000 * value:7.0f}" for value in found)


class Run:
    """Runs the attacks of a plan. `say` receives each line of output immediately."""

    def __init__(self, plan: Plan, say: Callable[[str], None] = print) -> None:
        self.bouts: list[Bout] = []
        self._plan = plan
        self._say = say
        # The deadline is set when the first attack starts.
        self._deadline = float("inf")
        self._num_stages = 0
        self._lags: list[float] = []
        self._num_tokens = 0
        self._bout = Bout("start", 0)
        plan.folder.mkdir(parents=True, exist_ok=True)
        own = Path(headrace_common.checkpoints.__file__).parent / "mini" / "chat_template.jinja"
        self._template = plan.folder / "template.jinja"
        self._template.write_text(TEMPLATE_HEAD + own.read_text())

    @property
    def problems(self) -> list[str]:
        return [f"{bout.name}: {problem}" for bout in self.bouts for problem in bout.problems]

    async def run(self) -> str:
        """Runs all attacks, and returns the table of results."""
        self._say(HEADINGS)
        queue = self._queue()
        while queue and time.monotonic() < self._deadline:
            setup = _SETUPS.get(queue[0][0], "")
            async with self._stage(setup) as stage:
                if not self.bouts:
                    self._deadline = time.monotonic() + self._plan.seconds
                while queue and _SETUPS.get(queue[0][0], "") == setup and not stage.site.has_ended:
                    if time.monotonic() >= self._deadline:
                        break
                    name, number = queue.pop(0)
                    if not await self._fight(stage, name, number):
                        break
        return self._text([f"{name} {number}" for name, number in queue])

    def _queue(self) -> list[tuple[str, int]]:
        """Return the attacks, sorted by the setup of their server.

        Attacks with the same setup share a server, so few servers are started.
        """
        first = self._plan.first_round
        queue = []
        for number in range(first, first + self._plan.rounds):
            names = list(self._plan.names)
            if self._plan.is_shuffled:
                random.Random(f"{self._plan.seed}/order {number}").shuffle(names)
            names.sort(key=lambda name: _SETUPS.get(name, ""))
            queue += [(name, number) for name in names]
        return queue

    @contextlib.asynccontextmanager
    async def _stage(self, setup: str) -> AsyncIterator[Stage]:
        self._num_stages += 1
        state = self._plan.folder / f"state-{self._num_stages}"
        flags = ("--dtype", "float32", "--threads", "1", "--chat-template", str(self._template))
        flags += ("--heartbeat-s", str(HEARTBEAT_S), "--linger-s", "2", "--drain-s", str(DRAIN_S))
        limit = ("sh", "-c", f'ulimit -n {NUM_DESCRIPTORS} && exec "$@"', "sh")
        disk = small_disk(state) if setup == "small disk" else contextlib.nullcontext()
        with disk:
            prefix = limit if setup == "few descriptors" else ()
            stage = Stage(Site("headrace-mini", state, flags, prefix), self._plan.seed, self._hear)
            tasks: list[asyncio.Task[None]] = []
            try:
                await stage.open(self._plan.num_tokens)
                tasks = [
                    asyncio.create_task(it.run())
                    for it in (stage.chatter, stage.prober, stage.scales)
                ]
                yield stage
                await self._close(stage, tasks[0])
            finally:
                for task in tasks:
                    task.cancel()
                stage.prober.close()
                stage.chatter.close()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._lags += [lag for _, lag in stage.prober.lags]
                self._num_tokens += stage.chatter.num_tokens
                stage.site.close()

    def _hear(self, began: float, violation: Violation) -> None:
        what = f"the honest stream: {violation.kind} ({violation.number}): {violation.what}"
        if what not in self._bout.problems:
            self._bout.problems.append(what)

    async def _fight(self, stage: Stage, name: str, number: int) -> bool:
        """Runs one attack. Returns False if the attack did not end or the server did not
        recover.
        """
        bout = self._bout = Bout(name, number)
        self.bouts.append(bout)
        await until(lambda: stage.chatter.is_talking, _TALKS_S)
        site, began = stage.site, time.monotonic()
        engine, log, num_lines = site.engine_pid(), site.lines, len(site.lines)
        is_accident = name in ACCIDENTS
        if is_accident:
            self._excuse(stage, name)
        label = f"{self._plan.seed}/{name}/{number}"
        target = Target(site, label, self._plan.folder, self._plan.num_each, bout.problems.append)
        longest_s = _BOUT_OF_FILES_S if name in HOSTILE else _BOUT_S
        limit_s = min(longest_s, max(20.0, self._deadline - began))
        is_over = False
        try:
            async with asyncio.timeout(limit_s):
                await ATTACKS[name](target)
            is_over = True
        except TimeoutError:
            bout.problems.append(f"the attack did not end in {limit_s:.0f} s")
        is_well = await site.is_well(_WELL_S)
        if is_accident:
            self._excuse(stage, name)
        if site.has_ended:
            bout.problems.append(f"the server has ended: {site.last_lines[-4:]}")
        elif not is_well:
            bout.problems.append(f"the server did not recover within {_WELL_S:g} s")
        if not is_accident and site.engine_pid() != engine:
            bout.problems.append("the engine was killed, but not by the attack")
        lines = log[num_lines:] + (site.lines if site.lines is not log else [])
        pattern = _BUG if is_accident else _COMPLAINT
        bout.problems += [f"in the log: {line}" for line in lines if pattern.search(line)]
        self._measure(stage, bout, began, is_accident)
        bout.num_answers = target.statuses.total()
        shown = target.statuses.most_common(6)
        bout.statuses = ", ".join([*target.notes, *(f"{n} × {status}" for status, n in shown)])
        self._tell(bout)
        return is_well and is_over

    def _excuse(self, stage: Stage, name: str) -> None:
        stage.chatter.excused_at = time.monotonic()
        if name in _DAMAGES:
            stage.chatter.forgiven_at = time.monotonic()

    def _measure(self, stage: Stage, bout: Bout, began: float, is_accident: bool) -> None:
        ended = time.monotonic()
        prober, chatter = stage.prober, stage.chatter
        bout.seconds = ended - began
        probes = [*prober.samples, *prober.pending()]
        bout.health = quantiles(within(probes, began, ended))
        gaps = [*chatter.gaps, *chatter.pending()]
        bout.gaps = quantiles(as_waits(within(gaps, began, ended)))
        bout.memory = max(within(stage.scales.samples, began, ended), default=0.0)
        bout.memory = max(0.0, bout.memory - stage.scales.rest)
        if is_accident:
            return
        unwell = [said for at, said in prober.problems if began <= at <= ended]
        bout.problems += [f"{len(unwell)} times {said}" for said in unwell[:1]]
        if self._plan.judges_times and bout.name in WORST:
            bout.problems += _over("health p99", bout.health.p99, MAX_HEALTH_S)
            bout.problems += _over("gap p99", bout.gaps.p99, MAX_GAP_S)
            bout.problems += _over("memory, GB", bout.memory / 1e9, MAX_MEMORY / 1e9)

    async def _close(self, stage: Stage, chatting: asyncio.Task[None]) -> None:
        """Waits for the end of the honest stream, and then stops the server."""
        bout = self._bout = Bout("end", self._num_stages)
        began, num_lines = time.monotonic(), len(stage.site.lines)
        if not stage.site.has_ended and not await stage.site.is_well(1.0):
            # The last attack has already reported that this server has not recovered.
            stage.site.close()
            return
        if not stage.site.has_ended:
            stage.chatter.is_over = True
            await asyncio.wait([chatting], timeout=60.0)
            if not chatting.done():
                bout.problems.append("the honest stream did not end in 60 s")
            elif error := chatting.exception():
                bout.problems.append(f"the honest client failed: {error!r}")
            code = await self._stop(stage.site)
            if code != 0:
                bout.problems.append(f"after SIGTERM the server exited with code {code}")
        lines = stage.site.lines[num_lines:]
        bout.problems += [f"in the log: {line}" for line in lines if _COMPLAINT.search(line)]
        self._measure(stage, bout, began, is_accident=True)
        self.bouts.append(bout)
        self._tell(bout)

    async def _stop(self, site: Site) -> int | None:
        within_s = DRAIN_S + 6.0 if self._plan.judges_times else 60.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await site.stop(signal.SIGTERM, within_s)
        return None

    def _tell(self, bout: Bout) -> None:
        self._say(bout.line())
        kinds = {problem[:_SAME]: problem for problem in reversed(bout.problems)}
        for problem in list(reversed(kinds.values()))[:_MAX_SHOWN]:
            self._say(f"    VIOLATION {problem}")
        if bout.problems and bout.name in ATTACKS:
            again = f'--only {bout.name} --round {bout.number}"'
            self._say(f'    again: make attack SEED={self._plan.seed} ARGS="{again}')

    def _text(self, left: list[str]) -> str:
        lag = quantiles(self._lags)
        bad = [bout for bout in self.bouts if bout.problems]
        lines = [
            HEADINGS,
            *(bout.line() for bout in self.bouts),
            f"{self._num_tokens} tokens of the honest stream; delay of this program itself: "
            f"{_ms(lag)} ms (p50, p99, worst)",
            *([f"attacks not reached: {', '.join(left[:_MAX_SHOWN])} …"] if left else []),
            f"{len(bad)} of {len(self.bouts)} attacks failed"
            + (f": {', '.join(sorted({bout.name for bout in bad}))}" if bad else ""),
        ]
        return "\n".join(lines)


def choose(only: str, is_long: bool) -> tuple[str, ...]:
    """Return the attacks whose names start with one of the comma-separated prefixes.

    If `only` is empty, return all attacks. Long attacks need `is_long` or their full name.
    """
    wanted = tuple(filter(None, only.split(",")))
    names = [name for name in ATTACKS if not wanted or name.startswith(wanted)]
    return tuple(name for name in names if is_long or name not in LONG or name in wanted)


def _over(what: str, value: float, limit: float) -> list[str]:
    return [f"{what} {value:.2f} over {limit:g}"] if value > limit else []
