"""Adds request ids to log lines, and writes a log line at the end of each request.

An asyncio task copies the current context when the task is created. So the log lines of all
tasks that a request starts have the request's id.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

Figure = int | float | str | None

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
PARENT: ContextVar[Mapping[str, str]] = ContextVar("parent", default=MappingProxyType({}))
"""The request headers that name the client's trace span."""

KEY_NAME: ContextVar[str] = ContextVar("key_name", default="")

_NOTED: ContextVar[dict[str, Figure] | None] = ContextVar("noted", default=None)

_requests = logging.getLogger("headrace.requests")


def begin_request(request_id: str, parent: Mapping[str, str] = MappingProxyType({})) -> None:
    REQUEST_ID.set(request_id)
    PARENT.set(parent)
    # The key of the request is not known yet.
    KEY_NAME.set("")
    begin_notes()


def begin_notes() -> None:
    """Start collecting figures for a request's log line.

    If a connection carries several requests, call this in the task of each request.
    """
    _NOTED.set({})


def note(**figures: Figure) -> None:
    """Add figures to the log line of the current request.

    Tasks that the request started may also call this function.
    """
    if (noted := _NOTED.get()) is not None:
        noted |= figures


def log_request(route: str, outcome: str, **figures: Figure) -> None:
    """Write a request's log line. Never pass a prompt, text, key, stream id or conversation id."""
    fields = {"route": route, "outcome": outcome, **(_NOTED.get() or {}), **figures}
    _requests.info("request", extra={"fields": fields})
