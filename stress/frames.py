"""Extracts tokens and text from the frames of a stream, from a whole answer, and from the log."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from tools.harness.sse import Frame


def own_dropped(frames: Iterable[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.id is not None]


class Said(NamedTuple):
    """The tokens, text and finish reason of each choice of an answer."""

    tokens: dict[int, list[int]]
    texts: dict[int, str]
    ends: dict[int, str]


def said_in_chunks(frames: Iterable[Frame]) -> Said:
    """Return the tokens and texts in the chunks of a streamed answer."""
    said = _nothing()
    for frame in frames:
        if frame.is_done:
            continue
        for choice in frame.json.get("choices", ()):
            _add(said, choice, choice.get("delta", choice))
    return said


def said_in_body(body: dict[str, Any]) -> Said:
    """Return the tokens and texts in an unstreamed answer."""
    said = _nothing()
    for choice in body["choices"]:
        _add(said, choice, choice.get("message", choice))
    return said


def said_in_events(events: Iterable[dict[str, Any]]) -> Said:
    """Return the tokens and texts in the events of the log."""
    said = _nothing()
    for event in events:
        if event["kind"] == "tokens":
            index = event["choice"]
            said.tokens[index] += event.get("ids", ())
            said.texts[index] += "".join(piece["text"] for piece in event.get("pieces", ()))
            if end := event.get("end"):
                said.ends[index] = end["finish_reason"]
    return said


def error_in(frames: Iterable[Frame]) -> tuple[Frame, str] | None:
    """Return the first error among the frames with its code, or None."""
    for frame in frames:
        if not frame.is_done and "error" in frame.json:
            return frame, frame.json["error"]["code"]
    return None


def _nothing() -> Said:
    return Said(defaultdict(list), defaultdict(str), {})


def _add(said: Said, choice: dict[str, Any], text: dict[str, Any]) -> None:
    index = choice["index"]
    said.tokens[index] += choice.get("token_ids") or ()
    said.texts[index] += text.get("content") or text.get("text") or ""
    if choice.get("finish_reason"):
        said.ends[index] = choice["finish_reason"]
