"""What serving costs besides the model: processor time of the gateway, and of a step's own work.

    cd TREE && PYTHONPATH=$PWD/src python -m benchmarks.overhead

Two figures, as medians. "Gateway": what the server's own process computes per token while 32
streams decode a tiny model; the engine and the workers are other processes and do not count.
"Step": what the engine's loop computes per step with 32 sequences decoding, 1,000 waiting and a
runner that computes nothing: plan, commit, and messages encoded for the gateway.

Processor time, not wall time; but a busy machine still adds to it, by cold caches. To compare two
trees, run them in turn and compare the medians of several runs.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.plan_step import result_of, submit
from headrace.config.settings import SchedulerConfig
from headrace.core.layout import MemoryLayout
from headrace.core.messages import Message
from headrace.core.plan import StepPlan, StepResult
from headrace.engine import wire
from headrace.engine.engine import Engine
from headrace.scheduler.budget import Limits
from headrace.scheduler.scheduler import Scheduler
from tools.harness.servers import running_server
from tools.harness.tiny_models import make_tiny_model

NUM_STREAMS = 32
NUM_WAITING = 1000
NUM_STEPS = 200
FLAGS = ("--threads", "1", "--state-dir", "none", "--max-num-seqs", str(NUM_STREAMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    given = parser.parse_args()
    show("step", [step_s() for _ in range(given.rounds)])
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        with running_server(str(model), *FLAGS) as server:
            figures = asyncio.run(gateway_s(server.url, server.process.pid, given))
    show("gateway, per token", figures)


def show(name: str, seconds: list[float]) -> None:
    least, most = 1e6 * min(seconds), 1e6 * max(seconds)
    median = 1e6 * statistics.median(seconds)
    print(f"{name}: {median:.1f} us (median of {len(seconds)}; {least:.1f} to {most:.1f})")


async def gateway_s(url: str, pid: int, given: argparse.Namespace) -> list[float]:
    """Seconds per token, one figure a round; the first round warms up."""
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    figures = []
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        for _ in range(given.rounds + 1):
            before = cpu_s(pid)
            await asyncio.gather(*(stream(client, given.tokens) for _ in range(NUM_STREAMS)))
            figures.append((cpu_s(pid) - before) / (NUM_STREAMS * given.tokens))
    return figures[1:]


async def stream(client: httpx.AsyncClient, num_tokens: int) -> None:
    body = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


def cpu_s(pid: int) -> float:
    """Processor seconds of all threads of one process so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


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


def step_s() -> float:
    """Median seconds of a step in which NUM_STREAMS sequences decode."""
    limits = Limits(
        max_num_seqs=NUM_STREAMS, max_step_tokens=100_000, max_model_len=100_000, max_stall_s=0.1
    )
    scheduler = Scheduler(SchedulerConfig(), MemoryLayout(num_blocks=200_000), limits)
    for number in range(NUM_STREAMS + NUM_WAITING):
        scheduler.add(submit(number), now=0.0)
    runner = NullRunner()
    engine = Engine(scheduler, runner, Encoding())
    while scheduler.status().num_running < NUM_STREAMS:
        engine.step()
    return statistics.median(_one_step(engine, runner) for _ in range(NUM_STEPS))


def _one_step(engine: Engine, runner: NullRunner) -> float:
    began, before = time.process_time(), runner.seconds
    engine.step()
    return time.process_time() - began - (runner.seconds - before)


if __name__ == "__main__":
    main()
