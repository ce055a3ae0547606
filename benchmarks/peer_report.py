"""Writes the results of peers.py as JSON, as a picture and as a page of the documentation.

python -m benchmarks.peer_report FOLDER/peers.json [--publish]
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from headrace_engine.scheduler.budget import MAX_STALL_MS

NAMES = {"headrace": "Headrace", "openvino": "OpenVINO GenAI", "llama.cpp": "llama.cpp"}
_COLORS = {"headrace": "#0b6fa4", "openvino": "#d9822b", "llama.cpp": "#6b7785"}
_MIXED = {
    "equal": "target: the 99 % of OpenVINO's gaps",
    "default": "default target",
    "off": "target off",
    "": "",
}
# The 99th percentile of the gaps may be this many times the target.
_WITHIN = 1.15
# Limits of the ratio of two first-token times. "equal" compares with OpenVINO, "default" with
# Headrace with target off.
_MUST = {"equal": 1.15, "default": 2.0}


def p99(gaps: list[float]) -> float:
    ordered = sorted(gaps)
    return ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]


def mixed_row(peer: str, setting: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of all rounds; the gaps are between tokens of the streams."""
    gaps = [gap for answer in answers for gap in answer["gaps_ms"]]
    firsts = [round(answer["first_s"], 2) for answer in answers]
    alone = [gap for answer in answers for gap in answer["alone_ms"]]
    targets = [_target_ms(answer["target"]) for answer in answers]
    over = [
        p99(it["gaps_ms"]) / target for it, target in zip(answers, targets, strict=True) if target
    ]
    return {
        "peer": peer,
        "setting": setting,
        "targets": [answer["target"] for answer in answers],
        "p99_ms": round(p99(gaps)),
        "of_target": round(statistics.median(over), 3) if over else None,
        "worst_ms": round(max(gaps)),
        "alone_ms": round(statistics.median(alone), 1),
        "first_s": firsts,
    }


def _target_ms(target: str) -> float | None:
    """Return the stall target in ms, or None for target off and for the other servers."""
    if target == "default":
        return MAX_STALL_MS["cpu"]
    return float(target) if target not in ("", "off") else None


def keep(report: dict[str, Any], folder: Path) -> None:
    """Write the rows that have been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_text(json.dumps(report, indent=1) + "\n")


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the report as JSON, as a page and as a picture."""
    keep(report, folder)
    title = "# Headrace, OpenVINO GenAI and llama.cpp"
    picture = "![Times by row, relative to Headrace](peers.png)"
    (folder / "peers.md").write_text(f"{title}\n\n{markdown(report)}\n\n{picture}\n")
    draw(report, folder / "peers.png")


def publish(report: dict[str, Any], docs: Path) -> None:
    """Write the report into docs/contribute/benchmarks, in the folder of the kernels it used."""
    name = "peers" if report["isa"] == "native" else f"peers-{report['isa']}"
    write(report, docs / "benchmarks" / name)


def markdown(report: dict[str, Any]) -> str:
    parts = [_about(report)]
    if report["rows"]:
        parts.append(_rows(report["rows"]))
    if report.get("mixed"):
        parts.append(_mixed(report["mixed"]))
    return "\n\n".join(parts)


def _about(report: dict[str, Any]) -> str:
    packages = " and ".join(package.replace("==", " ") for package in report["packages"])
    plain = (
        " llama.cpp runs without its own weight layouts." if report["llama_plain_buffers"] else ""
    )
    uses = "; ".join(f"{NAMES[peer]} `{', '.join(all_)}`" for peer, all_ in report["uses"].items())
    left_out = "".join(
        f" {NAMES[peer]} is left out: it cannot be limited to {report['isa']} here (`{uses}`)."
        for peer, uses in report["left_out"].items()
    )
    return (
        f"{report['date']}, revision {report['revision']}, {report['processor']}, "
        f"{report['threads']} threads, shape `{report['shape']}`, "
        f"{packages}. Medians of rounds; a ratio is the median of the rounds' ratios, with the "
        f"least and the largest.{plain} Instructions that each server reports: {uses}.{left_out}"
    )


