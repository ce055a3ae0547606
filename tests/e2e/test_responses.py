"""Tests of /v1/responses over HTTP: retrieval, resumption, references and a kill."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

COUNT = {"input": "Count from 1 to 5.", "temperature": 0}
LONG = {"input": "Tell a story.", "temperature": 0, "ignore_eos": True, "max_output_tokens": 400}
THOUGHT = {"input": "What is 23 + 45?", "reasoning": {"effort": "low"}, "temperature": 0}


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return f"{server.url}/v1/responses"


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url, json=body, timeout=60)


def follow(url: str, id: str, after: int | None = None) -> str:
    query: dict[str, Any] = {"stream": "true"}
    query |= {} if after is None else {"starting_after": after}
    return httpx.get(f"{url}/{id}", params=query, timeout=60).text


def number(frame: str) -> int:
    data = next(line for line in frame.split("\n") if line.startswith("data: "))
    return int(json.loads(data[6:])["sequence_number"])


@pytest.mark.parametrize("body", [COUNT, COUNT | {"store": True}, THOUGHT | {"background": True}])
def test_a_stream_can_be_resumed_after_every_sequence_number(
    url: str, body: dict[str, Any]
) -> None:
    streamed = post(url, **body, stream=True)
    id = streamed.headers["x-stream-id"]
    frames = [f"{frame}\n\n" for frame in streamed.text.split("\n\n")[:-1]]
    assert [number(frame) for frame in frames] == list(range(len(frames)))
    assert follow(url, id) == streamed.text
    for after in range(len(frames)):
        assert follow(url, id, after) == "".join(frames[after + 1 :])


def test_a_response_that_was_not_streamed_can_be_streamed_later(url: str) -> None:
    response = post(url, **COUNT).json()
    last = follow(url, response["id"]).split("data: ")[-1]
    assert json.loads(last)["response"] == response == httpx.get(f"{url}/{response['id']}").json()


def test_item_references_are_replaced_by_items_of_earlier_responses(url: str) -> None:
    first = post(url, **COUNT).json()
    (asked,) = httpx.get(f"{url}/{first['id']}/input_items").json()["data"]
    more = {"role": "user", "content": "And from 6 to 9?"}
    ids = [it["id"] for it in (asked, *first["output"])]
    unknown = {"type": "item_reference", "id": "msg_of_another_provider"}
    referring = [{"type": "item_reference", "id": id} for id in ids]
    asked_short = {"max_output_tokens": 8, "temperature": 0}
    short = post(url, input=[*referring, unknown, more], **asked_short)
    whole = post(url, input=[asked, *first["output"], more], **asked_short)
    assert short.headers["x-headrace-ignored"] == f"input[{len(ids)}]"
    assert "x-headrace-ignored" not in whole.headers
    assert short.json()["usage"] | {"input_tokens_details": 0} == whole.json()["usage"] | {
        "input_tokens_details": 0
    }
    listing = httpx.get(f"{url}/{short.json()['id']}/input_items", params={"order": "asc"})
    assert [it["id"] for it in listing.json()["data"]][:-1] == [*ids, unknown["id"]]


def message(id: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": id, "role": "user", "content": text}


def shown_items(url: str, response: httpx.Response) -> list[dict[str, Any]]:
    """Return the items that led to a response, as the server lists them."""
    place = f"{url}/{response.json()['id']}/input_items"
    found: list[dict[str, Any]] = httpx.get(place, params={"order": "asc"}).json()["data"]
    return found


@pytest.mark.parametrize("more", [{}, {"store": True}])
def test_a_reference_finds_an_item_by_an_id_chosen_by_the_client(
    url: str, more: dict[str, Any]
) -> None:
    id = f"msg_of_another_server{len(more)}"
    refer = [{"type": "item_reference", "id": id}, {"role": "user", "content": "And you?"}]
    brief = {"max_output_tokens": 4, "temperature": 0}
    older = post(url, input=[message(id, "I am Ann.")], **brief, **more)
    newer = post(url, input=[message(id, "I am Ben.")], **brief, **more)
    for first, text in ((newer, "I am Ben."), (older, "I am Ann.")):
        answer = post(url, input=refer, **brief)
        assert "x-headrace-ignored" not in answer.headers
        assert shown_items(url, answer)[0]["content"][0]["text"] == text
        assert httpx.delete(f"{url}/{first.json()['id']}").status_code == 200
    assert post(url, input=refer, **brief).headers["x-headrace-ignored"] == "input[0]"


def test_a_reference_finds_the_input_of_a_running_response(url: str) -> None:
    sent = {"input": [message("msg_at_work", "Tell a story.")], "background": True}
    running = post(url, **LONG | sent).json()["id"]
    refer = [{"type": "item_reference", "id": "msg_at_work"}]
    answer = post(url, input=refer, max_output_tokens=1)
    assert httpx.post(f"{url}/{running}/cancel").json()["status"] == "cancelled"
    assert "x-headrace-ignored" not in answer.headers


def test_a_reference_finds_an_item_of_the_previous_response(url: str) -> None:
    brief = {"max_output_tokens": 4, "temperature": 0}
    first = post(url, input=[message("an id with blanks", "I am Ann.")], **brief)
    id = first.json()["id"]
    refer = [{"type": "item_reference", "id": "an id with blanks"}]
    assert post(url, input=refer, **brief).headers["x-headrace-ignored"] == "input[0]"
    second = post(url, input=refer, previous_response_id=id, **brief)
    assert "x-headrace-ignored" not in second.headers
    assert shown_items(url, second)[-1]["content"][0]["text"] == "I am Ann."


def test_previous_response_id_equals_sending_the_whole_conversation(url: str) -> None:
    first = post(url, **COUNT, instructions="Be brief.").json()
    asked = [{"role": "user", "content": "And from 6 to 9?"}]
    more = {"temperature": 0, "stream": True, "max_output_tokens": 30}
    chained = post(url, input=asked, previous_response_id=first["id"], **more)
    past = [{"role": "user", "content": COUNT["input"]}, *first["output"]]
    whole = post(url, input=[*past, *asked], **more)
    ends = [json.loads(answer.text.split("data: ")[-1])["response"] for answer in (chained, whole)]
    texts = [end["output"][0]["content"] for end in ends]
    assert texts[0] == texts[1]
    assert ends[0]["usage"]["input_tokens"] == ends[1]["usage"]["input_tokens"]
    again = post(url, input="So?", previous_response_id=ends[0]["id"]).json()
    items = httpx.get(f"{url}/{again['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 2 + ["user"]


def test_unknown_and_unstored_responses_are_not_found(url: str) -> None:
    gone = post(url, **COUNT, store=False).json()["id"]
    chat = f"{url.removesuffix('responses')}chat/completions"
    hello = {"messages": [{"role": "user", "content": "Hello"}]}
    named = httpx.post(chat, json=hello, headers={"Idempotency-Key": "chat"}, timeout=60)
    for id in ("resp_none", gone, named.json()["id"]):
        answers = [httpx.get(f"{url}/{id}"), httpx.delete(f"{url}/{id}")]
        answers += [httpx.post(f"{url}/{id}/cancel"), httpx.get(f"{url}/{id}/input_items")]
        assert [answer.status_code for answer in answers] == [404] * 4
        assert post(url, **COUNT, previous_response_id=id).status_code == 404


def test_a_cancelled_background_response_stays_cancelled(url: str) -> None:
    response = post(url, **LONG, background=True)
    assert response.elapsed.total_seconds() < 5 and response.json()["status"] == "queued"
    place = f"{url}/{response.json()['id']}"
    early = post(url, **COUNT, previous_response_id=response.json()["id"])
    assert early.status_code == 400
    first, second = (httpx.post(f"{place}/cancel").json() for _ in range(2))
    assert first == second == httpx.get(place).json()
    assert first["status"] == "cancelled"
    assert httpx.delete(place).json()["deleted"] and httpx.get(place).status_code == 404


@pytest.mark.parametrize("query", ["stream=true&starting_after=-1", "stream=true&starting_after=x"])
def test_an_invalid_starting_after_is_refused(url: str, query: str) -> None:
    id = post(url, **COUNT).json()["id"]
    refused = httpx.get(f"{url}/{id}?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


def test_tools_of_other_types_are_named_as_ignored(url: str) -> None:
    answer = post(url, **COUNT, tools=[{"type": "web_search"}], max_output_tokens=1)
    assert answer.headers["x-headrace-ignored"] == "tools[0]"


def test_a_websocket_handshake_on_another_route_is_a_405(server: ServerProcess) -> None:
    head = "GET /v1/messages HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), 10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 405 ")


@pytest.mark.slow
def test_a_background_response_survives_a_kill_and_is_private_to_its_key(tmp_path: Path) -> None:
    keys = ("--api-key", "mine", "--api-key", "other")
    flags = ("--threads", "1", "--state-dir", str(tmp_path / "state"), *keys)
    mine, others = (httpx.Client(headers={"X-Api-Key": key}, timeout=60) for key in keys[1::2])
    with running_server(*flags) as server:
        url = f"{server.url}/v1/responses"
        undisturbed = mine.post(url, json=LONG).json()["output"][0]["content"]
        named = {"input": [message("msg_of_another_server", COUNT["input"])]}
        stored = mine.post(url, json=COUNT | {"store": True} | named).json()
        id = mine.post(url, json=LONG | {"background": True}).json()["id"]
        eventually(lambda: bool(mine.get(f"{url}/{id}").json()["output"]))
        assert mine.get(f"{url}/{id}").json()["status"] == "in_progress"
        engine = server.engine_pid
        server.stop(signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{engine}").exists())
    with running_server(*flags) as server:
        url = f"{server.url}/v1/responses"
        assert mine.get(f"{url}/{stored['id']}").json() == stored
        rest = mine.get(f"{url}/{id}?stream=true&starting_after=3").text
        last = json.loads(rest.split("data: ")[-1])["response"]
        assert last == mine.get(f"{url}/{id}").json()
        assert last["status"] == "incomplete" and last["output"][0]["content"] == undisturbed
        more = {"input": "And?", "previous_response_id": stored["id"], "max_output_tokens": 1}
        assert [who.post(url, json=more).status_code for who in (mine, others)] == [200, 404]
        refer = {"input": [{"type": "item_reference", "id": "msg_of_another_server"}]}
        answers = [who.post(url, json=refer | {"max_output_tokens": 1}) for who in (mine, others)]
        ignored = [answer.headers.get("x-headrace-ignored") for answer in answers]
        assert ignored == [None, "input[0]"]
        assert others.get(f"{url}/{id}").status_code == 404
        assert others.delete(f"{url}/{id}").status_code == 404
