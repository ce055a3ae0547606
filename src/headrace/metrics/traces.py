"""One span per request, for whoever collects them; nobody does unless the server is told so."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

Attribute = str | bool | int | float | list[str]


class RequestSpan(msgspec.Struct, frozen=True):
    """The end of a request and what led to it.

    `parent` has the headers by which its client names its own span. `moments` are seconds since
    its begin. No prompt, text, key, stream id or conversation id may be among the attributes.
    """

    name: str
    parent: Mapping[str, str]
    seconds: float
    error: str  # its code; "" for a good end
    attributes: Mapping[str, Attribute]
    moments: Mapping[str, float] = {}


class Traces(Protocol):
    @property
    def is_on(self) -> bool:
        """Whether spans are wanted; else none need be made."""

    def ended(self, span: RequestSpan) -> None:
        """Takes a span over; never waits."""

    def close(self) -> None:
        """Sends what is left, within bounds."""


class NoTraces:
    is_on = False

    def ended(self, span: RequestSpan) -> None:
        pass

    def close(self) -> None:
        pass