def _rows(rows: dict[str, Any]) -> str:
    peers = [peer for peer in NAMES if any(peer in row["ms"] for row in rows.values())]
    lines = [
        f"| row, ms | rounds | {' | '.join(NAMES[peer] for peer in peers)} "
        "| Headrace / other | must hold |",
        "|---" * (len(peers) + 4) + "|",
    ]
    for name, row in rows.items():
        times = [_ms(row["ms"].get(peer)) for peer in peers]
        ratio = row.get("ratio")
        rounds = max(map(len, row["ms"].values()))
        figures = f"{rounds} | {' | '.join(times)} | {_spread(ratio)}"
        lines.append(f"| {name} | {figures} | {_verdict(ratio)} |")
    return "\n".join(lines)


def _spread(ratio: dict[str, Any] | None) -> str:
    if not ratio:
        return ""
    low, high = min(ratio["all"]), max(ratio["all"])
    return f"{ratio['is']:.2f}, {low:.2f} to {high:.2f} ({_other(ratio['against'])})"


def _ms(times: list[float] | None) -> str:
    if not times:
        return "–"
    middle = statistics.median(times)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.1f}"


def _other(against: str) -> str:
    return NAMES.get(against, "quickest peer" if against == "quickest" else f"its own {against}")


def _verdict(ratio: dict[str, Any] | None) -> str:
    if not ratio or not ratio["must"]:
        return ""
    return f"{ratio['must']:.2f}: {'held' if ratio['is'] <= ratio['must'] else 'missed'}"


def _mixed(runs: list[dict[str, Any]]) -> str:
    lines = [
        "Four streams at 128 tokens, and a cold prompt of 2,048:",
        "",
        "| server | rounds | p99 of gaps, ms | of the target | worst gap, ms "
        "| a step of the streams alone, ms | first token, s | ratio | must hold |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = {(run["peer"], run["setting"]): statistics.median(run["first_s"]) for run in runs}
    for run in runs:
        own, ratio = first[run["peer"], run["setting"]], ""
        other = {"equal": ("openvino", ""), "default": ("headrace", "off")}.get(run["setting"])
        said = _MIXED.get(run["setting"], f"target {run['setting']} ms")
        if run["setting"] == "equal":
            said += f" ({', '.join(sorted(set(run['targets'])))} ms)"
        verdict = ""
        if other in first:
            is_, must = own / first[other], _MUST[run["setting"]]
            ratio = f"{is_:.2f} ({'OpenVINO' if run['setting'] == 'equal' else 'off'})"
            verdict = f"{must:.2f}: {'held' if is_ <= must else 'missed'}"
        name = NAMES[run["peer"]] + (f", {said}" if said else "")
        within = _of_target(run.get("of_target"))
        gaps = f"{run['p99_ms']:,} | {within} | {run['worst_ms']:,} | {run['alone_ms']}"
        rounds = len(run["first_s"])
        lines.append(f"| {name} | {rounds} | {gaps} | {own:.1f} | {ratio} | {verdict} |")
    return "\n".join(lines)


def _of_target(share: float | None) -> str:
    if share is None:
        return ""
    return f"{share:.2f} (at most {_WITHIN}: {'held' if share <= _WITHIN else 'missed'})"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw each server's time as a multiple of Headrace's. Without matplotlib, draw nothing."""
    rows = {name: row["ms"] for name, row in report["rows"].items() if "headrace" in row["ms"]}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not rows:
        return
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    for peer, color in _COLORS.items():
        heights = [y for y, times in enumerate(rows.values()) if peer in times]
        values = [
            statistics.median(times[peer]) / statistics.median(times["headrace"])
            for times in rows.values()
            if peer in times
        ]
        axes.scatter(values, heights, s=60, color=color, label=NAMES[peer], zorder=3)
    axes.axvline(1, color=_COLORS["headrace"], linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("time / Headrace's time (more is slower)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--publish", action="store_true")
    given = parser.parse_args()
    report = json.loads(given.report.read_text())
    if given.publish:
        publish(report, Path(__file__).resolve().parent.parent / "docs" / "contribute")
    print(markdown(report))


if __name__ == "__main__":
    main()
