"""The dialects that are spoken, and what each has to offer.

A dialect is one module and one line in DIALECTS. It reads a body into a Request, renders the events
of a stream as frames and as a whole answer, and shapes errors. The gateway, the workers and resume
find everything else through this seam.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import msgspec

from headrace.protocols.fields.kinds import Kind
from headrace.protocols.framing import SSE, Framing
from headrace.streams.events import AnyEvent, Error, Heartbeat
from headrace.streams.record import Record
from headrace.text.text_model import TextModel
from headrace_common.errors import RequestError
from headrace_common.request import Prompt, Request, Route

DIALECTS: Mapping[Route, str] = {
    "/v1/chat/completions": "headrace.protocols.openai.chat",
    "/chat/completions": "headrace.protocols.openai.chat",
    "/v1/completions": "headrace.protocols.openai.completions",
    "/completion": "headrace.protocols.llamacpp.completion",
    "/completions": "headrace.protocols.llamacpp.completion",
    "/infill": "headrace.protocols.llamacpp.infill",
    "/v1/messages": "headrace.protocols.anthropic.messages",
    "/v1/responses": "headrace.protocols.openai.responses",
    "/api/chat": "headrace.protocols.ollama.chat",
    "/api/generate": "headrace.protocols.ollama.generate",
}
"""Modules by the route that they answer; each is a Dialect."""

BELOW: Mapping[str, Route] = {"/api": "/api/chat"}
"""Paths below which every other route answers like the one named here."""

SIGN_S: Mapping[Route, float] = {"/v1/messages": 20.0}
"""Seconds between signs of life that the strictest client of a route counts, if no heartbeat is."""

PING = SSE.comment("ping")

encode = msgspec.json.Encoder().encode


class Frames(Protocol):
    """The frames of one stream, a pure function of its record and events."""

    def render(self, event: AnyEvent) -> list[bytes]:
        """The frames of one event. Takes every event from seq 0, in order."""

    def idle(self) -> bytes:
        """A heartbeat: parses as data, adds nothing."""


class ResponseBody(Protocol):
    """The whole answer of one stream."""

    def feed(self, event: AnyEvent) -> None:
        """Takes every event from seq 0, in order."""

    def whole(self) -> Any:
        """The answer as JSON will show it, once the last event has come; it did not fail."""


class ErrorFormat(Protocol):
    """How a dialect says that something failed."""

    SCHEMA: Mapping[str, Any]  # of a body, with a title
    REQUEST_ID: str  # the header in which clients look for the request's id

    def status(self, error: RequestError | Error) -> int:
        """The HTTP status by which clients know it."""

    def body(self, error: RequestError | Error, request_id: str = "") -> bytes:
        """The error as JSON: of a request, or the last event of a stream that was cut."""

    def frame(self, error: RequestError | Error) -> bytes:
        """The error as a frame, the last of its stream."""


class PromptReader(Protocol):
    """The reader that finds the prompts of a body."""

    REQUIRED: tuple[str, ...]  # fields that must be there; a prompt of ids is the first
    IN_PROMPTS: frozenset[str]  # those that become prompts, and may be large

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        """The prompts in the fields of IN_PROMPTS."""


class Dialect(PromptReader, Protocol):
    """The names that the module of a dialect offers."""

    ROUTE: Route
    SUMMARY: str  # for the OpenAPI document
    ID_PREFIX: str  # of its streams
    TABLE: Mapping[str, Kind]  # the fields of a body
    KEYS: tuple[str, ...]  # that every whole answer has
    ERRORS: ErrorFormat
    FRAMING: Framing

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """The given fields, checked as far as they need no model; RequestError names the fault.

        `kept` may be among them, bytes that are stored with the stream, and `skipped`, paths of
        what has no effect.
        """

    def to_request(
        self, fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel
    ) -> Request:
        """The request, within the model's limits and with its defaults."""

    def frames(self, record: Record) -> Frames: ...

    def response_body(self, record: Record) -> ResponseBody: ...


def dialect_of(route: Route) -> Dialect:
    return cast(Dialect, importlib.import_module(DIALECTS[route]))


_LONGEST = max(map(len, (*DIALECTS, *BELOW)))


def spoken_at(path: str) -> Dialect | None:
    """Return the dialect of a path: that of its own route, or of the nearest route above it."""
    path = path[: _LONGEST + 1]  # each round reads the whole path, so its length must be bounded
    while path and path not in DIALECTS and path not in BELOW:
        path = path.rpartition("/")[0]
    return dialect_of(BELOW.get(path, path)) if path else None


def data(payload: bytes) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + payload + b"\n\n"


def named(event: str, payload: bytes) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + event.encode() + b"\n" + data(payload)


class WireFrames:
    """The body of a stream's POST: frames, with ids where the stream can be found again.

    First delivery and every later reader use it, so both see the same bytes.
    """

    def __init__(self, record: Record, with_ids: bool = False) -> None:
        self._dialect = dialect_of(record.request.route)
        self._framing = self._dialect.FRAMING
        self._frames = self._dialect.frames(record)
        self._has_ids = with_ids or record.names.is_opted_in
        self._stream_id = record.id

    def render(self, event: AnyEvent) -> list[bytes]:
        """The frames of one event. Takes every event from seq 0, in order."""
        is_comment = isinstance(event, Heartbeat) and event.form == "comment"
        if is_comment and (comment := self._framing.comment("ping")):
            return [comment]
        frames = self._frames.render(event)
        if not self._has_ids:
            return frames
        return [
            self._framing.marked(frame, f"{self._stream_id}:{event.seq}{_part(k, len(frames))}")
            for k, frame in enumerate(frames)
        ]

    @property
    def media_type(self) -> str:
        return self._framing.MEDIA_TYPE

    def idle(self, form: str = "data") -> bytes:
        """A sign of life that adds nothing: a comment, if that is asked for and there are any."""
        comment = self._framing.comment("ping") if form == "comment" else b""
        return comment or self._frames.idle()

    def failure(self, error: RequestError) -> bytes:
        """The end of a body that cannot be rendered further."""
        return self._dialect.ERRORS.frame(error)


class UnnamedFrames(WireFrames):
    """The same for a stream without a name.

    Its frames have no ids and its log no comments, so the dialect's frames are used as they are.
    """

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.render = self._frames.render  # type: ignore[method-assign]


def _part(k: int, num_frames: int) -> str:
    return f".{k}" if num_frames > 1 else ""
