"""Reads and changes the items and the metadata of conversations (/v1/conversations).

The StoredBody of a conversation's newest stream has all items before that stream. If that stream is
a response that has ended, the response's input and output are the next items.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.protocols.dialect import encode
from headrace.protocols.fields.common import check_required
from headrace.protocols.fields.kinds import (
    Kind,
    check_count,
    missing,
    read_fields,
    wrong_type,
)
from headrace.protocols.openai.response_events import StoredBody, open_kept
from headrace.protocols.openai.response_fields import Metadata
from headrace.protocols.openai.response_history import Item
from headrace.protocols.openai.response_items import (
    MAX_ITEMS,
    Items,
    ReadItems,
    item_id,
    listed,
)
from headrace.protocols.requests import decode
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import UseConversation, UsedConversation

_MAX_ADDED = 20

_decode_parts = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_shown = msgspec.json.Decoder(dict[str, Any]).decode


class NewItems(Items, frozen=True):
    """Reads the items that a client adds to a conversation in one request."""

    def check(self, value: Any, path: str) -> ReadItems:
        if type(value) is not list:
            raise wrong_type(value, path, "an array")
        check_count(len(value), path, 0, _MAX_ADDED)
        return super().check(value, path)

    def schema(self) -> dict[str, Any]:
        item = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}}
        return {"type": "array", "items": item, "maxItems": _MAX_ADDED}


CREATED: Mapping[str, Kind] = {"items": NewItems(), "metadata": Metadata()}
ADDED: Mapping[str, Kind] = {"items": NewItems()}
UPDATED: Mapping[str, Kind] = {"metadata": Metadata()}
KEYS = ("id", "object", "created_at", "metadata")


def do(job: UseConversation, packed: bytes) -> UsedConversation:
    """Return the result of a job. Raise RequestError if the job refuses the request's body."""
    kept, output, body = _decode_parts(packed)
    stored = open_kept(kept) if kept else StoredBody()
    if job.what == "create":
        fields = read_fields(CREATED, decode(body))
        shown = {"id": job.id, "object": "conversation", "created_at": job.created}
        shown |= {"metadata": fields.get("metadata", {})}
        return _changed(encode(shown), _distinct(fields.get("items", ()), job.new_id))
    if job.what == "show":
        return UsedConversation(stored.conversation)
    items = items_after(stored, output, job.stream_id)
    if job.what == "update":
        given = decode(body)
        if "metadata" not in given:
            raise missing("metadata")
        fields = {"metadata": {}} | read_fields(UPDATED, given)
        return _changed(encode(_decode_shown(stored.conversation) | fields), items)
    if job.what == "add":
        given = decode(body)
        check_required(("items",), given)
        whole = _distinct([*items, *read_fields(ADDED, given)["items"]], job.new_id)
        added = whole[len(items) :]
        page = encode(page_of(added, max(1, len(added)), is_rising=True))
        return _changed(stored.conversation, whole, page)
    if job.what == "copy":
        return _changed(stored.conversation, items)
    if job.what == "list":
        page = encode(page_of(items, job.limit, job.is_rising, job.after))
        return UsedConversation(page)
    found = next((item for item in items if item["id"] == job.item), None)
    if found is None:
        raise RequestError("item_not_found", "The conversation has no item with this id.", "id")
    if job.what == "remove":
        return _changed(stored.conversation, [item for item in items if item is not found])
    return UsedConversation(encode(found))


def items_after(stored: StoredBody, output: bytes, stream_id: str) -> list[Item]:
    """Return the items of a conversation whose newest stream stored this body.

    Without `output` the stream is running or has failed, and adds no items.
    """
    items = _decode_items(stored.items)
    items = [*items, *_decode_items(output)] if output else items[: stored.num_past]
    return _distinct(items, stream_id)


def as_past(kept: bytes, output: bytes, stream_id: str) -> bytes:
    """Return the StoredBody of a conversation with all its items, for the next response."""
    stored = open_kept(kept)
    items = items_after(stored, output, stream_id)
    _check_count(items)
    past = StoredBody(encode(items), conversation=stored.conversation)
    return msgspec.msgpack.encode(past)


def page_of(items: Sequence[Item], limit: int, is_rising: bool, after: str = "") -> dict[str, Any]:
    """Return a page of items with ids. Raise RequestError if no item has the id `after`."""
    items = items if is_rising else items[::-1]
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise RequestError(
            "invalid_value", "The list has no item with the id that `after` gives.", "after"
        )
    start = ids.index(after) + 1 if after else 0
    page = items[start : start + limit]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    listing = {"object": "list", "data": page, "first_id": first_id, "last_id": last_id}
    return listing | {"has_more": start + limit < len(items)}


def _distinct(items: Sequence[Item], stream_id: str) -> list[Item]:
    """Return the items with distinct ids. A client may send two items with the same id."""
    found, seen = list[Item](), set[str]()
    for number, item in enumerate(listed(items, stream_id)):
        if item["id"] in seen:
            # The output of a local_shell call may name its call only in `id`.
            if item["type"].endswith("_output") and not item.get("call_id"):
                item = item | {"call_id": item["id"]}
            item = item | {"id": item_id(stream_id, item["type"], f"i{number}")}
        seen.add(item["id"])
        found.append(item)
    return found


def _changed(shown: bytes, items: Sequence[Item], answer: bytes | None = None) -> UsedConversation:
    _check_count(items)
    kept = StoredBody(encode(items), conversation=shown, num_past=len(items))
    return UsedConversation(shown if answer is None else answer, msgspec.msgpack.encode(kept))


def _check_count(items: Sequence[Item]) -> None:
    if len(items) > MAX_ITEMS:
        message = f"The conversation has {len(items):,} items; the limit is {MAX_ITEMS:,}. "
        message += "Delete items, or start a new conversation."
        raise RequestError("invalid_value", message, "conversation")
