"""Tests of OpenAI's Responses API over a WebSocket on a real server."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

Event = dict[str, Any]
COUNT = {"input": "Count from 1 to 5.", "temperature": 0}
LONG = {"input": "Tell a story.", "temperature": 0, "ignore_eos": True, "max_output_tokens": 400}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--heartbeat-s", "1", "--max-body-bytes", "65536") as running:
        yield running


class Socket:
    """A client that reads one event per message."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, **body: Any) -> None:
        self.connection.send(json.dumps({"type": "response.create"} | body))

    def next(self) -> Event:
        event: Event = json.loads(self.connection.recv(timeout=60))
        return event

    def events(self) -> list[Event]:
        """Return the events up to the end of a response."""
        found = [self.next()]
        while found[-1]["type"] not in ENDS:
            found.append(self.next())
        return found

    def ask(self, **body: Any) -> Event:
        """Send a message and return its response, or the error."""
        self.send(**body)
        return result(self.events())

    def until(self, kind: str) -> Event:
        while (event := self.next())["type"] != kind:
            pass
        return event


@contextlib.contextmanager
def open_socket(server: ServerProcess, **headers: str) -> Iterator[Socket]:
    url = server.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers=headers, compression=None) as connection:
        yield Socket(connection)


def result(events: list[Event]) -> Event:
    shown: Event = events[-1].get("response", events[-1])
    return shown


def text_of(response: Event) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def running(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.url}/manage/state").json()["running"])


