"""Draws how the lane came nearer to the machine's floor, run by run.

    make roofline ARGS=--json > docs/benchmarks/roofline/DATE.json
    python -m benchmarks.history

One row of dots per row of the roofline, one colour per run; ticks where a row must be.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

FOLDER = Path("docs/benchmarks/roofline")
PICTURE = FOLDER / "history.png"


def draw(runs: dict[str, dict[str, Any]]) -> None:
    rows = max((run["rows"] for run in runs.values()), key=len)
    names = [row["name"] for row in rows]
    colors = colormaps["viridis"].reversed()(range(0, 256, 255 // max(len(runs) - 1, 1)))
    figure = Figure(figsize=(9, 0.34 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    for (label, run), color in zip(runs.items(), colors, strict=False):
        ratios = {row["name"]: row["ratio"] for row in run["rows"]}
        heights = [y for y, name in enumerate(names) if name in ratios]
        axes.scatter(
            [ratios[names[y]] for y in heights], heights, s=42, color=color, label=label, zorder=3
        )
    for y, row in enumerate(rows):
        if row["must"]:
            axes.plot([row["must"]] * 2, [y - 0.4, y + 0.4], color="#222222", linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("floor / measured, both of the same run (1 is the machine's limit)")
    axes.legend(loc="upper left")
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    runs = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
    draw(runs)


if __name__ == "__main__":
    main()
