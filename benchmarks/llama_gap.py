"""Lane llama-cpp beside llama-server: the same file, four streams, cold prompts of 2,048.

    make llama-gap                                  # ARGS="--rounds 1" for a quick look
    LLAMA_SERVER=PATH make llama-gap                # with a llama-server of your own

All servers are loaded side by side and measured over HTTP in turn, round by round. In a round
four streams decode behind prompts of 128 tokens, and a cold prompt comes. A gap is the time
between two tokens of a stream while that prompt is computed. llama-server runs as it is, with
batches of 2,048 tokens, and with small ones; Headrace with a target of 200 ms, and without one.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind
from msgspec.structs import replace

from benchmarks.peer_setup import write_gguf
from benchmarks.wall import flags_for, serving
from headrace.bench.figures import STALL, STEADY, figures
from headrace.bench.load import Background, Injector, PromptSource
from headrace.bench.record import Cell, CellPlan, Round
from headrace.bench.report import commit, machine
from headrace.bench.target import Target
from tools.harness.llama_server import llama_server

_STREAMS, _CONTEXT, _PROMPT = 4, 128, 2048
_PLACES, _POSITIONS = 6, 4096
_SMALL_BATCH = 64
_LEAD_S = 1.0  # of streams alone, before the prompt and after it
_PATIENCE_S = 100.0  # for a prompt's first token
_WARM_UP = 512  # tokens of the prompt of a round that does not count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder of make_random_model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of every server")
    parser.add_argument("--out", type=Path, default=Path("build/llama-gap"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "Q8_0.gguf"
    if not file.exists():
        half = given.out / "half.gguf"
        write_gguf(given.model, half, Kind.Q8_0)
        half.rename(file)
    began = time.time()
    rows = asyncio.run(_measure(file, given.rounds, given.threads))
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "minutes": round((time.time() - began) / 60, 1),
        "machine": machine(),
        "commit": commit(),
        "threads": given.threads,
        "rows": rows,
    }
    (given.out / "llama-gap.json").write_text(json.dumps(report, indent=1) + "\n")
    print(_markdown(report))


async def _measure(file: Path, num_rounds: int, threads: int) -> dict[str, Any]:
    """What was seen of each server, by its name."""
    with contextlib.ExitStack() as stack:

        def llama(batch: int) -> str:
            return stack.enter_context(llama_server(file, threads, _PLACES, _POSITIONS, batch))

        def headrace(target: str) -> str:
            flags = ("--lane", "llama-cpp", "--threads", str(threads), *flags_for(target))
            sizes = ("--max-model-len", str(_POSITIONS), "--max-num-seqs", str(_PLACES))
            return stack.enter_context(serving(file, (*flags, *sizes)))

        urls = {
            "llama-server": llama(2048),
            f"llama-server, `-b {_SMALL_BATCH}`": llama(_SMALL_BATCH),
            "Headrace, target 200 ms": headrace("200"),
            "Headrace, target off": headrace("off"),
        }
        cells = {name: Cell(plan=None, num_streams=_STREAMS, rounds=()) for name in urls}
        for number in range(num_rounds + 1):
            length = _PROMPT if number else _WARM_UP
            for name, url in urls.items():
                seen = await _round(url, number, length)
                if number:
                    cells[name].rounds += (seen,)
                    _say(f"{name}: {_row(replace(cells[name], rounds=(seen,)))}")
        return {name: _row(cell) for name, cell in cells.items()}


async def _round(url: str, seed: int, length: int) -> Round:
    """Streams from start to end, and one prompt between."""
    target = Target(url, "", secrets.token_hex(8))
    async with target.http:
        await target.look()
        prompts = PromptSource(seed, target.num_vocab)
        background = Background(target, [prompts.fresh(_CONTEXT) for _ in range(_STREAMS)])
        plan = CellPlan(
            name="gap", prompt_tokens=length, interval_s=0.0, num_warm_up=0, num_measured=1
        )
        try:
            await background.open()
            settled = time.perf_counter()
            await asyncio.sleep(_LEAD_S)
            sent = await Injector(target, prompts, plan, _PATIENCE_S).send(0, 1)
            await asyncio.sleep(_LEAD_S)
            ended, lost_at = time.perf_counter(), background.lost_at
        finally:
            await background.close()
        await asyncio.sleep(_LEAD_S)  # a server may take a step until it sees that they are gone
    times = tuple(tuple(each) for each in background.arrivals)
    return Round(settled, ended, times, tuple(sent), lost_at)


def _row(cell: Cell) -> dict[str, Any]:
    if any(round.lost_at is not None for round in cell.rounds):
        raise SystemExit("A stream ended before it was told to.")
    seen = figures(cell)
    alone, beside = (seen["gaps_ms"].get(tag, {}) for tag in (STEADY, STALL))
    sent = [it for each in cell.rounds for it in each.injections]
    firsts = [None if it.first_token is None else it.first_token - it.sent for it in sent]
    return {
        "alone_ms": alone.get("p50"),
        "p50_ms": beside.get("p50"),
        "p99_ms": beside.get("p99"),
        "worst_ms": beside.get("max"),
        "first_token_s": firsts,
        "streams_per_s": seen["stream_tokens_per_s_in_windows"],
    }


def _markdown(report: dict[str, Any]) -> str:
    lines = [
        f"{report['date']}, revision {report['commit']}, {report['machine']['cpu']}, "
        f"{report['threads']} threads, {report['minutes']} minutes.",
        "",
        "| server | gap of the streams alone, ms | beside the prompt: median | 99 % | worst "
        "| tokens/s of the four | first token of the prompt, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        gaps = " | ".join(
            f"{row[key]:,.0f}" for key in ("alone_ms", "p50_ms", "p99_ms", "worst_ms")
        )
        firsts = ", ".join(
            f"over {_PATIENCE_S:.0f}" if each is None else f"{each:.1f}"
            for each in row["first_token_s"]
        )
        lines.append(f"| {name} | {gaps} | {row['streams_per_s']:.1f} | {firsts} |")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
