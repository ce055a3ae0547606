"""Changes of the list of models, as the events of llama.cpp's router."""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.protocols.dialect import encode

_FIGURES = ("bytes_per_s", "seconds_left")

Statuses = Mapping[str, Mapping[str, Any]]
"""The status of each model by its name."""


def changed(before: Statuses | None, now: Statuses) -> bytes:
    """Return the frames of all changes from one state of the list to another."""
    return b"".join(b"data: " + encode(it) + b"\n\n" for it in changes(before or {}, now))


def changes(before: Statuses, now: Statuses) -> Iterator[dict[str, Any]]:
    """The events that lead from one state of the list to another."""
    for model, status in now.items():
        old = before.get(model, {})
        if old.get("value") == "downloading" and status["value"] != "downloading":
            yield _end(model, status)
        if _told(status) != _told(old):
            yield {"model": model, "event": "model_status", "data": _told(status)}
        if (progress := status.get("progress")) != old.get("progress") and isinstance(
            progress, dict
        ):
            figures = {name: status[name] for name in _FIGURES if name in status}
            yield {"model": model, "event": "download_progress", "data": progress, **figures}
    for model in before.keys() - now.keys():
        yield {"model": model, "event": "model_remove", "data": {}}


def _end(model: str, status: Mapping[str, Any]) -> dict[str, Any]:
    is_over = status["value"] == "stopped" or "error" in status
    data = status.get("error", {"code": "cancelled", "message": "It was stopped."})
    if is_over:
        return {"model": model, "event": "download_failed", "data": data}
    return {"model": model, "event": "download_finished", "data": {}}


def _told(status: Mapping[str, Any]) -> dict[str, Any]:
    """The state, and of a load its stage and how much of the weights is there."""
    share = status.get("progress")
    told = {"status": status.get("value"), "stage": status.get("stage")}
    told |= {"failed": status.get("failed"), "progress": None if isinstance(share, dict) else share}
    return {name: value for name, value in told.items() if value is not None}
