"""The server under test and its engine: starts them, kills them and starts them again."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import httpx
import msgspec

from headrace.streams.stores.sqlite import SqliteStore
from tools.harness import processes
from tools.harness.servers import ServerProcess

HEARTBEAT_S = 2.0
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--max-num-seqs", "6"),
    *("--heartbeat-s", str(HEARTBEAT_S), "--linger-s", "2", "--drain-s", "1"),
)
START_S = 300.0
_COMPLAINT = re.compile(r"Traceback|^\S+ \S+ ERROR|^ERROR")
# The start of an entry in the server's log.
_NEXT = re.compile(r"\d{4}-\d\d-\d\d \S+ [A-Z]+ ")
# How many lines of a traceback are shown.
_SHOWN_LINES = 30
# This message is expected after the engine was frozen for long.
_EXPECTED = "The engine does not respond and is killed"


class Death(msgspec.Struct, frozen=True):
    """A process that the test ended: the engine, the server or both."""

    at: float
    what: str


class Site:
    """A server under test. Only its `deaths` and `outages` excuse a failure."""

    def __init__(
        self,
        model: Path | str,
        state_dir: Path | str,
        flags: tuple[str, ...] = FLAGS,
        prefix: tuple[str, ...] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.port = processes.free_port()
        self.state_dir = state_dir
        self.deaths: list[Death] = []
        # For each outage: when it began, and when the server was ready again.
        self.outages = [[time.monotonic(), float("inf")]]
        self.complaints: list[str] = []
        place = ("--host", host, "--port", str(self.port), "--state-dir", str(state_dir))
        self._flags = (str(model), *flags, *place)
        self._prefix = prefix
        self.server: ServerProcess
        self._starting: asyncio.Task[bool]

    def launch(self) -> ServerProcess:
        """Starts the server's process, and does not wait for anything."""
        self.server = ServerProcess(*self._flags, prefix=self._prefix)
        return self.server

    def start(self) -> None:
        self.launch()
        self._starting = asyncio.create_task(self._watch_start(self.server), name="start")

    async def ready(self) -> bool:
        """Waits until the server serves a model; returns False if it ended or takes too long."""
        return await self._starting

    async def _watch_start(self, server: ServerProcess) -> bool:
        deadline = time.monotonic() + START_S
        while not server.url:
            if server.process.poll() is not None or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        self.outages[-1][1] = time.monotonic()
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended although nobody stopped it."""
        return self.server.process.poll() is not None

    @property
    def lines(self) -> list[str]:
        """The log of the server that runs now or ran last."""
        return self.server.lines

    @property
    def last_lines(self) -> list[str]:
        return self.lines[-15:]

    @property
    def pid(self) -> int:
        return self.server.process.pid

    def was_out(self, began: float, ended: float) -> bool:
        """Return whether the server was stopped or not ready at any time of this period."""
        return any(began < until + 1.0 and ended > since - 0.1 for since, until in self.outages)

    def kill_engine(self) -> bool:
        """Kills the engine with SIGKILL; returns False if there is none at this time."""
        if (pid := self.engine_pid()) is None:
            return False
        self._note("engine")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    async def kill_server(self, number: int = signal.SIGKILL, with_engine: bool = False) -> None:
        """Ends the server, waits for its exit, and starts it again."""
        await self.bring_down(number, with_engine)
        self.start()

    async def bring_down(self, number: int, with_engine: bool = False, within_s: float = 60) -> int:
        """Ends the server and returns its exit code; the outage lasts until the next start."""
        engine = self.engine_pid()
        name = {signal.SIGKILL: "server", signal.SIGTERM: "server by SIGTERM"}[number]  # type: ignore[index]
        self._note("both" if with_engine else name)
        self.outages.append([time.monotonic(), float("inf")])
        self._starting.cancel()
        if with_engine and engine is not None:
            os.kill(engine, signal.SIGKILL)
        return await self.stop(number, within_s)

    async def stop(self, number: int = signal.SIGTERM, within_s: float = 60) -> int:
        """Stops the server, collects the complaints in its log, and returns its exit code."""
        code = await asyncio.to_thread(self.server.stop, number, within_s)
        lines = self.server.lines
        self.complaints += [
            "\n".join(_entry(lines, i))
            for i, line in enumerate(lines)
            if _COMPLAINT.search(line) and _EXPECTED not in line
        ]
        return code

    def close(self) -> None:
        """Ends all processes, however the run ended."""
        if not self.has_ended:
            self.server.stop(signal.SIGKILL)

    async def num_unfinished(self) -> int:
        """Return how many streams in its folder never ended; the server must have been stopped."""
        store = SqliteStore.open(Path(self.state_dir))
        unfinished = await store.unfinished()
        await store.close()
        return len(unfinished)

    async def freeze_engine(self, seconds: float) -> None:
        """Freezes the engine with SIGSTOP; after ten seconds the server treats it as dead."""
        if (pid := self.engine_pid()) is None:
            return
        self._note(f"engine frozen for {seconds:.1f} s")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def engine_pid(self) -> int | None:
        """Return the process of a random living engine, whether its model is loaded or not."""
        found = processes.engines(self.pid)
        return random.choice(found) if found else None

    async def is_well(self, within_s: float) -> bool:
        """Waits until the engine is ready; returns False if the server ended or time is over."""
        deadline = time.monotonic() + within_s
        async with httpx.AsyncClient(verify=False) as client:
            while time.monotonic() < deadline and not self.has_ended:
                with contextlib.suppress(httpx.TransportError):
                    health = await client.get(f"http://{self.host}:{self.port}/health")
                    if health.json()["status"] == "ok":
                        return True
                await asyncio.sleep(0.1)
        return False

    async def is_engine_at_rest(self) -> bool:
        """Return whether the engine uses almost no processor time for a second."""
        pid = self.engine_pid() or 0
        before = processes.ticks(pid)
        await asyncio.sleep(1.0)
        return processes.ticks(pid) - before <= 5

    def _note(self, what: str) -> None:
        self.deaths.append(Death(time.monotonic(), what))


def _entry(lines: list[str], first: int) -> list[str]:
    """Return the first line and the last lines of the log entry that starts at line `first`."""
    later = range(first + 1, len(lines))
    end = next((i for i in later if _NEXT.match(lines[i])), len(lines))
    return [lines[first], *lines[max(first + 1, end - _SHOWN_LINES) : end]]
