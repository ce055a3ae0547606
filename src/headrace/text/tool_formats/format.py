"""A format of tool calls: how they are found in a text, parsed, and forced by a grammar."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

Call = tuple[str, dict[str, Any]]
"""A name and its arguments."""

IsText = Callable[[str, str], bool]
"""Whether this tool declares this parameter as a string."""

TokenId = Callable[[str], int | None]
"""The id of a token by its text, or None."""

ANY_TEXT = "/(?s:.+)/"  # special tokens are no text, so it ends before a marker


class CallDelta(NamedTuple):
    """More of a tool call: its name comes first and once, then its arguments, piece by piece."""

    name: str
    arguments: str


class CallBody(Protocol):
    """Reads the calls behind one start marker."""

    def feed(self, text: str) -> list[CallDelta]: ...

    def flush(self) -> list[CallDelta]:
        """The answer has ended."""

    @property
    def rest(self) -> str | None:
        """The text after the calls, or all of it without a call; None while more may come."""


class CallRules(NamedTuple):
    """Lark's `lines` define `calls`; @arguments0 is what the first tool takes, and so on.

    `start` is for an answer that may be text, of the form `text`, instead or before; None: the
    beginning of a call could not be told from text.
    """

    lines: list[str]
    start: str = "TEXT? calls?"
    text: str | None = ANY_TEXT


MakeRules = Callable[[Sequence[str], int, TokenId], CallRules]
"""The rules for one call, or up to as many, of tools with these names."""


class ToolFormat(NamedTuple):
    """`starts` open a body; so does an answer that begins with one character of `leads`.

    `sign` is what only chat templates of this format have. Those of `starts` that are in `kept` are
    part of a call.
    """

    sign: str
    starts: tuple[str, ...]
    make: Callable[[IsText], CallBody]
    leads: str = ""
    ends: tuple[str, ...] = ()  # markers inside the body
    kept: tuple[str, ...] = ()
    rules: MakeRules | None = None  # None: calls cannot be forced


def marker(text: str, token_id: TokenId) -> str:
    """The marker in a rule: the token itself, where the model has one."""
    found = token_id(text)
    return json.dumps(text) if found is None else f"<[{found}]>"


def more(rule: str, most: int) -> str:
    """The calls after the first one in a rule."""
    return f" ({rule}){{0,{most - 1}}}" if most > 1 else ""


def objects(names: Sequence[str], key: str) -> str:
    """A rule for a call as a JSON object; its arguments are under `key`."""
    openings = (json.dumps(f'{{"name": "{name}", "{key}": ') for name in names)
    return " | ".join(f'{it} @arguments{i} "}}"' for i, it in enumerate(openings))
