"""Runs one seed, in a process of its own, and returns what happened."""

import hashlib
import logging
import random
import shutil
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from detangle import SimConfig, choice, randint
from detangle.strategies import PCT, RandomWalk, Replay, Strategy

from headrace.fleet.served_model import ServedModel
from headrace_common.config.settings import ModelConfig
from stress.simulated_server import disk
from stress.simulated_server.batch_clients import uses_batches
from stress.simulated_server.clients import asks_for_a_while
from stress.simulated_server.cluster import ClusterWorld, breaks_gateways, breaks_redis
from stress.simulated_server.cluster_clients import asks_gateways, uses_the_cluster
from stress.simulated_server.fleet_clients import asks_models, waits
from stress.simulated_server.fleet_world import FleetWorld
from stress.simulated_server.operators import OPERATORS
from stress.simulated_server.processes import packaged_text
from stress.simulated_server.requests import MODEL
from stress.simulated_server.retention import returns_too_late
from stress.simulated_server.stopping_clients import stops_streams
from stress.simulated_server.system import WorldLoop, simulated
from stress.simulated_server.world import StoryHandler, World, kills_engines, restarts

CONFIG = SimConfig(
    patch_time=True, max_steps=3_000_000, timer_jitter=0.003, step_cost=2e-5, max_time=20_000
)


WORLDS: dict[str, type[World]] = {"server": World, "fleet": FleetWorld, "cluster": ClusterWorld}


class Outcome(NamedTuple):
    """The result of a run. `values` are all decisions; they replay the run."""

    failure: str
    # The kind of the failure: the error's type, and where it was raised.
    signature: tuple[str, ...]
    num_steps: int
    virtual_s: float
    injected: dict[str, int]
    counts: dict[str, int]
    digest: str
    values: list[int]
    story: list[tuple[float, str]]


def strategy_of(seed: int) -> Strategy:
    """Return what decides for a seed: half of the seeds change the order of tasks rarely."""
    chosen: Strategy = RandomWalk(seed) if seed % 2 else PCT(seed, depth=5, horizon=5000)
    chosen.start(0)
    return chosen


def replay(values: Sequence[int]) -> Strategy:
    return Replay(values)


def read_model() -> ServedModel:
    """Read the model for all runs, so that each run only needs a copy."""
    packaged_text()
    return ServedModel(ModelConfig(model=MODEL))


def draw_kind() -> str:
    """Choose between one server, a server with several models, and several gateways."""
    return choice(("server",) * 5 + ("fleet",) * 3 + ("cluster",) * 2)


def run_once(strategy: Strategy, model: ServedModel) -> Outcome:
    """Run one world. The calling process must end afterwards, because dead servers stay in it."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-world-", dir=_memory()))
    loop = WorldLoop(CONFIG, strategy)
    worlds: list[World] = []

    async def main() -> None:
        random.seed(randint(0, 1 << 30))
        kind = draw_kind()
        worlds.append(world := WORLDS[kind](folder, model))
        logging.getLogger().handlers = [StoryHandler(world)]
        logging.getLogger().setLevel(logging.INFO)
        if kind == "fleet":
            clients = [*[asks_models] * randint(1, 6), *[stops_streams] * choice((0, 1, 2))]
            await world.run([waits, *clients], [*OPERATORS, kills_engines])
        elif kind == "cluster":
            operators = [breaks_gateways, breaks_gateways, breaks_redis]
            clients = [uses_the_cluster] * randint(1, 3) + [uses_batches] * choice((0, 0, 1, 2))
            # The clients of the single server expect that no stream is lost.
            if not world.has_failovers:
                clients += [asks_gateways] * choice((0, 0, 1, 2))
            await world.run(clients, operators)
        else:
            operators = [restarts, kills_engines, disk.disk_fails]
            clients = [asks_for_a_while] * randint(1, 6) + [uses_batches] * choice((0, 0, 1, 2))
            await world.run([*clients, returns_too_late], operators)

    failure = ""
    signature: tuple[str, ...] = ()
    try:
        with simulated(), disk.patched():
            loop.run_until_complete(main())
        _check_background(loop)
    except Exception as error:
        failure = "".join(traceback.format_exception(error))
        place = traceback.extract_tb(error.__traceback__)[-1]
        signature = (type(error).__name__, place.filename, place.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    faults, counts = (worlds[0].faults.injected, worlds[0].counts) if worlds else ({}, {})
    digest = hashlib.sha256(repr((loop.order_hash, loop.time())).encode()).hexdigest()[:16]
    return Outcome(
        failure,
        signature,
        loop.steps,
        loop.time(),
        dict(faults),
        dict(counts),
        digest,
        [decision.value for decision in loop.decisions],
        worlds[0].story if worlds else [],
    )


def _check_background(loop: WorldLoop) -> None:
    """Raise the error of a task that nobody awaited, or of a callback.

    A killed process does not await its tasks any more.
    """
    for context in loop.unhandled:
        if not _was_killed(context.get("task") or context.get("future")):
            raise context.get("exception") or AssertionError(context.get("message"))
    for task in loop.tasks:
        if _was_killed(task):
            continue
        is_unseen = task.done() and not task.cancelled() and getattr(task, "_log_traceback", False)
        if is_unseen and (error := task.exception()) is not None:
            raise error


def _was_killed(task: object) -> bool:
    """Return whether the process of this task was killed."""
    process = getattr(task, "process", None)
    return process is not None and process.has_ended


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
