"""One stream from its request to its end, whatever connections break on the way; no I/O.

A request names itself by an idempotency key, so that it can be sent again when its answer was
lost, and so that its stream survives its client. Its answer is read as the stream's events, behind
a cursor that moves once an event has been applied.
"""

import enum
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.client.errors import Refused, StreamFailed
from headrace.client.events import Accepted, AnyEvent, Error, EventReader, Finish
from headrace.client.pacing import Pacing

ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


class Sent(NamedTuple):
    """An HTTP request."""

    method: str
    path: str
    headers: dict[str, str] = {}
    body: bytes = b""


class Then(enum.Enum):
    """What to do with an answer whose status and headers are known."""

    READ = enum.auto()  # its body holds events
    LEAVE = enum.auto()
    REFUSED = enum.auto()


class Following:
    """Made for a request, or for a stream that runs already."""

    def __init__(self, post: Sent | None, stream_id: str, after: int, patience_s: float) -> None:
        self.stream_id = stream_id
        self.cursor = after
        self.mode = ""
        self.has_ended = False
        self.is_ours = post is not None  # leaving it early stops it
        self._post = post
        self._was_sent = False
        self._has_asked_to_stop = False
        self._patience_s = patience_s
        self._pacing = Pacing(patience_s)
        self._reader = EventReader()

    @property
    def pause_s(self) -> float:
        """To be waited before the next request."""
        return self._pacing.pause_s

    @property
    def trouble(self) -> str:
        """Why there is a pause."""
        return self._pacing.reason

    def request(self) -> Sent:
        """What to send now."""
        self._reader = EventReader()
        if not self.stream_id:
            assert self._post, "a stream is followed by its id or by its request"
            self._was_sent = True
            return self._post
        headers = {"Accept": "text/event-stream"}
        if self.cursor >= 0:
            headers["Last-Event-ID"] = f"{self.stream_id}:{self.cursor}"
        return Sent("GET", f"/v1/streams/{self.stream_id}/events", headers)

    def answered(self, status: int, headers: Mapping[str, str]) -> Then:
        if status == 204:
            self.has_ended = True
            return Then.LEAVE
        if status != 200:
            return Then.REFUSED
        if self.stream_id:
            return Then.READ
        self.stream_id = headers.get("x-stream-id", "")
        if not self.stream_id:
            raise Refused(status, "The server names no stream; it is no Headrace.", "unknown")
        self._pacing.arrived()
        return Then.LEAVE

    def feed(self, data: bytes) -> Iterator[AnyEvent]:
        """New events, each to be followed by `applied`."""
        for event in self._reader.feed(data):
            if event.seq > self.cursor:
                self._pacing.arrived()
                yield event

    def applied(self, event: AnyEvent) -> None:
        """Moves the cursor; StreamFailed if this was the end of a stream that others cut."""
        self.cursor = event.seq
        if isinstance(event, Accepted):
            self.mode = event.mode
        self.has_ended = isinstance(event, Finish | Error)
        if isinstance(event, Error) and not self._has_asked_to_stop:
            raise StreamFailed(event.message, event.code)

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Refused, unless another try may help."""
        self._pacing.refused(status, headers, body)

    def broke(self, was_connected: bool, reason: str) -> None:
        """The connection ended. Unreachable if there is no server, or none for too long."""
        if not self.has_ended:
            self._pacing.broke(was_connected, reason)

    def pacing(self) -> Pacing:
        """For what is asked about the stream besides."""
        return Pacing(self._patience_s, has_contact=True)

    # stopping

    def stop_request(self) -> Sent | None:
        """What is left to send so that the stream stops."""
        if self.has_ended or self._has_asked_to_stop:
            return None
        if self.stream_id:
            self._has_asked_to_stop = True
            return Sent("POST", f"/v1/streams/{self.stream_id}/cancel")
        return self._post if self._was_sent else None  # its answer says which one to stop

    def stop_answered(self, headers: Mapping[str, str]) -> None:
        self.stream_id = self.stream_id or headers.get("x-stream-id", "")
        self._was_sent = False


def new_request(fields: dict[str, Any]) -> Sent:
    """The request that opens a stream; the same bytes and key every time it is sent."""
    route = next(ROUTES[name] for name in ROUTES if name in fields)
    body = msgspec.json.encode({"return_token_ids": True, **fields, "stream": True})
    headers = {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(16)}
    return Sent("POST", route, headers, body)


def to_fields(prompt_or_messages: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The body's fields: a list of objects is a chat, anything else a prompt."""
    given = prompt_or_messages
    is_chat = isinstance(given, list | tuple) and bool(given) and isinstance(given[0], dict)
    return {"messages" if is_chat else "prompt": given, **fields}
