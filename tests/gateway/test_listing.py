"""Tests the pages of a list in both directions."""

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from headrace.gateway.listing import Paging, page
from headrace_common.errors import RequestError

ENTRIES = [SimpleNamespace(id=f"e{number}") for number in range(7)]
BOTH = Paging(most=5, usual=3, after="after_id", before="before_id")


def asked(paging: Paging = BOTH, **query: str) -> dict[str, Any]:
    request: Any = SimpleNamespace(query_params=QueryParams(query))
    return page(request, ENTRIES, lambda entry: {"id": entry.id}, paging)


def ids(found: dict[str, Any]) -> list[str]:
    return [entry["id"] for entry in found["data"]]


def test_pages_follow_one_another_to_the_end() -> None:
    first = asked()
    assert ids(first) == ["e0", "e1", "e2"] and first["has_more"]
    second = asked(after_id=first["last_id"], limit="4")
    assert ids(second) == ["e3", "e4", "e5", "e6"] and not second["has_more"]
    assert asked(after_id="e6") | {"object": "list"} == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip


def test_a_page_before_an_entry_ends_just_before_it() -> None:
    assert ids(asked(before_id="e5", limit="2")) == ["e3", "e4"]
    assert ids(asked(before_id="e1", limit="2")) == ["e0"]


def test_a_page_before_an_entry_reports_whether_more_precede_it() -> None:
    assert asked(before_id="e5", limit="2")["has_more"]
    assert not asked(before_id="e2", limit="2")["has_more"]
    assert not asked(after_id="e2", before_id="e5", limit="2")["has_more"]


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "6"}, {"limit": "x"}, {"after_id": "z"}]
)
def test_an_invalid_limit_or_cursor_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(RequestError) as refused:
        asked(**query)
    assert refused.value.param in query
