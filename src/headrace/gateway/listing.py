"""Splits a list into pages, with the cursors of OpenAI's or Anthropic's API."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from headrace_common.errors import RequestError


class PageEntry(Protocol):
    """An entry of a list. Clients refer to an entry by its id."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=PageEntry)


class Paging(NamedTuple):
    """Sets the maximum and the default number of entries per page, and the names of the cursors."""

    most: int = 100
    usual: int = 20
    after: str = "after"
    before: str = ""


ANTHROPIC_PAGING = Paging(most=1000, after="after_id", before="before_id")
"""The page sizes and cursor names of Anthropic's API."""


def page(
    request: Request, entries: Sequence[T], describe: Callable[[T], dict[str, Any]], paging: Paging
) -> dict[str, Any]:
    """Return the requested page: up to `limit` entries after or before a given entry."""
    query = request.query_params
    limit = _limit(query.get("limit"), paging)
    positions = {entry.id: position for position, entry in enumerate(entries)}
    start = 0
    if (after := query.get(paging.after)) is not None:
        start = _position(positions, after, paging.after) + 1
    before = query.get(paging.before) if paging.before else None
    if before is None:
        shown = entries[start : start + limit]
        has_more = start + len(shown) < len(entries)
    else:
        # The client pages backwards, towards the first entry.
        end = _position(positions, before, paging.before)
        shown = entries[start:end][-limit:]
        has_more = end - start > limit
    return {
        "object": "list",
        "data": [describe(entry) for entry in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": has_more,
    }


def _limit(given: str | None, paging: Paging) -> int:
    if given is None:
        return paging.usual
    if not (given.isdecimal() and len(given) < 10 and 1 <= int(given) <= paging.most):
        message = f"limit must be a number from 1 to {paging.most}."
        raise RequestError("invalid_value", message, "limit")
    return int(given)


def _position(positions: dict[str, int], id: str, param: str) -> int:
    if id not in positions:
        message = "The list has no entry with this id; start again at the first page."
        raise RequestError("invalid_cursor", message, param)
    return positions[id]
