"""The report of a run: a table for people and a JSON file for programs."""

import asyncio
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.figures import STALL, STEADY, cost_of_chunking, goodput
from headrace.bench.mixed import Options
from headrace.bench.record import Cell, ServerRun, shown_round

_NOTE = (
    "A percentile over all gaps hides rare stalls. At low rates, chunking can raise the "
    "percentile although it lowers the maximum. Compare the gaps tagged stall."
)
Limits = tuple[float, float]  # time to first token and gap, in milliseconds


def report(runs: list[ServerRun], options: Options, limits: Limits | None = None) -> dict[str, Any]:
    """Return the report of all runs, including raw gaps, as a value for JSON."""
    whole = next((run for run in runs if _computes_whole(run)), None)
    return {
        "benchmark": "mixed",
        "profile": msgspec.to_builtins(options.profile),
        "seed": options.seed,
        "warm_share": options.warm_share,
        "machine": machine(),
        "commit": commit(),
        "note": _NOTE,
        "servers": [_server(run, whole, limits) for run in runs],
    }


def table(runs: list[ServerRun]) -> str:
    """Return a table with one line per cell."""
    head = ("server", "cell", "valid", "stall p50", "p99", "max", "steady p50", "TTFT p50", "max")
    lines: list[tuple[str, ...]] = [head]
    for run in runs:
        for cell in run.cells:
            lines.append((run.label, *_row(cell)))
    reasons = [f"{r.label}: not valid: {why}" for r in runs for c in r.cells for why in c.reasons]
    return "\n".join([*aligned(lines), "milliseconds. " + _NOTE, *reasons])


def aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose columns are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def write(path: Path, shown: dict[str, Any]) -> None:
    """Replace the file atomically, so that an interrupted run keeps the previous results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(shown, indent=None, separators=(",", ":")) + "\n")
    new.replace(path)


def gaps(ingestion: dict[str, Any] | None) -> list[dict[str, str]]:
    """Return the limitations that apply to how the server processed a prompt."""
    found = []
    if ingestion and ingestion["memory"] == "slot":
        found.append(
            {
                "id": "forward-per-sequence",
                "now": "Each sequence has a separate forward pass in every step.",
                "advice": "implement",
                "why": "Streams that decode in the same step could share one read of the weights.",
            }
        )
    if ingestion and ingestion["memory"] == "blocks" and ingestion["mask"] == "lazy-prefix":
        found.append(
            {
                "id": "gathered-past",
                "now": "Each layer copies a sequence's cached tokens again and makes a mask.",
                "advice": "defer",
                "why": "A kernel over blocks needs no copy; long contexts would gain most.",
            }
        )
    return found


def machine() -> dict[str, Any]:
    """Describe the client's machine. A server with a local address runs on the same machine."""
    names = [
        line.partition(":")[2].strip()
        for line in _lines("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    total = next((ln.split()[1] for ln in _lines("/proc/meminfo") if ln.startswith("MemTotal")), 0)
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(total) / (1 << 20), 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


async def busy_share(seconds: float = 1.0) -> float | None:
    """Return the fraction of all cores that programs use now; None if the system is not Linux."""
    before = _core_times()
    await asyncio.sleep(seconds)
    now = _core_times()
    if now is None or before is None:
        return None
    idle, total = (b - a for a, b in zip(before, now, strict=True))
    return round(1 - idle / total, 3) if total else None


def _core_times() -> tuple[int, int] | None:
    """Return the idle time and the total time of all cores since the system's start."""
    lines = _lines("/proc/stat")
    if not lines:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal (proc(5))
    times = [int(value) for value in lines[0].split()[1:9]]
    return times[3] + times[4], sum(times)


def commit() -> str | None:
    """Return the commit of the source checkout, or None if this code is not in a checkout."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _computes_whole(run: ServerRun) -> bool:
    engine = run.server.get("engine")
    return engine is not None and engine.get("stall_target_ms") is None


def _server(run: ServerRun, whole: ServerRun | None, limits: Limits | None) -> dict[str, Any]:
    shown = {
        "url": run.url,
        "label": run.label,
        "flags": run.flags,
        "server": run.server,
        "calibration": run.calibration,
        "ingestion": run.ingestion,
        "gaps": gaps(run.ingestion),
        "controls": [_cell(cell, None) for cell in run.controls],
        "cells": [_cell(cell, limits) for cell in run.cells],
    }
    if whole is not None and whole is not run:
        shown["cost_of_chunking"] = cost_of_chunking(run, whole)
    return shown


def _cell(cell: Cell, limits: Limits | None) -> dict[str, Any]:
    shown = {
        "plan": msgspec.to_builtins(cell.plan),
        "valid": not cell.reasons,
        "reasons": cell.reasons,
        "prompt_s": cell.prompt_s,
        "evidence": msgspec.to_builtins(cell.evidence),
        "figures": cell.figures,
        "rounds": [shown_round(round) for round in cell.rounds],
    }
    if limits is not None:
        kept = goodput(cell, limits[0] / 1000, limits[1] / 1000)
        shown["goodput"] = {"ttft_ms": limits[0], "gap_ms": limits[1], "share": kept}
    return shown


def _row(cell: Cell) -> tuple[str, ...]:
    assert cell.plan
    shown = cell.figures
    stall, steady = (shown["gaps_ms"].get(tag, {}) for tag in (STALL, STEADY))
    ttft = shown["ttft_ms"]
    values = [*(stall.get(k) for k in ("p50", "p99", "max")), steady.get("p50")]
    values += [ttft.get("p50"), ttft.get("max")]
    numbers = ("-" if value is None else f"{value:.0f}" for value in values)
    return (cell.plan.name, str(not cell.reasons).lower(), *numbers)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
