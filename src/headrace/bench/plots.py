"""Draws the plots of both benchmarks."""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headrace.bench.figures import STALL, gaps, measured, windows
from headrace.bench.record import Cell, ServerRun
from headrace.bench.results import MatrixRow

_COLORS = ("#0b6e99", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#555555")
# Shorter gaps are between tokens that arrived together.
_SHORTEST_MS = 1.0
_RANKS = ("p50", "p99")


def draw(runs: list[ServerRun], folder: Path) -> list[Path]:
    """Plot gaps against time, and longest gaps against times to first token. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    by_name: defaultdict[str, list[tuple[ServerRun, Cell]]] = defaultdict(list)
    for run in runs:
        for cell in run.cells:
            by_name[cell.plan.name if cell.plan else ""].append((run, cell))
    made = [_draw_gaps(name, cells, folder) for name, cells in by_name.items()]
    return [*made, _draw_worst(by_name, folder)]


def _draw_gaps(name: str, cells: list[tuple[ServerRun, Cell]], folder: Path) -> Path:
    """Draw each gap as a dot at its end. Below, draw each prompt's time to first token."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    for row, (run, cell) in enumerate(cells):
        color = _COLORS[row % len(_COLORS)]
        found = [gap for round in cell.rounds for gap in gaps(round)]
        heights = [1000 * gap.seconds for gap in found]
        above.scatter([g.end for g in found], heights, s=4, color=color, label=_name(run, cell))
        _draw_target(above, run, color)
        for round in cell.rounds:
            bars = [(start, end - start) for start, end in windows(round)]
            below.broken_barh(bars, (row - 0.4, 0.8), color=color)
    above.set_yscale("log")
    above.set_ylim(bottom=max(_SHORTEST_MS, above.get_ylim()[0]))
    above.set_ylabel("between two tokens of a stream, ms")
    above.legend(loc="upper right", markerscale=3)
    below.set_yticks(range(len(cells)), [run.label for run, _ in cells])
    below.set_xlabel("seconds; bars: from sending a prompt to its first token")
    return _save(figure, folder / f"gaps-{name}.png")


def _draw_target(above: Axes, run: ServerRun, color: str) -> None:
    target = (run.server.get("engine") or {}).get("stall_target_ms")
    if target:
        above.axhline(target, color=color, linewidth=0.8, linestyle="--")


def _draw_worst(by_name: dict[str, list[tuple[ServerRun, Cell]]], folder: Path) -> Path:
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, cells in by_name.items():
        for row, (run, cell) in enumerate(cells):
            stalls = [g.seconds for r in cell.rounds for g in gaps(r) if g.tag == STALL]
            ttft = cell.figures["ttft_ms"].get("p50")
            if not stalls or ttft is None or not measured(cell):
                continue
            point = (ttft / 1000, 1000 * max(stalls))
            axes.scatter(*point, color=_COLORS[row % len(_COLORS)], s=40)
            text = f"{_name(run, cell)} {name if len(by_name) > 1 else ''}"
            axes.annotate(text, point, xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.margins(0.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("time to the first token of the long prompt, s (median)")
    axes.set_ylabel("worst gap between two tokens of a stream, ms")
    axes.grid(True, which="both", linewidth=0.3)
    return _save(figure, folder / "worst-gap.png")


def draw_matrix(rows: list[MatrixRow], folder: Path) -> list[Path]:
    """Draw a plot per percentile: inter-token latency against time to first token."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in _RANKS:
        # The axes are logarithmic.
        shown = [row for row in rows if row.itl_ms.get(name) and row.ttft_ms.get(name)]
        made.append(_draw_percentile([row for row in shown if not row.reasons], name, folder))
    return made


def _draw_percentile(rows: list[MatrixRow], name: str, folder: Path) -> Path:
    """Draw a panel for each prompt length and cached share, and a dot for each cell in it."""
    lengths = sorted({row.load.prompt_tokens for row in rows}) or [0]
    shares = sorted({row.load.cached_share for row in rows}) or [0.0]
    colors = dict(zip(sorted({row.chunking for row in rows}), _COLORS, strict=False))
    markers = dict(zip(sorted({row.load.num_streams for row in rows}), "os^Dv", strict=False))
    # The text below the panels needs a width of 7 inches.
    size = (max(7, 1 + 3.5 * len(lengths)), 1 + 3 * len(shares))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(shares), len(lengths), sharex=True, sharey=True, squeeze=False)
    for row in rows:
        load = row.load
        axes = panels[shares.index(load.cached_share)][lengths.index(load.prompt_tokens)]
        axes.scatter(
            row.ttft_ms[name],
            row.itl_ms[name],
            s=15 * (1 + load.rate),
            color=colors[row.chunking],
            marker=markers.get(load.num_streams, "x"),
            alpha=0.7,
            label=f"{row.chunking}, {load.num_streams} streams",
        )
    for (i, share), (j, length) in itertools.product(enumerate(shares), enumerate(lengths)):
        axes = panels[i][j]
        axes.set_title(f"{length:,} tokens, {share:.0%} cached", fontsize=9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(True, which="both", linewidth=0.3)
    figure.supxlabel(f"time to first token, {name}, ms; larger dots: more prompts per second")
    figure.supylabel(f"between two tokens of a stream, {name}, ms")
    _add_legend(figure)
    return _save(figure, folder / f"matrix-{name}.png")


def _add_legend(figure: Figure) -> None:
    """Add a legend with one entry per series."""
    kinds: dict[str, Any] = {}
    for axes in figure.axes:
        dots, labels = axes.get_legend_handles_labels()
        kinds |= {label: kinds.get(label, dot) for dot, label in zip(dots, labels, strict=True)}
    if kinds:
        names = sorted(kinds)
        figure.legend([kinds[it] for it in names], names, loc="outside upper center", ncols=3)


def _name(run: ServerRun, cell: Cell) -> str:
    return run.label if not cell.reasons else f"{run.label} (not valid)"


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path
