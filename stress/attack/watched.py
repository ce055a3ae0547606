"""A server for hostile files, whose health checks and memory are measured all the time."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import msgspec

from stress.attack.honest import Quantiles, Samples, quantiles
from stress.attack.target import Manner, Target, post
from stress.http import Call, Reply, Talk
from stress.site import Site
from tools.harness.processes import command, descendants, is_engine

ONE = "headrace-mini"
ATTACKER, NEIGHBOUR, OPERATOR = ((("X-Api-Key", key),) for key in ("ann", "bob", "boss"))
STALL_TARGET_S = 0.2
DRAIN_S = 1.0
MAX_HEALTH_S = 2.0
MAX_OVER_REST = 500e6
"""How many bytes the gateway may use in addition to its bytes before the first attack."""

MAX_STOP_S = DRAIN_S + 5.0
_FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--max-num-seqs", "6", "--max-models", "2"),
    *("--max-stall-ms", f"{1000 * STALL_TARGET_S:g}", "--drain-s", f"{DRAIN_S:g}"),
    *("--heartbeat-s", "1", "--linger-s", "2", "--load-timeout-s", "300"),
    *("--api-key", "ann", "--api-key", "bob", "--admin-key", "boss"),
)
_WEIGH_S = 0.2
# If all processes together use more bytes, the server is killed to protect the machine.
_TOO_MUCH = 4e9
_STOP_GIVES_UP_S = 60.0
_PATIENT = Manner("good", within_s=60.0)
_HELLO = (
    b'{"model":"%s","messages":[{"role":"user","content":"Hi."}],"max_tokens":4}' % ONE.encode()
)
_COUNT = (
    b'{"model":"%s","messages":[{"role":"user","content":"Count."}],"max_tokens":1000,'
    b'"ignore_eos":true,"stream":true}' % ONE.encode()
)
_INNER = re.compile(rb"Traceback|File \\\"|(?<![\w.:/])/(?:tmp|proc|dev|etc|root|home)/|\.py\b")
_BUG = re.compile(r"Traceback|of a bug")


class NotStarted(Exception):
    """Raised if a server does not start because of hostile files. `fail` has got the reason."""


class Watched:
    """One server and its measurements. `fail` receives a description of each violation."""

    def __init__(self, target: Target, site: Site) -> None:
        self.site = site
        self.fail = target.fail
        self._target = target
        self.health: Samples = []
        self.gaps: list[float] = []
        # Send time of each health check without an answer, by the check's number.
        self._asked: dict[str, float] = {}
        # Resident bytes of the server's own process.
        self.gateway: Samples = []
        # Resident bytes of the server's largest child process that is not an engine.
        self.workers: Samples = []
        self.engines: Samples = []
        self.rest = 0.0
        self.stop_s = 0.0
        self._pid = 0

    def begin(self) -> None:
        """Remembers the server's process id. The id must not change while the server runs."""
        self._pid = self.site.pid

    async def ask(self, label: str, call: Call, within_s: float = 30.0) -> Reply:
        """Sends a hostile request; the answer must not reveal internal details."""
        talk = await self.talk(label, [call.raw()], Manner(within_s=within_s))
        self.judge(label, talk.first, talk.end)
        return talk.first

    async def talk(self, label: str, pieces: Iterable[bytes], manner: Manner) -> Talk:
        """Sends pieces over one connection, and returns the conversation."""
        return await self._asking(label).talk(pieces, manner)

    def _asking(self, label: str) -> Target:
        """Return a target that checks every answer, and reports violations under the label."""
        own = Target(self.site, "", self._target.folder, 0, lambda it: self.fail(f"{label}: {it}"))
        own.statuses = self._target.statuses
        return own

    def judge(self, label: str, answer: Reply, end: str = "") -> None:
        """Reports an answer that is missing or that mentions files or source code."""
        if not answer.status:
            self.fail(f"{label}: no answer ({end})")
        elif answer.status >= 400 and (found := _INNER.search(answer.body)):
            around = bytes(answer.body[max(0, found.start() - 80) : found.end() + 80])
            self.fail(f"{label}: {answer.status} tells {found[0]!r} in {around!r}")

    async def check(self, label: str) -> bool:
        """Sends a chat with another key, and returns whether the server still runs."""
        if self.site.has_ended or self.site.pid != self._pid:
            self.fail(f"{label}: the server has ended: {self.site.last_lines[-3:]}")
            return False
        asking = self._asking(f"{label}, another key's chat")
        await asking.ask(post("/v1/chat/completions", _HELLO, *NEIGHBOUR), _PATIENT)
        if (slowest := self.slowest_health()) > MAX_HEALTH_S:
            self.fail(f"{label}: /health/live took {slowest:.1f} s")
            # The samples are cleared, so that a slow health check is reported only once.
            self.health.clear()
        return not self.site.has_ended

    def slowest_health(self) -> float:
        waiting = [time.monotonic() - asked for asked in self._asked.values()]
        return max([*waiting, *(value for _, value in self.health), 0.0])

    async def probe(self) -> None:
        """Records how long /health/live takes, as measured by a separate process."""
        command = (sys.executable, "-m", "stress.attack.prober", str(self.site.port))
        prober = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert prober.stdout is not None
        try:
            async for line in prober.stdout:
                number, *took = line.decode().split()
                if not took:
                    self._asked[number] = time.monotonic()
                    continue
                del self._asked[number]
                # "-" means that the server did not answer.
                if took != ["-"]:
                    self.health.append((time.monotonic() - float(took[0]), float(took[0])))
            self.fail("the process that requests /health/live has ended")
        finally:
            with contextlib.suppress(ProcessLookupError):
                prober.kill()
            await prober.wait()
            self._asked.clear()

    async def weigh(self) -> None:
        """Records the memory of all processes; kills the server if it uses too much."""
        while True:
            now = time.monotonic()
            sizes = await asyncio.to_thread(_sizes, self._pid)
            for samples, size in zip(
                (self.gateway, self.workers, self.engines), sizes, strict=True
            ):
                samples.append((now, size))
            if sum(sizes) > _TOO_MUCH:
                self.fail(f"{sum(sizes) / 1e9:.1f} GB were used (gateway, worker, engine: {sizes})")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                return
            await asyncio.sleep(_WEIGH_S)

    async def listen(self) -> None:
        """Reads another key's stream again and again, and records the gaps between its tokens."""
        url = f"http://127.0.0.1:{self.site.port}/v1/chat/completions"
        headers = {**dict(NEIGHBOUR), "Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=60.0) as client:
            while True:
                last: float | None = None
                try:
                    async with client.stream("POST", url, content=_COUNT, headers=headers) as got:
                        async for line in got.aiter_lines():
                            if line.startswith("data: {") and '"content":' in line:
                                now = time.monotonic()
                                self.gaps += [now - last] if last is not None else []
                                last = now
                except httpx.HTTPError:
                    self.gaps += [time.monotonic() - last] if last is not None else []
                    await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """Sends SIGTERM, which must end the server in time."""
        began = time.monotonic()
        try:
            code = await self.site.stop(signal.SIGTERM, _STOP_GIVES_UP_S)
        except subprocess.TimeoutExpired:
            self.fail(f"the server did not exit after SIGTERM within {_STOP_GIVES_UP_S:g} s")
            return
        self.stop_s = time.monotonic() - began
        if code:
            self.fail(f"after SIGTERM the server exited with code {code}")
        if self.stop_s > MAX_STOP_S:
            self.fail(f"SIGTERM took {self.stop_s:.1f} s of {MAX_STOP_S:g}")

    async def restart(self) -> None:
        """Stops the server and starts it again with the same state; it must start."""
        await self.stop()
        self.conclude()
        if not self.site.has_ended:
            self.site.close()
        self.site.start()
        self.begin()
        if not await self.site.ready():
            lines = [line[:300] for line in self.site.last_lines[-3:]]
            self.fail(f"the server does not start again: {lines}")

    def conclude(self) -> None:
        """Checks the log and the memory of the whole run, after the server has stopped."""
        lines = self.site.lines
        if bugs := [at for at, line in enumerate(lines) if _BUG.search(line)]:
            shown = "\n".join(line[:200] for line in lines[bugs[0] : bugs[0] + 30])
            self.fail(f"in the log, {len(bugs)} times: {shown}")
        largest = max((size for _, size in self.gateway), default=0.0)
        if largest > self.rest + MAX_OVER_REST:
            over = (largest - self.rest) / 1e6
            self.fail(f"the gateway took {over:.0f} MB over rest of {MAX_OVER_REST / 1e6:g}")

    def figures(self) -> str:
        """Return the measurements for the table of attacks."""
        health = quantiles(value for _, value in self.health)
        return (
            f"live p99 {1000 * health.p99:.0f} max {1000 * health.worst:.0f} ms, "
            f"MB gateway {_most(self.gateway)} worker {_most(self.workers)} "
            f"engine {_most(self.engines)}, stop {self.stop_s:.1f} s"
        )

    def quantiles(self) -> tuple[Quantiles, Quantiles]:
        """Return the quantiles of /health/live and of the gaps in the other key's stream."""
        return quantiles(value for _, value in self.health), quantiles(self.gaps)


def _most(samples: Samples) -> str:
    return f"{max((size for _, size in samples), default=0.0) / 1e6:.0f}"


def _sizes(pid: int) -> tuple[float, float, float]:
    """Return the resident bytes of the server, of its largest other process, and of its engines."""
    below = descendants(pid)
    engines = [_resident(one) for one in below if is_engine(one)]
    others = [_resident(one) for one in below if not is_engine(one) and command(one)]
    return _resident(pid), max(others, default=0.0), float(sum(engines))


def _resident(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return float(pages * os.sysconf("SC_PAGESIZE"))
    return 0.0


@contextlib.asynccontextmanager
async def watched_server(
    target: Target, folder: Path, *flags: str, environment: dict[str, str] | None = None
) -> AsyncIterator[Watched]:
    """Runs a server with API keys, headrace-mini and the models of `flags`."""
    given = tuple(f"{name}={value}" for name, value in (environment or {}).items())
    prefix = ("env", *given) if given else ()
    site = Site(f"--model={ONE}={ONE}", folder / "state", (*flags, *_FLAGS), prefix)
    site.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        if not await site.ready():
            target.fail(f"the server does not start: {[it[:300] for it in site.last_lines[-3:]]}")
            raise NotStarted
        watched = Watched(target, site)
        watched.begin()
        if not await watched.check("before anything hostile"):
            raise NotStarted
        watched.rest = _sizes(site.pid)[0]
        tasks = [asyncio.create_task(it) for it in (watched.probe(), watched.weigh())]
        yield watched
        if site.has_ended:
            target.fail(f"after the attack the server has ended: {site.last_lines[-3:]}")
        else:
            await watched.stop()
        watched.conclude()
        target.notes.append(watched.figures())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        site.close()


def chat(model: str) -> Call:
    """Return the attacker's chat with a model, which makes the server load it."""
    body = {"model": model, "messages": [{"role": "user", "content": "A b."}], "max_tokens": 3}
    return post("/v1/chat/completions", msgspec.json.encode(body), *ATTACKER)


def reading(model: str) -> tuple[Call, Call]:
    """Return requests that make the server read all of a model's files except the weights."""
    messages = [{"role": "user", "content": "A b. 0aaaa aaaa xxxx"}]
    told = msgspec.json.encode({"model": model, "messages": messages})
    text = msgspec.json.encode({"model": model, "content": "aaaa_0.x " * 500})
    return post("/apply-template", told, *ATTACKER), post("/tokenize", text, *ATTACKER)
