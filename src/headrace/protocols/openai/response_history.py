"""Finds the old items that a long conversation can drop. The functions are pure."""

from collections.abc import Iterable, Sequence
from typing import Any

Item = dict[str, Any]


def cut_points(items: Sequence[Item]) -> list[int]:
    """Return the positions before which all items can be dropped, in rising order.

    No position separates a call from its output.
    """
    outputs: dict[str, int] = {}
    for place, item in enumerate(items):
        if item["type"].endswith("_output"):
            outputs |= dict.fromkeys(_ids_of(item), place)
    points, last_output = list[int](), -1
    for place, item in enumerate(items):
        if place > last_output:
            points.append(place)
        last_output = max([last_output, *(outputs.get(id, -1) for id in _ids_of(item))])
    return points


def dropped(items: Sequence[Item], cut: int) -> list[int]:
    """Return the positions of the items that a cut drops.

    Instructions, summaries and the newest message of the user are kept.
    """
    is_user = [item.get("role") == "user" for item in items]
    newest = max((place for place, it in enumerate(is_user) if it), default=-1)
    return [
        place
        for place, item in enumerate(items[:cut])
        if place != newest
        and item.get("role") not in ("system", "developer")
        and item["type"] != "compaction"
    ]


def runs_of(places: Iterable[int]) -> list[list[int]]:
    """Return the first and the last number of each run of consecutive numbers."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return runs


def _ids_of(item: Item) -> list[str]:
    """Return the ids by which an output can name its call."""
    return [id for name in ("call_id", "id") if type(id := item.get(name)) is str and id]
