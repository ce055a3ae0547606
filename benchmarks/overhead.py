"""The cost of serving besides the model: planning, a step's own work, gateway, durable logs.

    cd TREE && PYTHONPATH=$PWD/src python -m benchmarks.overhead plan step gateway
    python -m benchmarks.overhead step gateway --base OTHER_TREE --pairs 10
    python -m benchmarks.overhead logs MODEL

Processor time, medians. "plan": plan and commit of one step, by the number that run, with 1,000
waiting; it should grow with the number that runs, and stay under 2 ms with 256. "step": what the
engine's loop computes per step with 32 sequences decoding, 1,000 waiting and a runner that
computes nothing: plan, commit, and messages encoded for the gateway. "gateway": what the server's
own process computes per token while 32 streams decode a tiny model; the engine and the workers are
not counted. A busy machine adds to all of it, by cold caches, so `--base` compares this tree with
another one in pairs: each pair measures both, one right after the other, and which one comes first
alternates. The ratio is this tree's processor time divided by the other's.

"logs": tokens a second of 32 streams, durable ones (opted in by their name, committed to SQLite
before they are sent) against plain ones (memory only), in turn. Rounds differ by more than a log
costs, so the processor time of the server's own process is counted too: what durable streams add to
it is the log, and as a share of all cores it bounds what the log can take from the engine.
"""

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from headrace_common import wire
from headrace_common.config.settings import SchedulerConfig
from headrace_common.ids import SequenceId, StreamId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import Message, NewSequence, Submit
from headrace_common.plan import ChunkResult, Drawn, StepPlan, StepResult
from headrace_common.sampling import Sampling
from headrace_engine.engine import Engine
from headrace_engine.scheduler.budget import Limits
from headrace_engine.scheduler.scheduler import Scheduler
from tools.harness.servers import running_server
from tools.harness.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
NUM_STREAMS = 32
NUM_WAITING = 1000
LIMIT_MS = 2.0  # of planning
FLAGS = ("--threads", "1", "--state-dir", "none", "--max-num-seqs", str(NUM_STREAMS))


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", nargs="+", help="plan, step, gateway; or logs MODEL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="per stream; 400, and 200 for logs")
    parser.add_argument("--base", type=Path, help="a tree to compare step and gateway with")
    parser.add_argument("--pairs", type=int, default=10, help="of runs, with --base")
    given = parser.parse_args()
    if given.base:
        for name in given.what:
            compare(name, given)
        return
    if given.what[0] == "logs":
        (model,) = given.what[1:]
        with tempfile.TemporaryDirectory() as state:
            flags = ("--state-dir", state, "--max-num-seqs", str(NUM_STREAMS))
            with running_server(model, *flags) as server:
                asyncio.run(logs(server.url, server.process.pid, given))
        return
    for name in given.what:
        {"plan": plans, "step": steps, "gateway": gateway}[name](given)


# two trees in turn


def compare(name: str, given: argparse.Namespace) -> None:
    """Prints how this tree's processor time compares with the other one's, pair by pair."""
    trees = [given.base.resolve(), ROOT]
    pairs = []
    for number in range(given.pairs):
        order = trees if number % 2 == 0 else trees[::-1]
        took = {tree: run_in(tree, name, given) for tree in order}
        pairs.append((took[trees[0]], took[ROOT]))
        print(f"{name}: {pairs[-1][0]:.1f} us there, {pairs[-1][1]:.1f} us here", flush=True)
    ratios = [here / there for there, here in pairs]
    there, here = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name}: {there:.1f} us there, {here:.1f} us here; here / there: median "
          f"{statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} in "
          f"{len(ratios)} pairs")  # fmt: skip


def run_in(tree: Path, name: str, given: argparse.Namespace) -> float:
    """The median that the tree's own copy of this script prints, in microseconds."""
    command = [sys.executable, "-m", "benchmarks.overhead", name, "--rounds", str(given.rounds)]
    command += ["--tokens", str(given.tokens)] if given.tokens else []
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    found = re.search(r": ([\d.]+) us", done.stdout)
    if found is None:
        sys.exit(f"{tree} has no figure for {name}.")
    return float(found[1])


# pure: no server, no model


def plans(given: argparse.Namespace) -> None:
    for num_running in (32, 64, 128, 256):
        milliseconds = 1000 * plan_s(num_running, given.rounds)
        held = "held" if milliseconds < LIMIT_MS else "missed"
        print(f"{num_running} running, {NUM_WAITING} waiting: {milliseconds:.2f} ms a step")
    print(f"limit {LIMIT_MS} ms: {held}")


def plan_s(num_running: int, num_rounds: int) -> float:
    """Seconds of plan and commit together, while all that run are decoding.

    The best of some rounds' medians: what else runs on the machine only ever adds.
    """
    scheduler = filled(num_running)
    while scheduler.status().num_running < num_running:
        plan_step(scheduler, 0.0)
    starts = [100.0 * number for number in range(num_rounds)]
    times = [[plan_step(scheduler, at + 0.05 * i) for i in range(100)] for at in starts]
    return min(map(statistics.median, times))


