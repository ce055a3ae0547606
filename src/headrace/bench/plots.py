"""Draws two plots of a run: gaps over time, and the longest gap over the time to first token."""

from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headrace.bench.figures import STALL, gaps, measured, windows
from headrace.bench.record import Cell, ServerRun

_COLORS = ("#0b6e99", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#555555")
# Shorter gaps are between tokens that arrived together.
_SHORTEST_MS = 1.0


def draw(runs: list[ServerRun], folder: Path) -> list[Path]:
    """Draw the plots and return their paths."""
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


def _name(run: ServerRun, cell: Cell) -> str:
    return run.label if not cell.reasons else f"{run.label} (not valid)"


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path
