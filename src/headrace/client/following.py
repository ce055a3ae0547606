"""One stream from its request to its end, over as many connections as it takes; no I/O.

A request names itself by an idempotency key, so that it can be sent again when its answer was
lost, and so that its stream survives its client. Its answer is read as the stream's events, behind
a cursor that moves once an event has been applied.
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
"""Errors, told in an answer that had begun before there was a stream, after which to ask again."""

_STOP_PATIENCE_S = 2.0


class HttpRequest(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    headers: dict[str, str] = {}
    body: bytes = b""
    timeout_s: float = 30.0  # of silence: several heartbeats


class NextAction(enum.Enum):
    """The next action with an answer whose status and headers are known."""

    READ = enum.auto()  # its body holds events
    LEAVE = enum.auto()
    REFUSED = enum.auto()


class StreamFollower:
    """Made for a request, or for a stream that runs already."""

    def __init__(
        self, post: HttpRequest | None, stream_id: str, after: int, patience_s: float
    ) -> None:
        self.stream_id = stream_id
        self.cursor = after
        self.mode = ""
        self.has_ended = False
        self.is_ours = post is not None  # leaving it early stops it
        self._post = post
        self._was_sent = False
        self._awaits_name = False  # the request was taken, and its stream has no id yet
        self._has_asked_to_stop = False
        self._was_stop_heard = False
        self._patience_s = patience_s
        self._pacing = Pacing(patience_s)
        self._reader = EventReader()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next request."""
        return self._pacing.pause_s

    @property
    def trouble(self) -> str:
        """Why there is a pause."""
        return self._pacing.reason

    def request(self) -> HttpRequest:
        """The request to send now."""
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
            raise Refused(status, "The answer names no stream; it is not Headrace.", "unknown")
        self._pacing.arrived()
        if ignored := headers.get("x-headrace-ignored"):
            raise _unknown_fields(ignored)
        # while a model is loaded there is no stream, and the first frame with an id will name it
        self._awaits_name = not self.stream_id
        return NextAction.READ if self._awaits_name else NextAction.LEAVE

    @property
    def can_leave(self) -> bool:
        """Whether what is being read has said all that was asked."""
        return self._awaits_name and bool(self.stream_id)

    def feed(self, data: bytes) -> Iterator[Update]:
        """Yields each new update, to be followed by `applied`."""
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
        """Moves the cursor; StreamFailed if this was the end of a stream that others cut."""
        if event.seq is None:
            return
        self.cursor = event.seq
        if isinstance(event, Accepted):
            self.mode = event.mode
        self.has_ended = isinstance(event, Finish | Error)
        if isinstance(event, Error) and not self._has_asked_to_stop:
            raise StreamFailed(event.code, event.message)

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Refused, unless another try may help."""
        self._pacing.refused(status, headers, body)

    def broke(self, was_connected: bool, reason: str) -> None:
        """The connection ended. Unreachable if there is no server, or none for too long."""
        if not self.has_ended:
            self._pacing.broke(was_connected, reason)

    def pacing(self) -> Pacing:
        """The pacing of other requests about the stream."""
        return Pacing(self._patience_s, has_contact=True)

    def check_unread(self) -> None:
        if self.has_ended:
            message = "The stream was read to its end; client.attach(stream.id) reads it again."
            raise RequestFailed("stream_was_read", message)

    # stopping

    def stop_request(self) -> HttpRequest | None:
        """The request that is left to send so that the stream stops; None if there is none."""
        if self.has_ended or self._was_stop_heard:
            return None
        if self.stream_id:
            self._has_asked_to_stop = True
            return HttpRequest("POST", f"{path_of(self.stream_id)}/cancel")
        return self._post if self._was_sent else None  # its answer says which one to stop

    def stop_answered(self, status: int, headers: Mapping[str, str]) -> None:
        self._was_stop_heard = self._has_asked_to_stop and status not in MEND_THEMSELVES
        self.stream_id = self.stream_id or headers.get("x-stream-id", "")
        self._was_sent = False

    def stop_pacing(self) -> Pacing:
        """The pacing of a stop: a few tries, for who leaves does not want to wait."""
        return Pacing(min(self._patience_s, _STOP_PATIENCE_S), has_contact=True)


def new_request(fields: dict[str, Any]) -> HttpRequest:
    """The request that opens a stream; the same bytes and key every time it is sent."""
    route = next(ROUTES[name] for name in ROUTES if name in fields)
    body = to_body({"return_token_ids": True, **fields, "stream": True})
    headers = {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(16)}
    return HttpRequest("POST", route, headers, body)


def to_body(fields: dict[str, Any]) -> bytes:
    """RequestFailed if a field cannot be sent."""
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
    """JSON has no NaN and no infinity; they would be sent as null."""
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
