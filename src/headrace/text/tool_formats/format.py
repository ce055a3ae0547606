"""Defines a format of tool calls: how calls are found in text, parsed, and forced by a grammar."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.text.argument_rules import ArgumentNotation

Call = tuple[str, dict[str, Any]]
"""The name and the arguments of a call."""

StringTypes = Callable[[str, str], tuple[str, ...]]
"""Returns the JSON types of a parameter that can be a string, given the names of the tool and of
the parameter; returns nothing for other parameters, and if any type is allowed."""

TokenId = Callable[[str], int | None]
"""Returns the id of a token by its text, or None."""

# Special tokens are not text, so this pattern ends before a marker.
ANY_TEXT = "/(?s:.+)/"


class CallDelta(NamedTuple):
    """A piece of a tool call: first only the name, then the arguments piece by piece."""

    name: str
    arguments: str


class CallBody(Protocol):
    """Parses the calls after a start marker."""

    def feed(self, text: str) -> list[CallDelta]: ...

    def flush(self) -> list[CallDelta]:
        """Return the last pieces at the end of the answer."""

    @property
    def rest(self) -> str | None:
        """The text after the calls, or all text if there is no call; None if unknown."""


class CallRules(NamedTuple):
    """Lark rules for tool calls: `lines` define the rule `calls`.

    In the rules, @arguments0 stands for the arguments of the first tool, and so on. `start` is the
    start rule for answers that can contain both text and calls. `text` is the pattern of the text,
    or None if text and the start of a call cannot be distinguished. The arguments are JSON objects
    unless `notation` is set.
    """

    lines: list[str]
    start: str = "TEXT? calls?"
    text: str | None = ANY_TEXT
    notation: ArgumentNotation | None = None


MakeRules = Callable[[Sequence[str], int, TokenId], CallRules]
"""Returns the rules for 1 to N calls, given the tools' names, N and a function for token ids."""


class ToolFormat(NamedTuple):
    """A format of tool calls.

    A marker in `starts` begins a call. A character in `leads` also begins a call if the character
    begins the answer. Only chat templates of this format contain one of the texts `signs`. A
    marker in `kept` is part of the call, so the call's parser also gets the marker.
    """

    signs: tuple[str, ...]
    starts: tuple[str, ...]
    make: Callable[[StringTypes], CallBody]
    leads: str = ""
    # Markers inside or after a call.
    ends: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    # None if the format's calls cannot be forced by a grammar.
    rules: MakeRules | None = None


def marker(text: str, token_id: TokenId) -> str:
    """Return the marker for a rule: as a token if the model has this token, or else as text."""
    found = token_id(text)
    return json.dumps(text) if found is None else f"<[{found}]>"


def more(rule: str, most: int) -> str:
    """Return the part of a rule for the calls after the first call, or "" for a single call."""
    return f" ({rule}){{0,{most - 1}}}" if most > 1 else ""


def objects(names: Sequence[str], key: str) -> str:
    """Return a rule for a call as a JSON object with its arguments under `key`."""
    openings = (json.dumps(f'{{"name": "{name}", "{key}": ') for name in names)
    return " | ".join(f'{it} @arguments{i} "}}"' for i, it in enumerate(openings))
