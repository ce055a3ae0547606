from typing import Any

from headrace.gateway.model_events import changes


def names(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
    return [(it["model"], it["event"]) for it in changes(before, now)]


def coming(done: int) -> dict[str, Any]:
    progress = {"a": {"done": done, "total": 4}}
    return {"value": "downloading", "progress": progress, "bytes_per_s": 2, "seconds_left": 1.0}


def test_a_reader_gets_every_model_first_and_then_only_changes() -> None:
    now = {"a": {"value": "loaded"}, "b": {"value": "unloaded"}}
    assert names({}, now) == [("a", "model_status"), ("b", "model_status")]
    assert names(now, now) == []
    assert names(now, now | {"b": {"value": "loading", "progress": 0.5}}) == [("b", "model_status")]
    assert names(now, {"a": {"value": "loaded"}}) == [("b", "model_remove")]


def test_a_download_reports_its_bytes_speed_and_end() -> None:
    (moved,) = changes({"a": coming(1)}, {"a": coming(2)})
    assert moved["event"] == "download_progress" and moved["data"]["a"] == {"done": 2, "total": 4}
    assert (moved["bytes_per_s"], moved["seconds_left"]) == (2, 1.0)
    assert names({"a": coming(4)}, {"a": {"value": "unloaded"}}) == [
        ("a", "download_finished"),
        ("a", "model_status"),
    ]
    error = {"code": "download_failed", "message": "No room."}
    failed = {"value": "unloaded", "failed": True, "error": error}
    ended, _ = changes({"a": coming(2)}, {"a": failed})
    assert (ended["event"], ended["data"]) == ("download_failed", error)
    ended, _ = changes({"a": coming(2)}, {"a": {"value": "stopped"}})
    assert (ended["event"], ended["data"]["code"]) == ("download_failed", "cancelled")
