"""Pages of a list, in the two forms that clients follow."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from headrace_common.errors import RequestError


class PageEntry(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=PageEntry)


class Paging(NamedTuple):
    """The entries that a page has: at most, and if nobody says how many; the cursors' names."""

    most: int = 100
    usual: int = 20
    after: str = "after"
    before: str = ""


OF_ANTHROPIC = Paging(most=1000, after="after_id", before="before_id")
"""How clients of Anthropic's API ask for pages."""


def page(
    request: Request, entries: Sequence[T], describe: Callable[[T], dict[str, Any]], paging: Paging
) -> dict[str, Any]:
    """The page that a request asks for, by `limit` and behind or before an entry."""
    asked = request.query_params
    limit = _limit(asked.get("limit"), paging)
    places = {entry.id: place for place, entry in enumerate(entries)}
    start = 0
    if (after := asked.get(paging.after)) is not None:
        start = _place(places, after, paging.after) + 1
    before = asked.get(paging.before) if paging.before else None
    if before is None:
        shown = entries[start : start + limit]
        has_more = start + len(shown) < len(entries)
    else:  # the client goes towards the first entry
        end = _place(places, before, paging.before)
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
        message = f"limit is a number from 1 to {paging.most}."
        raise RequestError("invalid_value", message, "limit")
    return int(given)


def _place(places: dict[str, int], id: str, param: str) -> int:
    if id not in places:
        raise RequestError("invalid_cursor", "There is no such entry; begin at the first.", param)
    return places[id]
