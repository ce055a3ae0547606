"""The events of a stream as they come over HTTP, and their bytes as server-sent events."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, kw_only=True):
    """Root of the union; `seq` counts the events of a stream from 0."""

    seq: int
    at_ms: int


class Accepted(Event, frozen=True):
    """Always the first. Mode: fresh, or continue the last message of the request."""

    id: str
    model: str
    mode: str
    prompt_tokens: int
    durable: bool


class Queued(Event, frozen=True):
    """Waits for its turn: 1 is next."""

    position: int
    waiting: int
    eta_ms: int | None


class Progress(Event, frozen=True):
    """`processed` of `total` prompt tokens are done, `cache` of them taken from the cache."""

    choice: int
    total: int
    cache: int
    processed: int
    time_ms: int


class TextPiece(msgspec.Struct, frozen=True):
    """More text of one channel: content, reasoning, or the arguments of a tool call."""

    text: str
    channel: str = "content"
    call: int = -1  # tool calls are counted from 0 within their choice
    name: str = ""  # of a tool, where its call begins


class End(msgspec.Struct, frozen=True):
    finish_reason: str


class Tokens(Event, frozen=True):
    """New tokens of one choice."""

    choice: int
    ids: list[int] = []
    pieces: list[TextPiece] = []
    end: End | None = None


class Finish(Event, frozen=True):
    """The end of a whole answer."""


class Error(Event, frozen=True):
    """The end of one that was cut."""

    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True):
    """The server lives, and the stream waits.

    While the engine is started again, `state` is recovering and `attempt` counts the starts. While
    the model is loaded, `state` is loading, `progress` the share of its weights in memory and
    `stage` what the load does, in words.
    `seq` is set if the log has it as an event.
    """

    state: str
    attempt: int | None = None
    progress: float | None = None
    stage: str = ""
    seq: int | None = None


AnyEvent = Accepted | Queued | Progress | Tokens | Finish | Error
Update = AnyEvent | Heartbeat
_KINDS = {kind.__name__.lower() for kind in (Accepted, Queued, Progress, Tokens, Finish, Error)}
_decode = msgspec.json.Decoder(AnyEvent).decode
_decode_beat = msgspec.json.Decoder(Heartbeat).decode


class SseFrame(NamedTuple):
    """A server-sent event as it came."""

    id: str
    kind: str
    data: bytes


class EventReader:
    """Fed with the bytes of one connection as they come; gives the events they complete.

    What has no id is about the connection: heartbeats, which may be events as well, and notices,
    which are passed over like the kinds of a later server.
    """

    def __init__(self) -> None:
        self._rest = b""

    def frames(self, data: bytes) -> Iterator[SseFrame]:
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        return map(_parse, frames)

    def feed(self, data: bytes) -> Iterator[Update]:
        for frame in self.frames(data):
            if frame.id and frame.kind in _KINDS:
                yield _decode(frame.data)
            elif frame.kind == "heartbeat":
                yield _decode_beat(frame.data)


def _parse(block: bytes) -> SseFrame:
    fields: dict[bytes, bytes] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        fields[name] = value.removeprefix(b" ")
    kind, id = (fields.get(name, b"").decode() for name in (b"event", b"id"))
    return SseFrame(id, kind, fields.get(b"data", b""))
