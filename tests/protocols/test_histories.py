"""Histories that began at another provider: none is refused, and none of their texts is lost.

`make test-histories HISTORIES=2000 SEED=7` tries more of them, and others.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

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
from tools.harness.servers import running_server

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
    """The item as clients get it back: with its type, an id, and with a text as a part."""
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


def test_no_history_is_refused_and_every_text_reaches_the_prompt(tmp_path: Path) -> None:
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
        if not earlier:
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
        shown = render(MODEL, whole, contextlib.nullcontext).text
        assert shown.startswith(render(MODEL, begun, contextlib.nullcontext).text), case.body
        num_compared += 1
    assert num_compared > COUNT // 4


def test_the_tokens_of_every_history_can_be_counted_before_it_is_sent() -> None:
    for case in filter(lambda case: case.route == "/v1/messages", map(history, SEEDS)):
        body = {k: v for k, v in case.body.items() if k != "max_tokens"}
        checked = read(case)
        (packed,) = WORKER.do(EncodePrompts(1 << 30), checked.packed).prompts  # type: ignore
        counted = WORKER.do(CountTokens(), json.dumps(body).encode())
        assert counted == TokenCount(len(packed) // 4, checked.ignored), case.body


def test_what_was_stored_comes_back_as_it_came_and_is_continued_as_if_it_were_sent_whole() -> None:
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


@pytest.mark.timeout(600)
def test_a_server_answers_and_stores_them() -> None:
    with running_server("--threads", "1") as server, httpx.Client(base_url=server.url) as client:
        for seed in SEEDS[: max(24, COUNT // 10)]:
            case = history(seed)
            answer = client.post(case.route, json=case.body, timeout=60)
            is_long = "context_length_exceeded" in answer.text or "prompt is too" in answer.text
            assert answer.status_code == 200 or is_long, (seed, answer.text)
            if case.route in COUNTING:
                counted = client.post(COUNTING[case.route], json=case.body, timeout=60)
                names = [it.headers.get("x-headrace-ignored") for it in (answer, counted)]
                assert is_long or names[0] == names[1], seed
            if case.route != "/v1/responses" or is_long or case.body.get("store") is False:
                continue
            path = f"/v1/responses/{answer.json()['id']}/input_items"
            page = client.get(path, params={"limit": 100, "order": "asc"}).json()["data"]
            for given, found in zip(case.body["input"], page, strict=True):
                assert as_stored(given).items() <= found.items(), seed
            asked = {"input": "More.", "previous_response_id": answer.json()["id"]}
            goes_on = client.post(case.route, json=asked | {"max_output_tokens": 1}, timeout=60)
            is_long = "context_length_exceeded" in goes_on.text
            assert goes_on.status_code == 200 or is_long, (seed, goes_on.text)
