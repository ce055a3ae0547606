"""Server-sent events read back: frames, the tokens and the text in them."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec


class Frame(NamedTuple):
    """One complete frame; own frames of a connection have no id."""

    id: str | None
    event: str | None
    data: bytes

    @property
    def seq(self) -> int:
        assert self.id is not None
        return int(self.id.rpartition(":")[2].partition(".")[0])

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.data)
        return found

    @property
    def is_done(self) -> bool:
        return self.data == b"[DONE]"


def frames_of(body: bytes) -> list[Frame]:
    """The complete frames; a partial last one and comments are dropped."""
    blocks = bytes(body).split(b"\n\n")[:-1]
    frames = [_frame(block) for block in blocks]
    return [frame for frame in frames if frame is not None]


def _frame(block: bytes) -> Frame | None:
    found: dict[str, bytes] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b": ")
        if name:
            found[name.decode()] = value
    if "data" not in found:
        return None
    id, event = found.get("id"), found.get("event")
    return Frame(id.decode() if id else None, event.decode() if event else None, found["data"])


def own_dropped(frames: Iterable[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.id is not None]


class Said(NamedTuple):
    """What the choices of an answer came to."""

    tokens: dict[int, list[int]]
    texts: dict[int, str]
    ends: dict[int, str]


def said_in_chunks(frames: Iterable[Frame]) -> Said:
    """From the chunks of a streamed answer."""
    said = _nothing()
    for frame in frames:
        if frame.is_done:
            continue
        for choice in frame.json.get("choices", ()):
            _add(said, choice, choice.get("delta", choice))
    return said


def said_in_body(body: dict[str, Any]) -> Said:
    """From a whole answer."""
    said = _nothing()
    for choice in body["choices"]:
        _add(said, choice, choice.get("message", choice))
    return said


def said_in_events(events: Iterable[dict[str, Any]]) -> Said:
    """From the log."""
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
    """The in-band error, with its code."""
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
