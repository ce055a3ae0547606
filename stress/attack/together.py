"""Sends hostile inputs of all kinds to one server, and measures how another key is affected."""

import asyncio
import contextlib
import itertools
import tempfile
import time
from pathlib import Path

from headrace.fleet.model_check import MAX_BYTES
from stress.attack.honest import Quantiles, Samples
from stress.attack.hostile import Folders, load_adapter, send_form
from stress.attack.hostile_adapters import make_hostile_adapter, make_valid_adapter
from stress.attack.target import Target
from stress.attack.watched import (
    MAX_HEALTH_S,
    MAX_OVER_REST,
    MAX_STOP_S,
    STALL_TARGET_S,
    NotStarted,
    Watched,
    chat,
    reading,
    watched_server,
)
from stress.site import Site

_NUM_FOLDERS, _NUM_ADAPTERS, _NUM_FORMS_AT_ONCE = 60, 30, 32
_FORM_BYTES = 2 << 20
_ANSWER_S = 120.0
# The table shows the memory of six parts of the run.
_NUM_TIMES = 6


async def run_together(seed: int, seconds: float, problems: list[str]) -> str:
    """Attacks one server for `seconds`; returns a table, and adds the faults to `problems`."""
    with tempfile.TemporaryDirectory(prefix="headrace-hostile-") as name:
        root = Path(name)
        target = Target(Site("unused", root), f"{seed}/together", root, 0, problems.append)
        made = Folders(root, target.label, _NUM_FOLDERS)
        base = make_valid_adapter(root / "base adapter")
        adapters = {
            path: make_hostile_adapter(path, base, f"{target.label}/{path.name}")
            for path in (root / f"adapter-{n}" for n in range(_NUM_ADAPTERS))
        }
        async with watched_server(target, root, *made.flags) as watched:
            spoiled = await asyncio.to_thread(made.spoil)
            loops = [
                *(_send_forms(watched, target, n) for n in range(_NUM_FORMS_AT_ONCE)),
                _read_folders(watched, spoiled),
                _load_folders(watched, spoiled),
                _load_adapters(watched, adapters),
                watched.listen(),
            ]
            tasks = [asyncio.create_task(loop) for loop in loops]
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            problems += [f"a loop ended: {it!r}" for it in results if isinstance(it, Exception)]
            await watched.check("all together")
        return _table(watched, target)


async def _send_forms(watched: Watched, target: Target, client: int) -> None:
    rng = target.rng(client)
    for number in itertools.count():
        await send_form(watched, rng, f"{target.label} client {client}/{number}", _FORM_BYTES)


async def _read_folders(watched: Watched, spoiled: dict[str, str]) -> None:
    for model, what in itertools.cycle(spoiled.items()):
        for call in reading(model):
            await watched.ask(f"{call.path} {what}", call, _ANSWER_S)


async def _load_folders(watched: Watched, spoiled: dict[str, str]) -> None:
    for model, what in itertools.cycle(spoiled.items()):
        await watched.ask(f"chat {what}", chat(model), _ANSWER_S)


async def _load_adapters(watched: Watched, adapters: dict[Path, str]) -> None:
    for path, what in itertools.cycle(adapters.items()):
        await load_adapter(watched, f"{path.name} ({what})", path.name, path)


def _table(watched: Watched, target: Target) -> str:
    health, gaps = watched.quantiles()
    shown = ", ".join(f"{n} × {status}" for status, n in target.statuses.most_common(8))
    most = (watched.rest + MAX_OVER_REST) / 1e6
    return "\n".join(
        (
            f"{'':34}{'p50':>8}{'p99':>8}{'most':>8}{'limit':>8}",
            _row("/health/live, ms", health, f"{1000 * MAX_HEALTH_S:.0f}"),
            _row("another key's token gaps, ms", gaps, f"{1000 * STALL_TARGET_S:.0f}"),
            _sizes("gateway, MB over time", watched.gateway, f"{most:.0f}"),
            _sizes("largest worker, MB", watched.workers, f"{MAX_BYTES / 1e6:.0f}"),
            _sizes("engines, MB", watched.engines, "-"),
            f"{'from SIGTERM to exit, s':34}{watched.stop_s:>24.1f}{MAX_STOP_S:>8.0f}",
            f"answers: {shown}",
        )
    )


def _row(what: str, found: Quantiles, limit: str) -> str:
    values = "".join(f"{1000 * value:>8.0f}" for value in found)
    return f"{what:34}{values}{limit:>8}"


def _sizes(what: str, samples: Samples, limit: str) -> str:
    """Return a row with the largest value of each sixth of the run, and of the whole run."""
    sizes = [size / 1e6 for _, size in samples] or [0.0]
    step = max(1, -(-len(sizes) // _NUM_TIMES))
    over_time = " ".join(f"{max(sizes[at : at + step]):.0f}" for at in range(0, len(sizes), step))
    return f"{what:34}{'':16}{max(sizes):>8.0f}{limit:>8}  {over_time}"


async def timed(seed: int, seconds: float) -> tuple[str, list[str]]:
    """Runs the attacks; returns the table with its verdict, and the list of problems."""
    problems: list[str] = []
    began = time.monotonic()
    table = "the server did not start"
    # The failed start is among the problems.
    with contextlib.suppress(NotStarted):
        table = await run_together(seed, seconds, problems)
    kinds = {problem[:60]: problem for problem in reversed(problems)}
    lines = [f"VIOLATION {problem[:6000]}" for problem in kinds.values()]
    took = time.monotonic() - began
    return "\n".join([table, *lines, f"{len(problems)} violations in {took:.0f} s"]), problems
