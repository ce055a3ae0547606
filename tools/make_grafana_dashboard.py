"""Writes deploy/grafana/dashboards/headrace.json: `python -m tools.make_grafana_dashboard`."""

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "deploy/grafana/dashboards/headrace.json"
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


def _quantiles(name: str) -> dict[str, str]:
    rate = f"sum by (le) (rate(headrace_{name}_seconds_bucket[$__rate_interval]))"
    return {f"p{q * 100:.0f}": f"histogram_quantile({q}, {rate})" for q in (0.5, 0.95, 0.99)}


def _rate(name: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate(headrace_{name}_total[$__rate_interval]))"


PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Time to the first token", "s", _quantiles("ttft")),
    ("Time between two tokens", "s", _quantiles("inter_token")),
    ("Longest gap of a request", "s", _quantiles("max_gap")),
    ("Time in the queue", "s", _quantiles("queue")),
    ("Duration of engine steps", "s", _quantiles("step")),
    (
        "Tokens per second",
        "short",
        {
            "prompt": _rate("prompt_tokens"),
            "generated": _rate("generated_tokens"),
            "guessed right": _rate("accepted_tokens"),
        },
    ),
    ("Requests ended", "reqps", {"{{route}} {{outcome}}": _rate("requests", "route", "outcome")}),
    ("Requests refused", "reqps", {"{{reason}}": _rate("rejections", "reason")}),
    (
        "Running and waiting",
        "short",
        {"running": "headrace_running", "waiting": "headrace_waiting"},
    ),
    ("Streams", "short", {"{{state}}": "headrace_streams"}),
    (
        "KV cache in use",
        "percentunit",
        {
            "blocks": 'headrace_blocks{state="used"} / ignoring(state) '
            "sum without(state) (headrace_blocks)",
            "slots": 'headrace_slots{state="used"} / ignoring(state) '
            "sum without(state) (headrace_slots)",
        },
    ),
    (
        "Engine",
        "short",
        {
            "up": "headrace_engine_up",
            "restarts per hour": "sum(increase(headrace_engine_restarts_total[1h]))",
            "preemptions per second": _rate("preemptions"),
        },
    ),
    ("Stall target missed", "ops", {"{{cause}}": _rate("stall_target_missed", "cause")}),
    ("Longest time since a stream's last frame", "s", {"age": "headrace_heartbeat_age_seconds"}),
    (
        "Time since the last progress",
        "s",
        {
            "engine": "headrace_last_step_age_seconds",
            "most silent stream": "headrace_silent_stream_age_seconds",
        },
    ),
    ("Time to store an event", "s", _quantiles("log_commit")),
]


def dashboard() -> dict[str, Any]:
    return {
        "uid": "headrace",
        "title": "Headrace",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _PER_ROW)
    place = {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(queries.items())
        ],
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(dashboard(), indent=1) + "\n")
