"""The texts that clients are known to put into the beginning of their prompts, other each time.

Kept, each would make every prompt a new one to the prefix cache. Nothing that is not in TABLE is
touched. None is moved behind the prefix: the answer before it would then have to be read again in
each turn, and what a client repeats itself stands behind it already.
"""

import re
from typing import Any, NamedTuple

from headrace_common.request import Route


class Inserted(NamedTuple):
    """A text at a place of a field, by the client whose User-Agent begins so."""

    client: str
    agent: str
    route: Route
    field: str  # a string or a list of parts with `text`
    name: str
    pattern: re.Pattern[str]


_CLAUDE_CODE = ("Claude Code", "claude-cli/", "/v1/messages", "system")
TABLE = (
    Inserted(
        *_CLAUDE_CODE,
        "the billing header",
        re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?"),
    ),
    Inserted(
        *_CLAUDE_CODE,
        "the tokens left",
        # a run of line breaks is tried from its first one alone
        re.compile(
            r"(?<!\n)\n*+<total_tokens>(?:\d{1,12}|Infinite) tokens left</total_tokens>\s*+\Z"
        ),
    ),
)


def client_of(user_agent: str) -> str:
    """The name of a client of the table, or ""."""
    return next((it.client for it in TABLE if user_agent.startswith(it.agent)), "")


def take_out(body: dict[str, Any], route: Route, client: str) -> dict[str, str]:
    """Takes this client's texts out of a decoded body; returns them by their names."""
    taken: dict[str, str] = {}
    for one in TABLE if client else ():
        if (one.client, one.route) != (client, route):
            continue
        value = body.get(one.field)
        if isinstance(value, str):
            body[one.field] = _without(value, one, taken)
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] = _without(part["text"], one, taken)
    return taken


def _without(text: str, inserted: Inserted, taken: dict[str, str]) -> str:
    found = inserted.pattern.search(text)
    if found is None:
        return text
    taken[inserted.name] = found[0].strip()
    return text[: found.start()] + text[found.end() :]
