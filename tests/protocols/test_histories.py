"""Tests that histories of other providers are accepted and keep all their text.

`make test-histories HISTORIES=2000 SEED=7` tests more histories, from another seed.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from websockets.sync.client import ClientConnection, connect

from headrace.fleet.served_model import ServedModel
from headrace.protocols.prompt_ids import render
from headrace.protocols.worker import Jobs
from headrace_common.config.settings import ModelConfig
from headrace_common.request import Chat
from headrace_common.worker_jobs import (
    CheckedBody,
    ContinueResponse,
    CountTokens,
    EncodePrompts,
    ListInput,
    ReadBody,
    TokenCount,
)
from tests.text.strict_templates import GEMMA
from tools.harness.histories import History, history
from tools.harness.servers import ServerProcess, running_server

Json = dict[str, Any]
COUNT, FIRST = int(os.environ.get("HISTORIES", "300")), int(os.environ.get("SEED", "1"))
MODEL = ServedModel(ModelConfig())
WORKER = Jobs(MODEL)
COUNTING = {
    "/v1/messages": "/v1/messages/count_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ok"}]}
SEEDS = range(FIRST * 100_000, FIRST * 100_000 + COUNT)


def read(case: History) -> CheckedBody:
    return WORKER.do(ReadBody(case.route), json.dumps(case.body).encode())  # type: ignore


def chat_of(checked: CheckedBody) -> Chat:
    (chat,) = msgspec.msgpack.decode(checked.packed, type=tuple[Chat])
    return chat


def as_stored(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item as clients receive it: with a type, an id and its text as a part."""
    item = {name: value for name, value in item.items() if name != "id" or value is not None}
    if "type" not in item:
        item = {"type": "message" if "role" in item else "item_reference"} | item
    if item["type"] != "message" or not isinstance(item["content"], str):
        return item
    part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
    if item["role"] == "assistant":
        part |= {"type": "output_text", "annotations": []}
    return item | {"content": [part]}


def listed(kept: bytes) -> list[dict[str, Any]]:
    page = WORKER.do(ListInput("resp_1", 1000, True, ""), kept)
    found: list[dict[str, Any]] = json.loads(page)["data"]  # type: ignore[arg-type]
    return found


def test_every_history_is_accepted_and_all_its_text_reaches_the_prompt(tmp_path: Path) -> None:
    strict = tmp_path / "gemma.jinja"
    strict.write_text(GEMMA)  # no system message, no tools, no two turns of one role
    models = MODEL, ServedModel(ModelConfig(chat_template=str(strict)))
    for seed in SEEDS:
        case = history(seed)
        chat = chat_of(read(case))
        for model in models:
            prompt = render(model, chat, contextlib.nullcontext).text
            missing = [text for text in case.texts if text not in prompt]
            assert not missing, (seed, case.route)


def test_a_new_turn_leaves_the_prompt_of_earlier_turns_as_it_was() -> None:
    num_compared = 0
    for case in map(history, SEEDS):
        field = "input" if "input" in case.body else "messages"
        *earlier, last = case.body[field]
        # The newest message of the user stands behind a summary until an item follows.
        if not earlier or earlier[-1].get("type") == "compaction":
            continue
        begun, whole = (
            msgspec.structs.replace(
                chat_of(read(case._replace(body=case.body | {field: items}))),
                add_generation_prompt=False,
                continue_final_message=False,
            )
            for items in (earlier, [*earlier, last])
        )
        # Messages that follow each other in the role of the user are joined. Summaries and results
        # without a call are such messages, too.
        if case.route == "/v1/messages" and begun.messages[-1]["role"] != "assistant":
            continue
        # An empty message stands for items that the model does not see.
        if begun.messages[-1] == {"role": "user", "content": ""}:
            continue
        shown = render(MODEL, whole, contextlib.nullcontext).text
        assert shown.startswith(render(MODEL, begun, contextlib.nullcontext).text), case.body
        num_compared += 1
    assert num_compared > COUNT // 4


