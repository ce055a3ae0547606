"""Tests which items a response adds to a conversation and how items get their ids."""

from typing import Any

import msgspec
import pytest

from headrace.protocols.dialect import encode
from headrace.protocols.openai import conversations
from headrace.protocols.openai.response_events import StoredBody, open_kept
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import UseConversation, UsedConversation

CONVERSATION = "conv_1"


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text} | more


def use(what: Any, kept: bytes = b"", output: bytes = b"", **fields: Any) -> UsedConversation:
    body = encode(fields.pop("body", {}))
    job = UseConversation(what=what, id=CONVERSATION, stream_id="resp_a", new_id="resp_b", **fields)
    return conversations.do(job, msgspec.msgpack.encode((kept, output, body)))


def items_in(used: UsedConversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(open_kept(used.kept).items)
    return found


def kept_by_a_response(*items: dict[str, Any], num_past: int) -> bytes:
    return msgspec.msgpack.encode(StoredBody(encode(items), b"{}", num_past=num_past))


def test_a_failed_or_running_response_adds_no_items() -> None:
    kept = kept_by_a_response(said("old", id="msg_1"), said("new"), num_past=1)
    assert [it["content"] for it in items_in(use("copy", kept))] == ["old"]


def test_a_response_that_completed_adds_its_input_and_output() -> None:
    kept = kept_by_a_response(said("old", id="msg_1"), said("new"), num_past=1)
    output = encode([said("answer", id="msg_ao0")])
    listed = msgspec.json.decode(use("list", kept, output, limit=9, is_rising=True).answer)
    assert [it["id"] for it in listed["data"]] == ["msg_1", "msg_ai1", "msg_ao0"]
    whole = open_kept(conversations.as_past(kept, output, "resp_a"))
    assert msgspec.json.decode(whole.items) == listed["data"]


def test_items_with_equal_ids_get_stable_distinct_ids() -> None:
    made = use("create", body={"items": [said("a", id="x"), said("b", id="x")]})
    assert [it["id"] for it in items_in(made)] == ["x", "msg_bi1"]
    again = use("add", made.kept, body={"items": [said("c", id="x")]})
    assert [it["id"] for it in items_in(again)] == ["x", "msg_bi1", "msg_bi2"]
    assert msgspec.json.decode(again.answer)["data"][0]["id"] == "msg_bi2"


def test_an_output_with_the_id_of_its_call_gets_that_call_id() -> None:
    action = {"type": "exec", "command": ["ls"]}
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": action}
    output = {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.txt"}
    made = use("create", body={"items": [call, output | {"call_id": None}]})
    items = items_in(made)
    assert items == [call, output | {"id": "item_bi1", "call_id": "lsh_1"}]


def test_metadata_is_replaced_and_null_removes_it() -> None:
    made = use("create", body={"metadata": {"a": "b"}, "items": None})
    for metadata in ({"c": "d"}, None):
        changed = use("update", made.kept, body={"metadata": metadata})
        assert msgspec.json.decode(changed.answer)["metadata"] == (metadata or {})
    with pytest.raises(RequestError, match="metadata is required"):
        use("update", made.kept)


def test_items_can_be_removed_from_a_conversation_with_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = use("create", body={"items": [said(str(number)) for number in range(20)]})
    monkeypatch.setattr(conversations, "MAX_ITEMS", 19)
    with pytest.raises(RequestError, match="20 items; the limit is 19"):
        conversations.as_past(made.kept, b"", "resp_a")
    removed = use("remove", made.kept, item="msg_bi0")
    assert len(items_in(removed)) == 19
    with pytest.raises(RequestError, match="20 items"):
        use("add", removed.kept, body={"items": [said("more")]})
