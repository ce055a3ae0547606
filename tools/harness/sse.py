"""Parses server-sent events: whole bodies into frames, and data lines into JSON."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec


class Frame(NamedTuple):
    """A complete frame. A frame for one connection only, such as a heartbeat, has no id."""

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
    """Return the complete frames; comments and an incomplete last frame are dropped."""
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


def data_of(lines: Iterable[str]) -> Iterator[Any]:
    """Yield the JSON of each data line on arrival; [DONE] and other lines are skipped."""
    for line in lines:
        if line.startswith("data: {"):
            yield msgspec.json.decode(line[6:])


def data_in(body: bytes | str) -> list[Any]:
    """Return the JSON of each data line of a complete body."""
    text = body if isinstance(body, str) else body.decode()
    return list(data_of(text.split("\n")))
