"""Whose work a line of the log is about, and the line that each request gets at its end.

Tasks copy their context as they are made, so what a request starts is logged under its id.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

Figure = int | float | str | None

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
PARENT: ContextVar[Mapping[str, str]] = ContextVar("parent", default=MappingProxyType({}))
"""The headers by which a client names the span that its request is part of."""

KEY_NAME: ContextVar[str] = ContextVar("key_name", default="")

_NOTED: ContextVar[dict[str, Figure] | None] = ContextVar("noted", default=None)

_requests = logging.getLogger("headrace.requests")


def begin_request(request_id: str, parent: Mapping[str, str] = MappingProxyType({})) -> None:
    REQUEST_ID.set(request_id)
    PARENT.set(parent)
    KEY_NAME.set("")  # until the key is known
    begin_notes()


def begin_notes() -> None:
    """Begins the notes of one of several requests of a connection, in a task of its own."""
    _NOTED.set({})


def note(**figures: Figure) -> None:
    """Adds figures to the log line of this request, also from tasks that it started."""
    if (noted := _NOTED.get()) is not None:
        noted |= figures


def log_request(route: str, outcome: str, **figures: Figure) -> None:
    """No prompt, text, key, stream id or conversation id may be among the figures."""
    fields = {"route": route, "outcome": outcome, **(_NOTED.get() or {}), **figures}
    _requests.info("request", extra={"fields": fields})
