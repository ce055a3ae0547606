"""Tests of conversations over HTTP: items, responses, retries and two gateways."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.redis_servers import needs_redis, redis_server
from tools.harness.servers import ServerProcess, running_server

BRIEF = {"temperature": 0, "max_output_tokens": 8}
LONG = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 400}
STORY = "Tell a story."


class Client:
    """A client of /v1 with one API key."""

    def __init__(self, url: str, key: str = "none") -> None:
        headers = {"X-Api-Key": key}
        self.http = httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=60)

    def create(self, *texts: str, **more: Any) -> str:
        items = [said(text) for text in texts]
        made = self.http.post("/conversations", json={"items": items} | more)
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    def respond(self, id: str, text: str, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"input": text, "conversation": id} | (more or BRIEF)
        return self.http.post("/responses", json=body, headers=headers)

    def items(self, id: str, **query: Any) -> list[dict[str, Any]]:
        query = {"order": "asc", "limit": 100} | query
        listed = self.http.get(f"/conversations/{id}/items", params=query)
        assert listed.status_code == 200, listed.text
        found: list[dict[str, Any]] = listed.json()["data"]
        return found

    def texts(self, id: str) -> list[str]:
        return [text_of(item) for item in self.items(id)]


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text} | more


def text_of(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])


def output_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return text_of(response.json()["output"][0])


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    yield Client(server.url)


def test_a_response_sees_the_conversation_and_is_added_to_it(client: Client) -> None:
    id = client.create("I am Ann.")
    first = client.respond(id, "Count from 1 to 5.")
    second = client.respond({"id": id}, "And from 6 to 9?")  # type: ignore[arg-type]
    assert first.json()["conversation"] == second.json()["conversation"] == {"id": id}
    whole = ["I am Ann.", "Count from 1 to 5.", output_of(first), "And from 6 to 9?"]
    assert client.texts(id) == [*whole, output_of(second)]
    past = [said(text, role=role) for text, role in zip(whole, "uuau", strict=True)]
    past = [it | {"role": {"u": "user", "a": "assistant"}[it["role"]]} for it in past]
    alone = client.http.post("/responses", json={"input": past} | BRIEF)
    assert output_of(alone) == output_of(second)
    assert alone.json()["usage"]["input_tokens"] == second.json()["usage"]["input_tokens"]


def test_item_ids_stay_stable_while_the_conversation_grows(client: Client) -> None:
    id = client.create("a", "b")
    seen: list[str] = []
    for text in ("c", "d", "e"):
        client.respond(id, text)
        ids = [item["id"] for item in client.items(id)]
        assert ids[: len(seen)] == seen and len(set(ids)) == len(ids) > len(seen)
        seen = ids
    pages = [seen[0]]
    while page := client.items(id, after=pages[-1], limit=2):
        pages += [item["id"] for item in page]
    assert pages == seen
    assert [item["id"] for item in client.items(id, order="desc")] == seen[::-1]


def test_items_are_added_shown_and_removed(client: Client) -> None:
    id = client.create("a", metadata={"topic": "letters"})
    place = f"/conversations/{id}"
    added = client.http.post(f"{place}/items", json={"items": [said("b"), said("c")]}).json()
    assert (added["object"], added["has_more"], len(added["data"])) == ("list", False, 2)
    item = added["data"][0]
    assert client.http.get(f"{place}/items/{item['id']}").json() == item
    assert item == said("b") | {
        "id": item["id"],
        "status": "completed",
        "content": [{"type": "input_text", "text": "b"}],
    }
    shown = client.http.delete(f"{place}/items/{item['id']}").json()
    assert shown == client.http.get(place).json()
    assert (shown["id"], shown["object"], shown["metadata"]) == (
        id,
        "conversation",
        {"topic": "letters"},
    )
    assert client.texts(id) == ["a", "c"]
    assert client.http.get(f"{place}/items/{item['id']}").status_code == 404
    changed = client.http.post(place, json={"metadata": {"topic": "more"}}).json()
    assert changed == shown | {"metadata": {"topic": "more"}}
    client.respond(id, "d")
    assert client.http.get(place).json() == changed
    assert client.texts(id)[:3] == ["a", "c", "d"]


def test_an_item_with_a_duplicate_id_gets_a_new_id(client: Client) -> None:
    id = client.create("a")
    twice = [said("b", id="msg_same"), said("c", id="msg_same")]
    client.http.post(f"/conversations/{id}/items", json={"items": twice})
    ids = [item["id"] for item in client.items(id)]
    assert ids[1] == "msg_same" and len(set(ids)) == 3


def test_an_item_id_chosen_by_the_client_may_have_any_characters(client: Client) -> None:
    item = said("a", id="an id/with blanks?")
    id = client.create()
    assert client.http.post(f"/conversations/{id}/items", json={"items": [item]}).is_success
    place = f"/conversations/{id}/items/an%20id%2Fwith%20blanks%3F"
    assert client.http.get(place).json()["id"] == item["id"]
    assert client.http.delete(place).is_success and client.items(id) == []


def test_token_counts_and_compaction_include_the_conversation(client: Client) -> None:
    id = client.create("Count from 1 to 5.")
    count = {"input": "And from 6 to 9?", "conversation": id}
    counted = client.http.post("/responses/input_tokens", json=count).json()["input_tokens"]
    assert counted == client.respond(id, count["input"]).json()["usage"]["input_tokens"]
    compacted = client.http.post("/responses/compact", json={"conversation": id}).json()
    assert compacted["output"][-1]["type"] == "compaction" and len(client.items(id)) == 3


def test_a_batch_adds_each_answer_once(client: Client) -> None:
    id = client.create()
    body = {"input": "a", "conversation": id} | BRIEF
    line = {"method": "POST", "url": "/v1/responses", "body": body}
    lines = [json.dumps(line | {"custom_id": str(number)}) for number in range(3)]
    file = ("lines.jsonl", "\n".join(lines).encode())
    made = client.http.post("/files", data={"purpose": "batch"}, files={"file": file}).json()
    order = {"input_file_id": made["id"], "endpoint": "/v1/responses", "completion_window": "24h"}
    batch = client.http.post("/batches", json=order).json()["id"]
    eventually(lambda: client.http.get(f"/batches/{batch}").json()["status"] == "completed", 60)
    assert len(client.texts(id)) == 6 and client.respond(id, "b").is_success


def test_deleting_a_conversation_keeps_its_responses(client: Client) -> None:
    id = client.create("a")
    response = client.respond(id, "b", store=True, **BRIEF).json()
    deleted = client.http.delete(f"/conversations/{id}").json()
    assert deleted == {"id": id, "object": "conversation.deleted", "deleted": True}
    assert client.http.get(f"/responses/{response['id']}").json() == response
    assert client.http.delete(f"/responses/{response['id']}").is_success
    calls = [("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("POST", "/items")]
    for method, below in calls:
        body = None if method != "POST" else {"metadata": {}, "items": []}
        answer = client.http.request(method, f"/conversations/{id}{below}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            404,
            "conversation_not_found",
        )
    assert client.respond(id, "c").status_code == 404


def test_deleting_a_conversation_stops_its_running_response(client: Client) -> None:
    id = client.create()
    running = client.respond(id, STORY, background=True, **LONG).json()["id"]
    assert client.http.delete(f"/conversations/{id}").status_code == 200
    assert client.http.get(f"/responses/{running}").json()["status"] == "cancelled"
    assert client.http.get(f"/conversations/{id}").status_code == 404


@pytest.mark.parametrize("store", [{}, {"store": True}, {"store": False}])
def test_the_conversation_outlives_its_responses(client: Client, store: dict[str, bool]) -> None:
    id = client.create("a")
    response = client.respond(id, "b", **BRIEF, **store)
    found = client.http.get(f"/responses/{response.json()['id']}").status_code
    assert found == (404 if store.get("store") is False else 200)
    for place in ("responses", "streams"):
        client.http.delete(f"/{place}/{response.json()['id']}")
    assert client.texts(id) == ["a", "b", output_of(response)]
    assert client.http.get(f"/responses/{response.json()['id']}").status_code == 404


def test_only_one_response_at_a_time_runs_in_a_conversation(client: Client) -> None:
    id = client.create()
    running = client.respond(id, STORY, background=True, **LONG).json()["id"]
    second = client.respond(id, "And?")
    added = client.http.post(f"/conversations/{id}/items", json={"items": [said("b")]})
    for refused in (second, added):
        assert refused.status_code == 409, refused.text
        assert refused.json()["error"]["code"] == "conversation_locked"
        assert refused.headers["x-should-retry"] == "true"
    assert client.texts(id) == []
    cancelled = client.http.post(f"/responses/{running}/cancel").json()
    # A response that was cancelled adds nothing.
    assert cancelled["status"] == "cancelled" and client.texts(id) == []
    assert client.texts(id) == [] and client.respond(id, "And?").status_code == 200


def test_no_concurrent_change_is_lost(client: Client) -> None:
    id = client.create()
    done: list[str] = []

    def add(number: int) -> None:
        body = {"items": [said(f"item {number}")]}
        while client.http.post(f"/conversations/{id}/items", json=body).status_code == 409:
            pass
        done.append(f"item {number}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    # A stream that was just replaced may be deleted while its items are read.
    while any(thread.is_alive() for thread in threads):
        assert len(client.texts(id)) <= 8
    assert sorted(client.texts(id)) == sorted(done) and len(done) == 8


def test_a_retry_with_the_same_idempotency_key_adds_no_items(client: Client) -> None:
    id = client.create()
    key = {"Idempotency-Key": f"once {id}"}
    answers = [client.respond(id, "b", **BRIEF, headers=key) for _ in range(3)]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert client.texts(id) == ["b", output_of(answers[0])]


def test_the_answer_is_added_after_its_client_disconnects(client: Client) -> None:
    id = client.create()
    body = {"input": STORY, "conversation": id, "stream": True, **LONG, "max_output_tokens": 60}
    with client.http.stream("POST", "/responses", json=body) as answer:
        next(answer.iter_bytes())
    eventually(lambda: len(client.texts(id)) == 2)
    assert client.texts(id)[0] == STORY


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"previous_response_id": "resp_1"}, "mutually_exclusive_parameters"),
        ({"conversation": 5}, "invalid_type"),
        ({"conversation": {}}, "missing_required_parameter"),
        ({"conversation": "x" * 129}, "invalid_value"),
        ({"conversation": "conv_\u0000*\n::"}, "conversation_not_found"),
        ({"conversation": "conv_" + "0" * 32}, "conversation_not_found"),
    ],
)
def test_an_invalid_conversation_is_refused(
    client: Client, body: dict[str, Any], code: str
) -> None:
    refused = client.http.post("/responses", json={"input": "a", "conversation": "conv_1"} | body)
    assert refused.json()["error"]["code"] == code
    assert refused.status_code == (404 if "not_found" in code else 400)


@pytest.mark.parametrize(
    "body",
    [
        {"items": [said("a")] * 21},
        {"items": "text"},
        {"items": [{"type": 5}]},
        {"items": [5]},
        {"metadata": {"key": "x" * 513}},
        {"metadata": {str(number): "x" for number in range(17)}},
        {"metadata": ["x"]},
    ],
)
def test_an_invalid_body_is_refused(client: Client, body: dict[str, Any]) -> None:
    assert client.http.post("/conversations", json=body).status_code == 400
    id = client.create("a")
    below = "/items" if "items" in body else ""
    assert client.http.post(f"/conversations/{id}{below}", json=body).status_code == 400
    assert client.texts(id) == ["a"]


def test_hostile_paths_are_not_found(client: Client) -> None:
    for id in ("conv_x", "%0Aconv", "conv_%00", "..%2Ffiles", "x" * 2000, "conv_" + "f" * 32):
        assert client.http.get(f"/conversations/{id}").status_code == 404
        assert client.http.get(f"/conversations/{id}/items/%00").status_code == 404


def test_the_conversation_header_and_field_are_mutually_exclusive(client: Client) -> None:
    named = {"X-Conversation-Id": "mine"}
    refused = client.respond(client.create(), "a", **BRIEF, headers=named)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")


@needs_redis
@pytest.mark.slow
def test_two_gateways_with_one_redis_share_conversations(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        flags = ("--threads", "1", "--state-dir", redis.url)
        servers = [stack.enter_context(running_server(*flags)) for _ in range(2)]
        one, two = (Client(server.url) for server in servers)
        id = one.create("a")
        first = two.respond(id, "b")
        second = one.respond(id, "c")
        assert one.texts(id) == two.texts(id)
        assert one.texts(id) == ["a", "b", output_of(first), "c", output_of(second)]
        running = one.respond(id, STORY, background=True, **LONG).json()["id"]
        assert two.respond(id, "d").status_code == 409
        assert len(two.items(id)) == 5
        assert two.http.delete(f"/conversations/{id}").status_code == 200
        assert one.http.get(f"/responses/{running}").json()["status"] == "cancelled"
        assert one.http.get(f"/conversations/{id}").status_code == 404
