"""Measures what serving costs besides the model: planning, steps, the gateway and durable logs.

    cd TREE && PYTHONPATH=$PWD/src python -m benchmarks.overhead plan step gateway
    python -m benchmarks.overhead step gateway --base OTHER_TREE --pairs 10
    python -m benchmarks.overhead logs MODEL

The figures are medians of processor time. "plan" is the time to plan and commit one step with
1,000 waiting requests. This time grows with the number of running sequences, and should stay
below 2 ms with 256. "step" is what the engine's loop computes per step: plan, commit and
encoded messages. There are 32 decoding sequences and 1,000 waiting requests, and the runner
computes nothing. "gateway" is what the server's main process computes per token while 32
streams of a tiny model run; the engine and the workers are not counted. On a busy machine all
figures rise, because caches are cold. Therefore `--base` compares this tree with another tree
in pairs of adjacent runs in alternating order. The ratio is this tree's processor time divided
by the other tree's.

"logs" compares the tokens per second of 32 durable streams with those of 32 plain streams, in
turn. A durable stream has a name, and its events are committed to SQLite before they are sent.
A plain stream is only in memory. These rates vary by more than a log costs, so the processor
time of the server's main process is compared as well. The difference is the cost of the log. As
a fraction of all cores, the difference limits what the log can take from the engine.
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
# The largest acceptable time for planning, in milliseconds.
LIMIT_MS = 2.0
FLAGS = ("--threads", "1", "--state-dir", "none", "--max-num-seqs", str(NUM_STREAMS))


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", nargs="+", help="plan, step, gateway; or logs MODEL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="per stream; default: 400, for logs 200")
    parser.add_argument("--base", type=Path, help="a tree to compare step and gateway with")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs with --base")
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


# Comparing two trees.


def compare(name: str, given: argparse.Namespace) -> None:
    """Print how this tree's processor time compares with the other tree's, pair by pair."""
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
    """Run the tree's own copy of this script; return its median in microseconds."""
    command = [sys.executable, "-m", "benchmarks.overhead", name, "--rounds", str(given.rounds)]
    command += ["--tokens", str(given.tokens)] if given.tokens else []
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    found = re.search(r": ([\d.]+) us", done.stdout)
    if found is None:
        sys.exit(f"{tree} has no figure for {name}.")
    return float(found[1])


# Planning alone, without a server or a model.


def plans(given: argparse.Namespace) -> None:
    for num_running in (32, 64, 128, 256):
        milliseconds = 1000 * plan_s(num_running, given.rounds)
        held = "held" if milliseconds < LIMIT_MS else "missed"
        print(f"{num_running} running, {NUM_WAITING} waiting: {milliseconds:.2f} ms a step")
    print(f"limit {LIMIT_MS} ms: {held}")


def plan_s(num_running: int, num_rounds: int) -> float:
    """Return the seconds of plan and commit together, while all running sequences decode.

    The result is the smallest median of several rounds, because other programs can only add time.
    """
    scheduler = filled(num_running)
    while scheduler.status().num_running < num_running:
        plan_step(scheduler, 0.0)
    starts = [100.0 * number for number in range(num_rounds)]
    times = [[plan_step(scheduler, at + 0.05 * i) for i in range(100)] for at in starts]
    return min(map(statistics.median, times))


def filled(num_running: int) -> Scheduler:
    """Return a scheduler with `num_running` slots and NUM_WAITING more requests."""
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
    """Return the processor seconds of the scheduler for one step, without the runner's seconds."""
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
    """Draws the same token for each sequence, at negligible cost."""

    def __init__(self) -> None:
        self._result = StepResult((), 0.0)
        # The runner's own processor time, which is subtracted.
        self.seconds = 0.0

    def launch(self, plan: StepPlan) -> "NullRunner":
        began = time.process_time()
        self._result = result_of(plan)
        self.seconds += time.process_time() - began
        return self

    def result(self) -> StepResult:
        return self._result


class Encoding:
    """An outbox that encodes messages but does not send them."""

    def put(self, message: Message) -> None:
        wire.encode(message)

    def num_unsent(self) -> int:
        return 0


def steps(given: argparse.Namespace) -> None:
    show("step", [step_s() for _ in range(given.rounds)])


def step_s() -> float:
    """Return the median seconds of a step in which NUM_STREAMS sequences decode."""
    scheduler, runner = filled(NUM_STREAMS), NullRunner()
    engine = Engine(scheduler, runner, Encoding())
    while scheduler.status().num_running < NUM_STREAMS:
        engine.step()
    return statistics.median(_one_step(engine, runner) for _ in range(200))


def _one_step(engine: Engine, runner: NullRunner) -> float:
    began, before = time.process_time(), runner.seconds
    engine.step()
    return time.process_time() - began - (runner.seconds - before)


# A server with 32 streams.


class Round(NamedTuple):
    tokens_per_s: float
    cpu_s: float
    """Processor seconds of the server's main process per token."""
    cpu_share: float
    """Processor time of the server's main process as a fraction of all cores' time."""

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s, {self.cpu_share:.2%} CPU"


async def measure(client: httpx.AsyncClient, pid: int, num_tokens: int, name: str = "") -> Round:
    """Measure until the last stream has ended. Without a name, the streams are plain."""
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
    """Return the processor seconds of all threads of a process so far, exact to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def opened(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


def gateway(given: argparse.Namespace) -> None:
    async def run(url: str, pid: int) -> list[float]:
        async with opened(url) as client:
            # The first round warms up.
            rounds = range(given.rounds + 1)
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