def filled(num_running: int) -> Scheduler:
    """A scheduler with places for so many, and NUM_WAITING more that wait."""
    limits = Limits(
        max_num_seqs=num_running, max_step_tokens=100_000, max_model_len=100_000, max_stall_s=0.1
    )
    scheduler = Scheduler(SchedulerConfig(), MemoryLayout(num_blocks=200_000), limits)
    for n in range(num_running + NUM_WAITING):
        new = (NewSequence(SequenceId(n), 0, 0),)
        prompts = (bytes(4 * 32),)
        asked = Submit(StreamId(str(n)), prompts, new, Sampling(), arrival=0.001 * n)
        scheduler.add(asked, now=0.0)
    return scheduler


def plan_step(scheduler: Scheduler, now: float) -> float:
    """Seconds that the scheduler computes for one step; the runner's are not among them."""
    began = time.process_time()
    plan = scheduler.plan(now)
    scheduler.take_outputs()
    planned = time.process_time() - began
    assert plan is not None
    result = result_of(plan)
    began = time.process_time()
    scheduler.commit(plan, result, now + 0.05)
    scheduler.take_outputs()
    return planned + time.process_time() - began


def result_of(plan: StepPlan) -> StepResult:
    drawn = Drawn((5,))
    return StepResult(tuple(ChunkResult((drawn,) * len(c.draws)) for c in plan.chunks), 0.05)


class NullRunner:
    """Draws one fixed token per sequence, at no cost that counts."""

    def __init__(self) -> None:
        self._result = StepResult((), 0.0)
        self.seconds = 0.0  # that its own work has taken

    def launch(self, plan: StepPlan) -> "NullRunner":
        began = time.process_time()
        self._result = result_of(plan)
        self.seconds += time.process_time() - began
        return self

    def result(self) -> StepResult:
        return self._result


class Encoding:
    """An outbox that does a message's part of the work, and sends it nowhere."""

    def put(self, message: Message) -> None:
        wire.encode(message)

    def num_unsent(self) -> int:
        return 0


def steps(given: argparse.Namespace) -> None:
    show("step", [step_s() for _ in range(given.rounds)])


def step_s() -> float:
    """Median seconds of a step in which NUM_STREAMS sequences decode."""
    scheduler, runner = filled(NUM_STREAMS), NullRunner()
    engine = Engine(scheduler, runner, Encoding())
    while scheduler.status().num_running < NUM_STREAMS:
        engine.step()
    return statistics.median(_one_step(engine, runner) for _ in range(200))


def _one_step(engine: Engine, runner: NullRunner) -> float:
    began, before = time.process_time(), runner.seconds
    engine.step()
    return time.process_time() - began - (runner.seconds - before)


# a server with 32 streams


class Round(NamedTuple):
    tokens_per_s: float
    cpu_s: float
    """Of the server's own process, per token."""
    cpu_share: float
    """The same, of all cores' time."""

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s, {self.cpu_share:.2%} CPU"


async def measure(client: httpx.AsyncClient, pid: int, num_tokens: int, name: str = "") -> Round:
    """From the first request to the end of the last stream; no name: plain streams."""
    begun, cpu = time.perf_counter(), cpu_s(pid)
    names = [f"{name} {number}" if name else "" for number in range(NUM_STREAMS)]
    await asyncio.gather(*(stream(client, each, num_tokens) for each in names))
    seconds, cpu = time.perf_counter() - begun, cpu_s(pid) - cpu
    total = NUM_STREAMS * num_tokens
    return Round(total / seconds, cpu / total, cpu / seconds / (os.cpu_count() or 1))


async def stream(client: httpx.AsyncClient, name: str, num_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    headers = {"X-Conversation-Id": name} if name else {}
    asked = {"json": body | {"stream": True}, "headers": headers}
    async with client.stream("POST", "/v1/completions", **asked) as response:  # type: ignore[arg-type]
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


def cpu_s(pid: int) -> float:
    """Processor seconds of all threads of one process so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def opened(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


def gateway(given: argparse.Namespace) -> None:
    async def run(url: str, pid: int) -> list[float]:
        async with opened(url) as client:
            rounds = range(given.rounds + 1)  # the first warms up
            return [(await measure(client, pid, given.tokens or 400)).cpu_s for _ in rounds][1:]

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        with running_server(str(model), *FLAGS) as server:
            show("gateway, per token", asyncio.run(run(server.url, server.process.pid)))


async def logs(url: str, pid: int, given: argparse.Namespace) -> None:
    num_rounds, num_tokens = given.rounds, given.tokens or 200
    async with opened(url) as client:
        before = await measure(client, pid, num_tokens)
        ratios, added = [], []
        for number in range(num_rounds):
            durable = await measure(client, pid, num_tokens, f"round {number}")
            after = await measure(client, pid, num_tokens)
            ratios.append(2 * durable.tokens_per_s / (before.tokens_per_s + after.tokens_per_s))
            added.append(durable.cpu_share - (before.cpu_share + after.cpu_share) / 2)
            print(f"plain {before}; durable {durable}; plain {after}", flush=True)
            before = after
    print(f"durable / plain: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to "
          f"{max(ratios):.4f} in {num_rounds} rounds")  # fmt: skip
    print(f"CPU that durable streams add: median {statistics.median(added):.2%} of all cores, "
          f"{min(added):.2%} to {max(added):.2%}")  # fmt: skip


def show(name: str, seconds: list[float]) -> None:
    least, most = 1e6 * min(seconds), 1e6 * max(seconds)
    median = 1e6 * statistics.median(seconds)
    print(f"{name}: {median:.1f} us (median of {len(seconds)}; {least:.1f} to {most:.1f})")


if __name__ == "__main__":
    main()
