"""Renders changes in the list of models as events, as llama.cpp's router does."""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.protocols.dialect import encode

_FIGURES = ("bytes_per_s", "seconds_left")

Statuses = Mapping[str, Mapping[str, Any]]
"""The statuses of all models. The keys are the names of the models."""


def changed(before: Statuses | None, now: Statuses) -> bytes:
    """Return the SSE frames for all changes between two states of the list."""
    return b"".join(b"data: " + encode(it) + b"\n\n" for it in changes(before or {}, now))


def changes(before: Statuses, now: Statuses) -> Iterator[dict[str, Any]]:
    """Yield the events for all changes between two states of the list."""
    for model, status in now.items():
        old = before.get(model, {})
        if old.get("value") == "downloading" and status["value"] != "downloading":
            yield _end(model, status)
        if _reported(status) != _reported(old):
            yield {"model": model, "event": "model_status", "data": _reported(status)}
        if (progress := status.get("progress")) != old.get("progress") and isinstance(
            progress, dict
        ):
            figures = {name: status[name] for name in _FIGURES if name in status}
            yield {"model": model, "event": "download_progress", "data": progress, **figures}
    for model in before.keys() - now.keys():
        yield {"model": model, "event": "model_remove", "data": {}}


def _end(model: str, status: Mapping[str, Any]) -> dict[str, Any]:
    is_over = status["value"] == "stopped" or "error" in status
    data = status.get("error", {"code": "cancelled", "message": "The download was stopped."})
    if is_over:
        return {"model": model, "event": "download_failed", "data": data}
    return {"model": model, "event": "download_finished", "data": {}}


def _reported(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state to report.

    During a load, the result also has the stage and the loaded share of the weights.
    """
    share = status.get("progress")
    reported = {"status": status.get("value"), "stage": status.get("stage")}
    reported |= {
        "failed": status.get("failed"),
        "progress": None if isinstance(share, dict) else share,
    }
    return {name: value for name, value in reported.items() if value is not None}
