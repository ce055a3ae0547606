"""Compares two recordings answer by answer."""

import difflib
import json
from pathlib import Path
from typing import Any

_MAX_SHOWN, _MAX_LINES = 30, 24


def compare(one: Path, other: Path) -> int:
    """Print the differences, and return the number of answers that differ."""
    ours, theirs = _read(one), _read(other)
    num_different = 0
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) == theirs.get(name):
            continue
        num_different += 1
        if num_different <= _MAX_SHOWN:
            print(f"\n== {name}")
            lines = _lines(ours.get(name)), _lines(theirs.get(name))
            found = list(difflib.unified_diff(*lines, str(one), str(other), n=1, lineterm=""))
            print("\n".join(_clipped(line) for line in found[2:_MAX_LINES]))
    same_order = [it for it in ours if it in theirs] == [it for it in theirs if it in ours]
    print(f"\n{len(ours)} and {len(theirs)} answers, {num_different} differ.")
    if not same_order:
        print("The answers have a different order.")
    return num_different + (not same_order)


def _read(path: Path) -> dict[str, Any]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    return {it["name"]: it for it in answers}


def _lines(answer: Any) -> list[str]:
    """Return an answer as lines: its status, its headers and its frames.

    A frame of JSON has a line for each field.
    """
    if answer is None:
        return ["no answer of this name"]
    head = [f"status: {answer.get('status')}"]
    head += [f"{name}: {value}" for name, value in answer.get("headers", ())]
    return [
        *head,
        *(line for frame in answer["body"] for line in frame.replace(',"', ',\n"').split("\n")),
    ]


def _clipped(line: str) -> str:
    return line if len(line) <= 400 else f"{line[:400]} … ({len(line)} characters)"