def test_a_message_gets_the_same_events_as_a_post(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        for body in (COUNT, COUNT | {"store": True}, COUNT | {"stream": False}):
            socket.send(**body)
            events = socket.events()
            assert [it["sequence_number"] for it in events] == list(range(len(events)))
            streamed = httpx.get(
                f"{server.url}/v1/responses/{result(events)['id']}", params={"stream": "true"}
            )
            frames = streamed.text.split("\n\n")[:-1]
            assert [json.loads(frame.split("data: ")[1]) for frame in frames] == events


def test_an_unstored_response_can_be_continued_on_its_own_connection(
    server: ServerProcess,
) -> None:
    more = {"input": "And then?", "temperature": 0}
    with open_socket(server) as socket, open_socket(server) as other:
        first = socket.ask(**COUNT, store=False)
        second = socket.ask(**more, store=False, previous_response_id=first["id"])
        past = [{"role": "user", "content": COUNT["input"]}, *first["output"]]
        whole = other.ask(input=[*past, {"role": "user", "content": more["input"]}], temperature=0)
        assert text_of(second) == text_of(whole)
        assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        stored = other.ask(**more, previous_response_id=whole["id"])
        assert socket.ask(**more, previous_response_id=stored["id"])["status"] == "completed"
    place = f"{server.url}/v1/responses/{second['id']}"
    eventually(lambda: httpx.get(place).status_code == 404, within_s=10)
    with open_socket(server) as socket:
        error = socket.ask(**more, previous_response_id=second["id"])
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert socket.ask(**COUNT)["status"] == "completed"


def test_a_warm_up_computes_the_prompt_and_can_be_continued(server: ServerProcess) -> None:
    words = {"instructions": "Be very brief, and answer in English only.", "temperature": 0}
    with open_socket(server) as socket:
        socket.send(input="Hello.", **words, generate=False, store=False)
        events = socket.events()
        kinds = ["response.created", "response.in_progress", "response.completed"]
        assert [it["type"] for it in events] == kinds
        warm = result(events)
        assert (warm["output"], warm["status"]) == ([], "completed")
        assert warm["usage"]["output_tokens"] == 0 < warm["usage"]["input_tokens"]
        continued = socket.ask(input="What is 2 + 3?", **words, previous_response_id=warm["id"])
        assert continued["status"] == "completed" and text_of(continued)


def test_messages_are_answered_in_order_and_the_queue_is_limited(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        socket.send(**LONG)
        socket.until("response.output_text.delta")
        for number in range(20):
            socket.send(input=f"{number}", max_output_tokens=2, ignore_eos=True)
        errors, ends = 0, []
        while errors + len(ends) < 21:
            event = socket.next()
            errors += event["type"] == "error"
            ends += [event["response"]["usage"]] if event["type"] == "response.incomplete" else []
        # The server may start to answer before the last message is sent.
        assert 0 < errors <= 4 and ends[0]["output_tokens"] == 400
        assert all(usage["output_tokens"] == 2 for usage in ends[1:])


def test_the_websocket_stays_usable_after_every_error(server: ServerProcess) -> None:
    bad: list[tuple[str | bytes, int, str]] = [
        ("{", 400, "invalid_json"),
        ("[1]", 400, "invalid_json"),
        (b"\x00", 400, "invalid_json"),
        ('{"type": "response.create"}', 400, "missing_required_parameter"),
        ('{"type": "response.dance", "input": "x"}', 400, "invalid_value"),
        ('{"input": "x"}', 400, "invalid_value"),
        ('{"type": 5, "input": "x"}', 400, "invalid_type"),
        ('{"type": "response.create", "input": 5}', 400, "invalid_type"),
        ('{"type": "response.create", "input": "x", "model": "y"}', 404, "model_not_found"),
        ('{"type": "response.create", "input": "x", "generate": 3}', 400, "invalid_type"),
        ('{"type": "response.create", "input": ' + "[" * 5000, 400, "invalid_json"),
    ]
    with open_socket(server) as socket:
        for message, status, code in bad:
            socket.connection.send(message)
            event = socket.next()
            assert (event["type"], event["status"], event["code"]) == ("error", status, code)
            assert event["error"]["code"] == code and event["error"]["message"], message
        assert socket.ask(**COUNT)["status"] == "completed"
    assert 'reason="invalid_json"' in httpx.get(f"{server.url}/metrics").text


def test_an_engine_kill_loses_no_text_and_the_websocket_sends_keepalives(
    server: ServerProcess,
) -> None:
    with open_socket(server) as socket:
        whole = text_of(socket.ask(**LONG))
        socket.send(**LONG, return_progress=True)
        socket.until("response.output_text.delta")
        server.kill_engine()
        events = socket.events()
    assert "keepalive" in [it["type"] for it in events]
    assert result(events)["status"] == "incomplete" and text_of(result(events)) == whole


def test_streams_with_ids_survive_an_engine_kill_and_a_lost_websocket(
    server: ServerProcess,
) -> None:
    alone = httpx.post(f"{server.url}/v1/responses", json=LONG, timeout=60).json()
    events: dict[str | None, list[Event]] = {None: [], "a": [], "b": []}

    def read_until(is_complete: Callable[[set[str]], bool], *ids: str | None) -> None:
        while not all(is_complete({it["type"] for it in events[id]}) for id in ids):
            event = socket.next()
            events[event.get("stream_id")].append(event)

    with open_socket(server) as socket:
        socket.send(**LONG)
        socket.send(**LONG, stream_id="a")
        socket.send(**COUNT, stream_id="a")
        socket.send(**LONG | {"max_output_tokens": 900, "store": True}, stream_id="b")
        read_until(lambda kinds: "response.output_text.delta" in kinds, *events)
        server.kill_engine()
        read_until(lambda kinds: "response.completed" in kinds, "a")
        read_until(lambda kinds: "response.incomplete" in kinds, None, "a")
    kinds = [it["type"] for it in events["a"]]
    ended = kinds.index("response.incomplete")
    assert text_of(events["a"][ended]["response"]) == text_of(alone)
    assert text_of(result(events[None])) == text_of(alone)
    # The second message with this id waited for the end of the first response.
    assert ended < kinds.index("response.created", 1)
    assert text_of(result(events["a"])) == "1, 2, 3, 4, 5"
    # After the connection is lost, the last sequence number is the cursor.
    numbers = [it["sequence_number"] for it in events["b"] if it["type"] != "keepalive"]
    path = f"{server.url}/v1/responses/{events['b'][0]['response']['id']}"
    query = {"stream": "true", "starting_after": str(numbers[-1])}
    for line in httpx.get(path, params=query, timeout=60).text.splitlines():
        if line.startswith("data: ") and '"keepalive"' not in line:
            events["b"].append(json.loads(line[6:]))
            numbers.append(events["b"][-1]["sequence_number"])
    assert numbers == list(range(len(numbers)))
    deltas = [it["delta"] for it in events["b"] if it["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(result(events["b"]))


def test_a_websocket_runs_at_most_16_streams(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        for number in range(17):
            socket.send(**LONG, stream_id=str(number))
        while (event := socket.next())["type"] != "error":
            pass
        assert (event["stream_id"], event["code"]) == ("16", "server_overloaded")
        for wrong in ("", 7):
            socket.send(**COUNT, stream_id=wrong)
            assert socket.until("error")["param"] == "stream_id"
    eventually(lambda: running(server) == 0, within_s=60)


def test_a_disconnected_client_reads_the_rest_by_response_id(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        whole = text_of(socket.ask(**LONG))
        socket.send(**LONG, store=True)
        id = socket.until("response.created")["response"]["id"]
        last = socket.until("response.output_text.delta")["sequence_number"]
        socket.connection.close_socket()
    query: dict[str, Any] = {"stream": "true", "starting_after": last}
    rest = httpx.get(f"{server.url}/v1/responses/{id}", params=query, timeout=60).text
    events = [json.loads(frame.split("data: ")[1]) for frame in rest.split("\n\n")[:-1]]
    assert events[0]["sequence_number"] == last + 1 and text_of(result(events)) == whole


def test_a_disconnect_cancels_unstored_responses(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        socket.send(**LONG | {"max_output_tokens": 4000}, store=False)
        socket.send(**LONG | {"max_output_tokens": 4000}, store=False)
        socket.until("response.output_text.delta")
        eventually(lambda: running(server) == 1)
    eventually(lambda: running(server) == 0, within_s=30)


def test_an_unstored_response_is_gone_after_an_early_disconnect(
    server: ServerProcess,
) -> None:
    with open_socket(server) as socket:
        socket.send(**LONG, store=False)
        id = socket.until("response.created")["response"]["id"]
        socket.until("response.output_text.delta")
    url = f"{server.url}/v1/responses/{id}"
    eventually(lambda: httpx.get(url).status_code == 404, within_s=30)


def test_the_openai_package_connects(server: ServerProcess) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    with client.responses.connect() as connection:
        connection.response.create(
            model="headrace-mini", input="Count from 1 to 5.", stream_id="mine"
        )
        for event in connection:
            assert event.stream_id == "mine"
            if event.type == "response.completed":
                break
        assert event.response.output_text


@pytest.mark.slow
def test_a_foreign_origin_and_a_wrong_api_key_are_refused() -> None:
    with running_server("--api-key", "sesame", "--api-key", "poppy") as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer open"}, 401),
            ({"Authorization": "Bearer sesame", "Origin": "https://evil.example"}, 403),
        ):
            with pytest.raises(InvalidStatus) as refused, open_socket(server, **headers):
                pass
            assert refused.value.response.status_code == status
        with open_socket(server, Authorization="Bearer sesame") as socket:
            ids = [socket.ask(**COUNT, store=stored)["id"] for stored in (False, True)]
            with open_socket(server, Authorization="Bearer poppy") as other:
                for id in ids:
                    error = other.ask(input="And?", previous_response_id=id)
                    assert error["code"] == "previous_response_not_found"
            socket.send(**LONG | {"max_output_tokens": 4000})
            socket.until("response.output_text.delta")
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    socket.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert server.stop() == 0


def test_a_conversation_outlives_the_websocket_of_an_unstored_response(
    server: ServerProcess,
) -> None:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        id = client.post("/conversations", json={}).json()["id"]
        with open_socket(server) as socket:
            assert socket.ask(**COUNT, conversation=id, store=False)["conversation"] == {"id": id}
        with open_socket(server) as socket:
            socket.ask(**COUNT, conversation=id, store=False)
        assert len(client.get(f"/conversations/{id}/items").json()["data"]) == 4


def test_a_conversation_is_limited_to_the_maximum_body_size(server: ServerProcess) -> None:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        id = client.post("/conversations", json={}).json()["id"]
        url = f"/conversations/{id}/items"
        item = {"type": "message", "role": "user", "content": "x" * 19_600}
        added = [client.post(url, json={"items": [item]}) for _ in range(4)]
        assert [answer.status_code for answer in added] == [200, 200, 200, 413]
        first = client.get(url, params={"order": "asc"}).json()["data"][0]
        client.delete(f"{url}/{first['id']}")
        assert len(client.get(url).json()["data"]) == 2
