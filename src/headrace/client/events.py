"""The events of a stream as the client receives them, and the parser of server-sent events."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, kw_only=True):
    """The base of all events. `seq` numbers the events of a stream from 0."""

    seq: int
    at_ms: int


class Accepted(Event, frozen=True):
    """The first event. In mode `continue`, the answer continues the request's last message."""

    id: str
    model: str
    mode: str
    prompt_tokens: int
    durable: bool


class Queued(Event, frozen=True):
    """The request waits in the queue; position 1 is next."""

    position: int
    waiting: int
    eta_ms: int | None


class Progress(Event, frozen=True):
    """`processed` of `total` prompt tokens are done, `cache` of them from the prefix cache."""

    choice: int
    total: int
    cache: int
    processed: int
    time_ms: int


class TextPiece(msgspec.Struct, frozen=True):
    """New text of one channel: content, reasoning, or the arguments of a tool call."""

    text: str
    channel: str = "content"
    # The number of the tool call within its choice, from 0; -1 for other channels.
    call: int = -1
    # The name of the tool, in the first piece of its call.
    name: str = ""


class End(msgspec.Struct, frozen=True):
    finish_reason: str


class Tokens(Event, frozen=True):
    """New tokens of one choice."""

    choice: int
    ids: list[int] = []
    pieces: list[TextPiece] = []
    end: End | None = None


class Finish(Event, frozen=True):
    """The answer is complete."""


class Error(Event, frozen=True):
    """An error ended the answer early."""

    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True):
    """The server is alive, and the stream is waiting.

    While the engine restarts, `state` is `recovering` and `attempt` counts the starts. While the
    model is loading, `state` is `loading`. Then `progress` is the fraction of the weights in
    memory, and `stage` names the stage of the load. `seq` is set if the stream's log contains the
    heartbeat as an event.
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
    """A server-sent event."""

    id: str
    kind: str
    data: bytes


class EventReader:
    """Parses the bytes of one connection and yields the complete events.

    Frames without an id describe the connection. Such a frame is a heartbeat or a notice. Notices
    are skipped, as are unknown kinds of events from a newer server.
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
