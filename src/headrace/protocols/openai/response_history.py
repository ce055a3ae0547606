"""Finds the items of a long conversation that the model sees. The functions are pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.protocols.fields.parts import carried_text

Item = dict[str, Any]

COMPACTION = "compaction"
"""The type of an item that contains a summary of the conversation before it."""

TRIGGER = "compaction_trigger"
"""The type of a trailing item that requests a summary of the conversation instead of an answer."""

_HEAD = "Summary of the conversation so far:\n"
# The user's messages before a summary are kept up to this number of bytes.
_KEPT_BYTES = 8192
_encode = msgspec.json.Encoder().encode


def summary_item(id: str, summary: str) -> Item:
    """Return a compaction item. Its content is plain text, so that other servers can read it."""
    return {"id": id, "type": COMPACTION, "encrypted_content": _HEAD + summary}


def summary_of(item: Item) -> str | None:
    """Return the text of a compaction item for the model, or None if the text is encrypted.

    Several servers write the summary as plain text into `encrypted_content`. Encrypted text has
    no spaces.
    """
    content = item.get("encrypted_content")
    is_plain = type(content) is str and len(content.split(maxsplit=1)) > 1
    text = content if is_plain else carried_text(item)
    return text if text is None or text.startswith(_HEAD) else _HEAD + text


def visible(items: Sequence[Item]) -> list[int]:
    """Return the positions of the items that the model sees, in the order in which it sees them.

    The last readable summary replaces the items before it, except instructions and the user's
    newest messages. If a user message directly before the summary has its answer after the
    summary, or no answer yet, the model sees this message after the summary.
    """
    summaries = (i for i, it in enumerate(items) if it["type"] == COMPACTION and summary_of(it))
    last = max(summaries, default=-1)
    if last < 0:
        return list(range(len(items)))
    kept, num_bytes = list[int](), 0
    for place in reversed(range(last)):
        role = items[place].get("role")
        if role in ("system", "developer"):
            kept.append(place)
        elif role == "user":
            is_newest = num_bytes == 0
            num_bytes += len(_encode(items[place]))
            if is_newest or num_bytes <= _KEPT_BYTES:
                kept.append(place)
    kept.reverse()
    behind = list(range(last + 1, len(items)))
    is_open = not behind or _is_from_assistant(items[last + 1])
    if kept and kept[-1] == last - 1 and items[last - 1].get("role") == "user" and is_open:
        return [*kept[:-1], last, last - 1, *behind]
    return [*kept, last, *behind]


def _is_from_assistant(item: Item) -> bool:
    kind: str = item["type"]
    is_message = kind == "message" and item.get("role") == "assistant"
    return is_message or kind == "reasoning" or kind.endswith("_call")


def cut_points(items: Sequence[Item]) -> list[int]:
    """Return the positions before which all items can be dropped, in ascending order.

    No position separates a call from its output. Some clients use one id for several calls; an
    output then belongs to the nearest call before it.
    """
    outputs: dict[str, int] = {}
    ends = list(range(-1, len(items) - 1))
    for place in reversed(range(len(items))):
        for id in _ids_of(items[place]):
            if items[place]["type"].endswith("_output"):
                outputs.setdefault(id, place)
            else:
                ends[place] = max(ends[place], outputs.pop(id, -1))
    points, end = list[int](), -1
    for place, own_end in enumerate(ends):
        if place > end:
            points.append(place)
        end = max(end, own_end)
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
        and item["type"] != COMPACTION
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
