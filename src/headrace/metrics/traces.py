"""Defines the tracing span of a request, and the interface for sending spans. Off by default."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

Attribute = str | bool | int | float | list[str]


class RequestSpan(msgspec.Struct, frozen=True):
    """Describes an ended request, and when the request reached its stages.

    `parent` has the headers in which the client names the parent span. `moments` has the time of
    each stage, in seconds since the request began. The attributes must not contain a prompt, a
    text, a key, a stream id or a conversation id.
    """

    name: str
    parent: Mapping[str, str]
    seconds: float
    # The code of the error; empty if the request succeeded.
    error: str
    attributes: Mapping[str, Attribute]
    moments: Mapping[str, float] = {}


class Traces(Protocol):
    @property
    def is_on(self) -> bool:
        """Return whether spans are sent. Otherwise, callers need not create spans."""

    def ended(self, span: RequestSpan) -> None:
        """Accept a span without waiting."""

    def close(self) -> None:
        """Send the remaining spans, within a time limit."""


class NoTraces:
    is_on = False

    def ended(self, span: RequestSpan) -> None:
        pass

    def close(self) -> None:
        pass
