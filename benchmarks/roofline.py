"""Compares steps of a lane with this machine's own limits, both measured in the same run.

    python benchmarks/roofline.py --model DIR [--json] [--only NAME ...]

The floor of a step is max(bytes / read bandwidth, operations / rate of products), and the ratio
is floor / measured. A row has three rounds. The machine's rates are measured before and after
each round and the better rates count, because the speed of a shared machine changes by the
minute. The round with the median ratio is the row's result. `tools/make_random_model.py --shape
qwen3-0.6b` makes DIR.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from headrace.engines.child import ENVIRONMENT

# The environment must be set before torch is imported.
os.environ |= ENVIRONMENT | os.environ

import argparse
import gc
import json
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Machine, measure
from benchmarks.steps import Bench, Row
from headrace_kernels import choose_instructions

GOALS = {
    "prompt-512": 0.65,
    "prompt-2048": 0.65,
    "decode-1@128": 0.85,
    "decode-4@128": 0.80,
    "decode-4@2048": 0.65,
    "int8-decode-1@128": 0.70,
}
_ROUNDS = 3
_PROMPTS = {"prompt-128": (0, 128), "prompt-512": (0, 512), "prompt-512@2048": (2048, 512)}
_DECODES = [(n, context) for context in (128, 2048) for n in (1, 4, 8, 16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", help="rows to measure")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    report = run(options.model, set(options.only or ()))
    print(json.dumps(report, indent=1) if options.json else _table(report))


def run(folder: Path, only: set[str]) -> dict[str, Any]:
    before = best = measure()
    rows: list[dict[str, Any]] = []
    memory = {}
    for is_int8 in (False, True):
        bench = Bench(folder, is_int8)
        bench.fill()
        prefix = "int8-" if is_int8 else ""
        for name, measured in _rows(bench, prefix):
            if only and name not in only:
                continue
            rounds = []
            for _ in range(_ROUNDS):
                row, after = measured(), measure()
                rounds.append(_row(before.best_of(after), row))
                before, best = after, best.best_of(after)
            rows.append(sorted(rounds, key=lambda row: row["ratio"])[_ROUNDS // 2])
        memory[prefix + "peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        del bench, measured
        gc.collect()
    return _report(best, rows) | memory


def _rows(bench: Bench, prefix: str) -> Iterator[tuple[str, Callable[[], Row]]]:
    for name, (start, length) in _PROMPTS.items():
        yield prefix + name, lambda n=prefix + name, s=start, x=length: bench.prompt(n, s, x)
    if not prefix:
        yield "prompt-2048", lambda: bench.prompt("prompt-2048", 0, 2048)
        yield "mixed-4+124@512", lambda: bench.mixed("mixed-4+124@512", 4, 512, 124)
    for streams, context in _DECODES if not prefix else [(1, 128), (4, 128), (16, 128)]:
        name = f"{prefix}decode-{streams}@{context}"
        yield name, lambda n=name, c=streams, x=context: bench.decode(n, c, x)


def _report(machine: Machine, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "has_matrix_unit": choose_instructions("auto", torch.bfloat16).instructions == "amx",
        "read_gb_per_s": round(machine.read_bytes_per_s / 1e9, 1),
        "bf16_gop_per_s": round(machine.bf16_ops_per_s / 1e9),
        "int8_gop_per_s": round(machine.int8_ops_per_s / 1e9),
        "float32_gop_per_s": round(machine.float32_ops_per_s / 1e9),
        "rows": rows,
    }


def _row(machine: Machine, row: Row) -> dict[str, Any]:
    dtype = "int8" if row.name.startswith("int8-") else "bfloat16"
    floor = max(row.bytes / machine.read_bytes_per_s, row.operations / machine.ops_per_s(dtype))
    return {
        "name": row.name,
        "ms": round(row.seconds * 1e3, 2),
        "floor_ms": round(floor * 1e3, 2),
        "ratio": round(floor / row.seconds, 3),
        "must": GOALS.get(row.name),
        "bytes": row.bytes,
        "operations": row.operations,
    }


def _table(report: dict[str, Any]) -> str:
    head = [f"{key}: {value}" for key, value in report.items() if key != "rows"]
    lines = [f"{'step':20} {'ms':>9} {'floor ms':>9} {'ratio':>6} {'must':>5}"]
    for row in report["rows"]:
        must = "" if row["must"] is None else f"{row['must']:.2f}"
        times = f"{row['ms']:9.1f} {row['floor_ms']:9.1f}"
        lines.append(f"{row['name']:20} {times} {row['ratio']:6.2f} {must:>5}")
    return "\n".join([*head, "", *lines])


if __name__ == "__main__":
    main()