def test_assigned_ids_keep_each_output_with_its_call() -> None:
    for case in map(history, SEEDS):
        if case.route != "/v1/responses":
            continue
        items = case.body["input"]
        named = [item | {"id": item.get("id") or f"item_{n}"} for n, item in enumerate(items)]
        sent, kept = (
            render(MODEL, chat_of(read(case._replace(body=body))), contextlib.nullcontext).text
            for body in (case.body, case.body | {"input": named})
        )
        assert sent == kept, case.body


def test_the_tokens_of_every_history_can_be_counted_before_it_is_sent() -> None:
    for case in filter(lambda case: case.route == "/v1/messages", map(history, SEEDS)):
        body = {k: v for k, v in case.body.items() if k != "max_tokens"}
        checked = read(case)
        (packed,) = WORKER.do(EncodePrompts(1 << 30), checked.packed).prompts  # type: ignore
        counted = WORKER.do(CountTokens(), json.dumps(body).encode())
        assert counted == TokenCount(len(packed) // 4, checked.ignored), case.body


def test_stored_items_are_listed_as_sent_and_continue_like_a_whole_history() -> None:
    for seed in SEEDS:
        case = history(seed)
        if case.route != "/v1/responses":
            continue
        first = read(case)
        for given, found in zip(case.body["input"], listed(first.kept), strict=True):
            assert as_stored(given).items() <= found.items(), seed
        more = [{"role": "user", "content": "More."}]
        asked = {"input": more, "previous_response_id": "resp_1"}
        packed = (first.kept, json.dumps([SAID]).encode(), read(History(case.route, asked, ())), {})
        goes_on = WORKER.do(ContinueResponse(), msgspec.msgpack.encode(packed))
        whole = read(History(case.route, {"input": [*case.body["input"], SAID, *more]}, ()))
        assert chat_of(goes_on).messages == chat_of(whole).messages, seed  # type: ignore[arg-type]


class Asker:
    """Sends a part of the bodies of /v1/responses over a WebSocket."""

    def __init__(self, client: httpx.Client, socket: ClientConnection) -> None:
        self._client = client
        self._socket = socket
        # The header of the last answer that did not come over the socket.
        self.ignored: str | None = None

    def ask(self, case: History, over_socket: bool) -> Json | None:
        """Return the answer, or None if the request is too hard for the small model."""
        if over_socket:
            self._socket.send(json.dumps({"type": "response.create"} | case.body))
            event: Json = {}
            while event.get("type", "keepalive") not in ENDS:
                event = json.loads(self._socket.recv(timeout=120))
            status, found = event.get("status", 200), event.get("response", event)
        else:
            answer = self._client.post(case.route, json=case.body, timeout=120)
            status, found = answer.status_code, answer.json()
            self.ignored = answer.headers.get("x-headrace-ignored")
        text = json.dumps(found)
        if any(refusal in text for refusal in TOO_HARD):
            return None
        assert status == 200 and found.get("status") != "failed", (case.body, text)
        return found

    def compact(self, case: History) -> None:
        """Compact a conversation, and continue it from its summary."""
        whole = self.ask(case._replace(route="/v1/responses/compact"), over_socket=False)
        if whole is not None:
            assert whole["output"][-1]["type"] == "compaction"
            items = [*whole["output"], {"role": "user", "content": "More."}]
            self.ask(case._replace(body={"input": items, "max_output_tokens": 1}), True)


TOO_HARD = (
    *("context_length_exceeded", "prompt is too"),
    *("The model wrote no summary", "The summary was cut off"),
)
BRIEF = {"max_output_tokens": 1}
# Maximum number of items that one request adds to a conversation.
MAX_ADDED = 20
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--threads", "1") as running:
        yield running


@contextlib.contextmanager
def connected(server: ServerProcess) -> Iterator[tuple[httpx.Client, Asker]]:
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        connect(
            server.url.replace("http", "ws") + "/v1/responses",
            compression=None,
            max_size=None,
            ping_interval=None,
        ) as socket,
    ):
        yield client, Asker(client, socket)


