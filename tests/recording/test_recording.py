"""Tests that recordings of equal answers are equal and planted differences are found."""

import json
from pathlib import Path
from typing import Any

import pytest

from stress.recording.compare import compare
from stress.recording.rules import frames, normalise

ANSWER: dict[str, Any] = {
    "name": "GET /health",
    "status": "200 OK",
    "headers": [["date", "<any>"], ["x-request-id", "<id-1>"]],
    "body": ['{"message":"The prompt is too long."}'],
}


def written(path: Path, *answers: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"body": ['{"message":"The prompt is long."}']},
        {"headers": [*ANSWER["headers"], ["x-new", "1"]]},
        {"headers": ANSWER["headers"][::-1]},
        {"status": "201 Created"},
        {"name": "GET /health/live"},
    ],
    ids=["message", "header", "order", "status", "name"],
)
def test_a_planted_difference_is_found(tmp_path: Path, change: dict[str, Any]) -> None:
    one = written(tmp_path / "one", ANSWER)
    assert compare(one, written(tmp_path / "same", ANSWER)) == 0
    assert compare(one, written(tmp_path / "other", ANSWER | change)) > 0


def test_answers_in_another_order_are_a_difference(tmp_path: Path) -> None:
    answers = (ANSWER, ANSWER | {"name": "GET /props"})
    one, other = written(tmp_path / "one", *answers), written(tmp_path / "other", *answers[::-1])
    assert compare(one, other) == 1


def test_equal_ids_stay_equal_after_replacement() -> None:
    first, second = "0" * 32, "1" * 32
    assert normalise(f"a-{first} {second} {first}") == "a-<id-1> <id-2> <id-1>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"created":1795676055,"n":17}', '{"created":<time>,"n":17}'),
        ('{"queue_ms":27.0,"max_stall_ms":200.0}', '{"queue_ms":<duration>,"max_stall_ms":200.0}'),
        ('{"modified_at":"2026-11-26T06:54:04Z"}', '{"modified_at":"<time>"}'),
        ('{"seed":42}', '{"seed":42}'),
    ],
)
def test_only_values_that_differ_between_two_runs_are_replaced(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_only_the_first_and_last_of_consecutive_progress_frames_stay() -> None:
    told = [f'data: {{"prompt_progress":{{"processed":{n}}}}}' for n in range(4)]
    body = "".join(f"{frame}\n\n" for frame in ["data: {}", *told, "data: [DONE]"])
    kept = frames(body, "text/event-stream")
    assert [frame.strip() for frame in kept if frame] == [
        "data: {}",
        told[0],
        told[3],
        "data: [DONE]",
    ]
