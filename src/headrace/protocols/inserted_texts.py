"""Removes texts that some clients insert at the start of their prompts and change each time.

With such a text, the prefix cache could not reuse any earlier prompt. Only the texts in TABLE
are removed. The removed texts are not moved to the end of the prompt, because the last answer
would then have to be prefilled again in the next request: it would follow other tokens than before.
Clients that need a text at the end of the prompt put the text there themselves.
"""

import re
from typing import Any, NamedTuple

from headrace_common.request import Route


class Inserted(NamedTuple):
    """A text that a client inserts into a field. The client's User-Agent begins with `agent`."""

    client: str
    agent: str
    route: Route
    # The body's field: a string, or a list of parts that have `text`.
    field: str
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
        # A run of line breaks is matched only from its start. Attempts from every break would take
        # quadratic time.
        re.compile(
            r"(?<!\n)\n*+<total_tokens>(?:\d{1,12}|Infinite) tokens left</total_tokens>\s*+\Z"
        ),
    ),
)
AGENTS = tuple(it.agent for it in TABLE)
"""User-Agent prefixes of the clients in TABLE."""


def client_of(user_agent: str) -> str:
    """Return the name of the client in TABLE that has this User-Agent, or an empty string."""
    return next((it.client for it in TABLE if user_agent.startswith(it.agent)), "")


def remove_inserted(body: dict[str, Any], route: Route, client: str) -> dict[str, str]:
    """Remove the texts that `client` inserts from a decoded body; return them by name."""
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
