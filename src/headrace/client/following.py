"""Follows one stream from its request to its end, across reconnects. Does no I/O.

A request carries an idempotency key. If the answer was lost, the request can therefore be sent
again, and the stream survives the client. The answer is read as the stream's events. The cursor
moves past each event after the event was applied.
"""

import enum
import math
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from headrace.client.errors import Refused
from headrace.client.events import Accepted, Error, EventReader, Finish, Heartbeat, Update
from headrace.client.pacing import MEND_THEMSELVES, Pacing, refusal
from headrace_common.errors import RequestFailed, StreamFailed

ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


_MENDS = ("server_shutdown", "server_overloaded", "model_loading", "engine_failed")
"""Codes of errors before the stream exists, after which the client sends the request again."""

_STOP_PATIENCE_S = 2.0


class HttpRequest(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    headers: dict[str, str] = {}
    body: bytes = b""
    # The longest silence before the connection counts as lost. It is several heartbeats long.
    timeout_s: float = 30.0


class NextAction(enum.Enum):
    """The next action after the status and the headers of an answer."""

    # The body contains events.
    READ = enum.auto()
    LEAVE = enum.auto()
    REFUSED = enum.auto()


class StreamFollower:
    """The state of one stream, which is either requested by this client or exists already."""

    def __init__(
        self, post: HttpRequest | None, stream_id: str, after: int, patience_s: float
    ) -> None:
        self.stream_id = stream_id
        self.cursor = after
        self.mode = ""
        self.has_ended = False
        # True if leaving the stream early stops the stream.
        self.is_ours = post is not None
        self._post = post
        self._was_sent = False
        # True if the server has accepted the request but the stream has no id yet.
        self._awaits_name = False
        self._has_asked_to_stop = False
        self._was_stop_heard = False
        self._patience_s = patience_s
        self._pacing = Pacing(patience_s)
        self._reader = EventReader()

    @property
    def pause_s(self) -> float:
        """Return the seconds to wait before the next request."""
        return self._pacing.pause_s

    @property
    def trouble(self) -> str:
        """Return the reason for the pause."""
        return self._pacing.reason

    def request(self) -> HttpRequest:
        """Return the request to send now."""
        self._reader = EventReader()
        self._awaits_name = False
        if not self.stream_id:
            assert self._post, "a stream is followed by its id or by its request"
            self._was_sent = True
            return self._post
        headers = {"Accept": "text/event-stream"}
        if self.cursor >= 0:
            headers["Last-Event-ID"] = f"{self.stream_id}:{self.cursor}"
        return HttpRequest("GET", f"{path_of(self.stream_id)}/events", headers)

    def answered(self, status: int, headers: Mapping[str, str]) -> NextAction:
        if status == 204:
            self.has_ended = True
            return NextAction.LEAVE
        if status != 200:
            return NextAction.REFUSED
        if self.stream_id:
            return NextAction.READ
        self.stream_id = headers.get("x-stream-id", "")
        if not self.stream_id and "x-headrace-loading" not in headers:
            raise Refused(
                status, "The answer names no stream; the server is not Headrace.", "unknown"
            )
        self._pacing.arrived()
        if ignored := headers.get("x-headrace-ignored"):
            raise _unknown_fields(ignored)
        # While a model is loading, no stream exists yet. The first frame with an id names the
        # stream.
        self._awaits_name = not self.stream_id
        return NextAction.READ if self._awaits_name else NextAction.LEAVE

    @property
    def can_leave(self) -> bool:
        """Return whether the connection was needed only for the stream's id, which is now known."""
        return self._awaits_name and bool(self.stream_id)

    def feed(self, data: bytes) -> Iterator[Update]:
        """Parse bytes and yield each new update. The caller calls `applied` after each update."""
        if self._awaits_name:
            yield from self._name(data)
            return
        for event in self._reader.feed(data):
            if event.seq is None or event.seq > self.cursor:
                self._pacing.arrived()
                yield event

    def _name(self, data: bytes) -> Iterator[Update]:
        for frame in self._reader.frames(data):
            self._pacing.arrived()
            if frame.id:
                self.stream_id = frame.id.partition(":")[0]
                return
            if frame.data.startswith(b'{"error"'):
                status = 503 if refusal(0, frame.data).code in _MENDS else 500
                self._pacing.refused(status, {}, frame.data)
                return
            yield Heartbeat("loading")

    def applied(self, event: Update) -> None:
        """Move the cursor past `event`. Raises StreamFailed if the stream ended with an error."""
        if event.seq is None:
            return
        self.cursor = event.seq
        if isinstance(event, Accepted):
            self.mode = event.mode
        self.has_ended = isinstance(event, Finish | Error)
        if isinstance(event, Error) and not self._has_asked_to_stop:
            raise StreamFailed(event.code, event.message)

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Handle an error status. Raises Refused unless another attempt can succeed."""
        self._pacing.refused(status, headers, body)

    def broke(self, was_connected: bool, reason: str) -> None:
        """Handle the end of a connection. Raises Unreachable if no server answered for too long."""
        if not self.has_ended:
            self._pacing.broke(was_connected, reason)

    def pacing(self) -> Pacing:
        """Return the retry policy for other requests about this stream."""
        return Pacing(self._patience_s, has_contact=True)

    def check_unread(self) -> None:
        if self.has_ended:
            message = "The stream was read to its end; client.attach(stream.id) reads it again."
            raise RequestFailed("stream_was_read", message)

    # The methods below stop the stream.

    def stop_request(self) -> HttpRequest | None:
        """Return the request that stops the stream, or None if no request is needed."""
        if self.has_ended or self._was_stop_heard:
            return None
        if self.stream_id:
            self._has_asked_to_stop = True
            return HttpRequest("POST", f"{path_of(self.stream_id)}/cancel")
        # The answer to the repeated request names the stream to stop.
        return self._post if self._was_sent else None

    def stop_answered(self, status: int, headers: Mapping[str, str]) -> None:
        self._was_stop_heard = self._has_asked_to_stop and status not in MEND_THEMSELVES
        self.stream_id = self.stream_id or headers.get("x-stream-id", "")
        self._was_sent = False

    def stop_pacing(self) -> Pacing:
        """Return the retry policy for stop requests: few attempts, as the caller is leaving."""
        return Pacing(min(self._patience_s, _STOP_PATIENCE_S), has_contact=True)


def new_request(fields: dict[str, Any]) -> HttpRequest:
    """Return the request that opens a stream. Each attempt sends the same bytes and key."""
    route = next(ROUTES[name] for name in ROUTES if name in fields)
    body = to_body({"return_token_ids": True, **fields, "stream": True})
    headers = {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(16)}
    return HttpRequest("POST", route, headers, body)


def to_body(fields: dict[str, Any]) -> bytes:
    """Encode the fields as JSON. Raises RequestFailed if a field cannot be encoded."""
    for name, value in fields.items():
        _check_numbers(value, name)
    try:
        return msgspec.json.encode(fields)
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestFailed("invalid_type", f"A field cannot be sent as JSON: {error}.") from None


def attached(stream_id: str, after: int, patience_s: float) -> StreamFollower:
    path_of(stream_id)
    if not isinstance(after, int):
        message = f"after must be the number of an event, not {after!r}."
        raise RequestFailed("invalid_type", message, "after")
    return StreamFollower(None, stream_id, after, patience_s)


def path_of(stream_id: str) -> str:
    if not (isinstance(stream_id, str) and stream_id):
        message = f"stream_id must be the id of a stream, not {stream_id!r}."
        raise RequestFailed("invalid_type", message, "stream_id")
    return f"/v1/streams/{quote(stream_id, safe='')}"


def _check_numbers(value: Any, name: str) -> None:
    """Refuse NaN and infinity. JSON has neither, so both would be sent as null."""
    if isinstance(value, float) and not math.isfinite(value):
        message = f"{name} is {value}; give a finite number."
        raise RequestFailed("invalid_value", message, name)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check_numbers(item, f"{name}[{place}]")


def _unknown_fields(names: str) -> Refused:
    first = names.partition(",")[0].strip()
    message = f"The server does not know this field: {names}. Correct it or leave it out."
    return Refused(400, message, "unsupported_parameter", first)
