"""Whose work a line of the log is about, and the line that each request gets at its end.

Tasks copy their context as they are made, so what a request starts is logged under its id.
"""

import logging
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
KEY_NAME: ContextVar[str] = ContextVar("key_name", default="")

_requests = logging.getLogger("headrace.requests")


def log_request(route: str, outcome: str, **figures: int | float | str | None) -> None:
    """No prompt, text, key, stream id or conversation id may be among the figures."""
    fields = {"route": route, "outcome": outcome, **figures}
    _requests.info("request", extra={"fields": fields})
