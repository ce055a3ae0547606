"""Declares the interface of an API dialect, and lists the dialects that the server speaks.

A dialect is a module, or an object in a module, with an entry in DIALECTS. The dialect reads a
body into a Request, renders the events of a stream as frames or as a whole answer, and formats
errors. The gateway, the workers and resumed streams use a dialect only through this interface.
"""

import functools
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
    "/api/v0/chat/completions": "headrace.protocols.openai.chat",
    "/v1/completions": "headrace.protocols.openai.completions",
    "/completion": "headrace.protocols.llamacpp.completions:COMPLETION",
    "/completions": "headrace.protocols.llamacpp.completions:COMPLETION",
    "/infill": "headrace.protocols.llamacpp.completions:INFILL",
    "/v1/messages": "headrace.protocols.anthropic.messages",
    "/v1/responses": "headrace.protocols.openai.responses",
    "/api/chat": "headrace.protocols.ollama.bodies:CHAT",
    "/api/generate": "headrace.protocols.ollama.bodies:GENERATE",
}
"""Maps each route to its Dialect: a module, or `module:name` for an object in a module."""

BELOW: Mapping[str, Route] = {"/api": "/api/chat"}
"""Maps a path prefix to a route. An unknown path below the prefix gets the route's dialect."""

VISIBLE_SIGN_S: Mapping[Route, float] = {"/v1/messages": 20.0}
"""The longest silence in seconds, for routes whose clients ignore heartbeats.

After this time, an idle stream sends an event that these clients do not ignore.
"""

PING = SSE.comment("ping")

encode = msgspec.json.Encoder().encode


class Frames(Protocol):
    """Renders the frames of one stream, which depend only on the stream's record and events."""

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the frames of one event. The caller passes every event from seq 0, in order."""

    def idle(self) -> bytes:
        """Return a heartbeat: a valid frame that adds nothing to the answer."""


class ResponseBody(Protocol):
    """Collects the whole answer of one stream."""

    def feed(self, event: AnyEvent) -> None:
        """Add an event. The caller passes every event from seq 0, in order."""

    def whole(self) -> Any:
        """Return the answer, ready to be encoded as JSON.

        The caller must have fed all events. If an event was an Error, there is no answer.
        """


class ErrorFormat(Protocol):
    """Formats errors as a dialect's clients expect them."""

    # The JSON Schema of an error body, with a title.
    SCHEMA: Mapping[str, Any]
    # The response header in which clients look for the request's id.
    REQUEST_ID: str

    def status(self, error: RequestError | Error) -> int:
        """Return the HTTP status for an error."""

    def body(self, error: RequestError | Error, request_id: str = "") -> bytes:
        """Return the JSON body for a refused request or for a stream that ended with an Error."""

    def frame(self, error: RequestError | Error) -> bytes:
        """Return the error as the last frame of its stream."""


class PromptReader(Protocol):
    """Reads the prompts of a body."""

    # Required fields of a body. A field that may contain token ids comes first.
    REQUIRED: tuple[str, ...]
    # Fields that become prompts; their values may be large.
    IN_PROMPTS: frozenset[str]

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        """Return the prompts that the fields of IN_PROMPTS contain."""


class Dialect(PromptReader, Protocol):
    """Reads bodies into requests, and renders streams for one API.

    A dialect with additional jobs for the workers also has `do(job, body, models)`, which returns
    a job's result.
    """

    ROUTE: Route
    # The summary of the route in the OpenAPI document.
    SUMMARY: str
    # The prefix of stream ids.
    ID_PREFIX: str
    # The fields of a body.
    TABLE: Mapping[str, Kind]
    # The keys that every whole answer has.
    KEYS: tuple[str, ...]
    ERRORS: ErrorFormat
    FRAMING: Framing

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the body sets, after every check that needs no model.

        Two keys of the result are optional: `kept` has bytes to store with the stream, and
        `skipped` has the paths of values without effect. Raise RequestError if a field is wrong.
        """

    def to_request(
        self, fields: dict[str, Any], prompts: tuple[Prompt, ...], model: TextModel
    ) -> Request:
        """Make the request with the model's defaults. Raise RequestError if a limit is exceeded."""

    def frames(self, record: Record) -> Frames: ...

    def response_body(self, record: Record) -> ResponseBody: ...


@functools.cache
def dialect_of(route: Route) -> Dialect:
    module, _, name = DIALECTS[route].partition(":")
    found: Any = importlib.import_module(module)
    return cast(Dialect, getattr(found, name) if name else found)


_LONGEST = max(map(len, (*DIALECTS, *BELOW)))


def dialect_at(path: str) -> Dialect | None:
    """Return the dialect that formats errors at a path: the dialect of the nearest parent route."""
    # Each round of the loop reads the whole path, so bound the path's length.
    path = path[: _LONGEST + 1]
    while path and path not in DIALECTS and path not in BELOW:
        path = path.rpartition("/")[0]
    return dialect_of(BELOW.get(path, path)) if path else None


def data(payload: bytes) -> bytes:
    """Return one server-sent event without a name."""
    return b"data: " + payload + b"\n\n"


def named(event: str, payload: bytes) -> bytes:
    """Return one server-sent event with a name."""
    return b"event: " + event.encode() + b"\n" + data(payload)


class WireFrames:
    """Renders the response body of a stream; adds an id to each frame if the stream is resumable.

    Both the first delivery and all later deliveries use this class, so they send the same bytes.
    """

    def __init__(self, record: Record, with_ids: bool = False) -> None:
        self._dialect = dialect_of(record.request.route)
        self._framing = self._dialect.FRAMING
        self._frames = self._dialect.frames(record)
        self._has_ids = with_ids or record.names.is_opted_in
        self._stream_id = record.id

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the frames of one event. The caller passes every event from seq 0, in order."""
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
        """Return a heartbeat: a comment if `form` is "comment" and the framing has comments."""
        comment = self._framing.comment("ping") if form == "comment" else b""
        return comment or self._frames.idle()

    def failure(self, error: RequestError) -> bytes:
        """Return the frame that ends a body after an error."""
        return self._dialect.ERRORS.frame(error)


class UnnamedFrames(WireFrames):
    """Renders a stream that clients cannot resume because the stream has no name.

    The frames have no ids, and the log has no comments. The dialect's frames are sent unchanged.
    """

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.render = self._frames.render  # type: ignore[method-assign]


def _part(k: int, num_frames: int) -> str:
    return f".{k}" if num_frames > 1 else ""
