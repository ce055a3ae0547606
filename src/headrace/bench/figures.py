"""Computes statistics over measured times, without side effects."""

import itertools
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, NamedTuple

from headrace.bench.record import Cell, Injection, Round, ServerRun

STALL, STEADY, BASELINE, WARM_UP = "stall", "steady", "baseline", "warm-up"
Window = tuple[float, float]


class Gap(NamedTuple):
    """The time between two tokens of a stream. `tag` says which prompts were processed in it."""

    stream: int
    end: float
    seconds: float
    tag: str


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as the fraction `share` of all values."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Return the count, the percentiles and the maximum, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {"n": 0}
    ranks = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    shown = {name: round(1000 * percentile(ordered, share), 2) for name, share in ranks.items()}
    return {"n": len(ordered), **shown}


def windows(round: Round, is_warm_up: bool = False) -> list[Window]:
    """Return an interval for each prompt: from its sending to its first token.

    A prompt without a first token has an interval to the end of the streams.
    """
    return [_window(it, round) for it in round.injections if it.is_warm_up == is_warm_up]


def gaps(round: Round) -> list[Gap]:
    """Return the gaps between tokens while all streams ran."""
    measured, warm_up = windows(round), windows(round, is_warm_up=True)
    found = []
    for stream, times in enumerate(round.streams):
        for start, end in itertools.pairwise(times):
            if start < round.settled or end > round.ended:
                continue
            tag = STEADY if round.injections else BASELINE
            if _overlaps(start, end, measured):
                tag = STALL
            elif _overlaps(start, end, warm_up):
                tag = WARM_UP
            found.append(Gap(stream, end, end - start, tag))
    return found


def figures(cell: Cell) -> dict[str, Any]:
    """Return the statistics of one cell for the report."""
    found = [gap for round in cell.rounds for gap in gaps(round)]
    by_tag = {
        tag: spread(gap.seconds for gap in found if gap.tag == tag)
        for tag in (STALL, STEADY, BASELINE)
        if any(gap.tag == tag for gap in found)
    }
    num_stalled = sum(gap.tag == STALL for gap in found)
    num_counted = sum(gap.tag != WARM_UP for gap in found)
    inside = [window for round in cell.rounds for window in windows(round)]
    seconds = sum(end - start for start, end in inside)
    num_prompt = sum(it.num_tokens for it in measured(cell) if it.first_token is not None)
    return {
        "gaps_ms": by_tag,
        "stalled_share": num_stalled / num_counted if num_counted else 0.0,
        "ttft_ms": spread(
            it.first_token - it.sent for it in measured(cell) if it.first_token is not None
        ),
        "stream_tokens_per_s": _rate(found, {STEADY, BASELINE}, cell.num_streams),
        "stream_tokens_per_s_in_windows": num_stalled / seconds if seconds else None,
        "prompt_tokens_per_s_in_windows": num_prompt / seconds if seconds else None,
    }


def measured(cell: Cell) -> list[Injection]:
    return [it for round in cell.rounds for it in round.injections if not it.is_warm_up]


def between_tokens(cell: Cell) -> list[float]:
    """Return the gaps between a stream's tokens, in seconds.

    Each round contributes the gaps between sending its first prompt and receiving the first token
    of its last prompt.
    """
    found = []
    for round in cell.rounds:
        if inside := windows(round):
            whole = min(start for start, _ in inside), max(end for _, end in inside)
            found += [gap.seconds for gap in gaps(round) if _overlaps(*_span(gap), [whole])]
    return found


def goodput(cell: Cell, ttft_s: float, gap_s: float) -> float:
    """Return the fraction of prompts that meet both limits.

    The first token must arrive within `ttft_s`. Until then, each gap between two tokens of another
    stream must be at most `gap_s` long.
    """
    kept = num = 0
    for round in cell.rounds:
        stalls = [gap for gap in gaps(round) if gap.tag == STALL]
        for it in round.injections:
            if it.is_warm_up:
                continue
            num += 1
            inside = [gap for gap in stalls if _overlaps(*_span(gap), [_window(it, round)])]
            is_smooth = all(gap.seconds <= gap_s for gap in inside)
            answered = it.first_token is not None and it.first_token - it.sent <= ttft_s
            kept += is_smooth and answered
    return kept / num if num else 0.0


def ratio(value: float, base: float) -> float | None:
    """Divide; return None if `base` is 0."""
    return value / base if base else None


def cost_of_chunking(run: ServerRun, whole: ServerRun) -> dict[str, dict[str, float | None]]:
    """Return the costs of chunking: each cell's time and throughput divided by those of `whole`.

    `whole` is the run on a server that processes each prompt in one step.
    """
    others = {cell.plan.name: cell.figures for cell in whole.cells if cell.plan}
    costs = {}
    for cell in run.cells:
        other = others.get(cell.plan.name) if cell.plan else None
        if other and cell.plan and other["ttft_ms"]["n"] and cell.figures["ttft_ms"]["n"]:
            costs[cell.plan.name] = {
                "ttft": ratio(cell.figures["ttft_ms"]["p50"], other["ttft_ms"]["p50"]),
                "throughput": ratio(_all_tokens(cell.figures), _all_tokens(other)),
            }
    return costs


def _all_tokens(shown: dict[str, Any]) -> float:
    in_windows = ("stream_tokens_per_s_in_windows", "prompt_tokens_per_s_in_windows")
    return sum(float(shown[name] or 0) for name in in_windows)


def _rate(found: list[Gap], tags: set[str], num_streams: int) -> float | None:
    """Return the tokens per second of all streams together, over the gaps with these tags."""
    seconds = [gap.seconds for gap in found if gap.tag in tags]
    return ratio(num_streams * len(seconds), sum(seconds))


def _window(injection: Injection, round: Round) -> Window:
    end = round.ended if injection.first_token is None else injection.first_token
    return injection.sent, end


def _span(gap: Gap) -> Window:
    return gap.end - gap.seconds, gap.end


def _overlaps(start: float, end: float, others: Iterable[Window]) -> bool:
    return any(start < until and end > since for since, until in others)