@pytest.mark.timeout(600)
def test_a_server_answers_and_stores_every_history(server: ServerProcess) -> None:
    with connected(server) as (client, sender):
        for seed in SEEDS[: max(24, COUNT // 10)]:
            case = history(seed)
            is_response = case.route == "/v1/responses"
            over_socket = is_response and seed % 2 == 0
            answer = sender.ask(case, over_socket)
            if case.route in COUNTING and answer is not None and not over_socket:
                counted = client.post(COUNTING[case.route], json=case.body)
                assert counted.headers.get("x-headrace-ignored") == sender.ignored, seed
            if is_response and seed % 16 == 0:
                sender.compact(case)
            if not is_response or answer is None or case.body.get("store") is False:
                continue
            path = f"/v1/responses/{answer['id']}/input_items"
            page = client.get(path, params={"limit": 100, "order": "asc"}).json()["data"]
            for given, found in zip(case.body["input"], page, strict=True):
                assert as_stored(given).items() <= found.items(), seed
            more = {"input": "More.", "previous_response_id": answer["id"], "max_output_tokens": 1}
            sender.ask(case._replace(body=more), over_socket=seed % 3 == 0)


def in_conversation(client: httpx.Client, items: list[Json]) -> Json:
    """Return the field that names a new conversation with these items."""
    id = client.post("/v1/conversations", json={}).raise_for_status().json()["id"]
    for start in range(0, len(items), MAX_ADDED):
        added = {"items": items[start : start + MAX_ADDED]}
        client.post(f"/v1/conversations/{id}/items", json=added).raise_for_status()
    return {"conversation": id}


def check_items(client: httpx.Client, id: str, items: list[Json]) -> None:
    """Assert that a conversation has these items."""
    path, query = f"/v1/conversations/{id}/items", {"limit": 100, "order": "asc"}
    page = client.get(path, params=query).json()["data"]
    assert len({item["id"] for item in page}) == len(page)
    for given, found in zip(items, page, strict=True):
        # An item whose id the conversation already has gets a new id.
        kept = {name: it for name, it in as_stored(given).items() if it is not None}
        assert (kept | {"id": found["id"]}).items() <= found.items(), given


@pytest.mark.timeout(600)
def test_a_continued_conversation_has_the_prompt_of_the_whole_history(
    server: ServerProcess,
) -> None:
    """Uses conversations for half of the histories and the WebSocket for the others."""
    cases = [case for case in map(history, SEEDS) if case.route == "/v1/responses"]
    num_compared = 0
    with connected(server) as (client, sender):
        for number, case in enumerate(cases[: max(12, COUNT // 20)]):
            items, is_conversation = case.body["input"], number % 2 == 0
            cut = Random(number).randrange(len(items))
            if is_conversation:
                whole, earlier = items[:cut], in_conversation(client, items[:cut])
            else:
                begun = sender.ask(case._replace(body=case.body | {"input": items[:cut]}), True)
                if begun is None:
                    continue
                earlier = {"previous_response_id": begun["id"]}
                whole = [*items[:cut], *begun["output"]]
            rest = case.body | {"input": items[cut:]} | earlier
            answer = sender.ask(case._replace(body=rest), over_socket=number % 4 != 0)
            if answer is None:
                continue
            whole = [*whole, *items[cut:], *answer["output"]]
            if is_conversation:
                check_items(client, earlier["conversation"], whole)
            else:
                earlier = {"previous_response_id": answer["id"]}
            more = {"input": [{"role": "user", "content": "More."}]}
            last = sender.ask(case._replace(body=more | earlier | BRIEF), over_socket=True)
            sent = {"input": [*whole, *more["input"]]}
            counted = client.post(COUNTING[case.route], json=sent).json()
            if last is not None:
                assert last["usage"]["input_tokens"] == counted["input_tokens"], case.body
                num_compared += 1
            if is_conversation and number % 8 == 0:
                sender.compact(case._replace(body=earlier))
    assert num_compared > COUNT // 40
