"""Tests of a template that has no system role and requires alternating roles, in every dialect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import LLM
from tests.text.strict_templates import GEMMA
from tools.harness.servers import ServerProcess, running_server

HEADER = "x-headrace-messages-changed"
SYSTEM = {"role": "system", "content": "Be brief, whatever they say."}
USER = {"role": "user", "content": "How does a water mill work?"}
AGAIN = {"role": "user", "content": "And a windmill?"}
MESSAGES = [SYSTEM, USER, AGAIN]
BODY: dict[str, Any] = {"model": "headrace-mini", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("strict") / "gemma.jinja"
    file.write_text(GEMMA)
    return file


@pytest.fixture(scope="module")
def server(template: Path) -> Iterator[ServerProcess]:
    with running_server("headrace-mini", "--threads", "1", "--chat-template", str(template)) as it:
        yield it


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}{path}", json=BODY | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_chat_apply_template_and_tokenize_agree_on_the_prompt(
    server: ServerProcess, template: Path
) -> None:
    shown = post(server, "/apply-template", messages=MESSAGES).json()["prompt"]
    assert "Be brief, whatever they say.\n\nHow does" in shown
    listed = post(server, "/tokenize", messages=MESSAGES).json()["tokens"]
    assert post(server, "/tokenize", content=shown).json()["tokens"] == listed
    chat = post(server, "/v1/chat/completions", messages=MESSAGES, return_token_ids=True)
    assert chat.json()["prompt_token_ids"] == listed
    assert chat.headers[HEADER] == "system into user, same role"
    with LLM.load("headrace-mini", threads=1, chat_template=str(template)) as llm:
        alone = llm.chat(MESSAGES, temperature=0, max_tokens=8)
    assert alone.text == chat.json()["choices"][0]["message"]["content"]
    assert alone.usage["prompt_tokens"] == len(listed)


def test_every_dialect_reports_changed_messages_in_a_header(server: ServerProcess) -> None:
    chat = post(server, "/v1/chat/completions", messages=[SYSTEM, USER], stream=True)
    asked = {"messages": [USER], "system": SYSTEM["content"]}
    message = post(server, "/v1/messages", **asked)
    counted = post(server, "/v1/messages/count_tokens", **asked).json()["input_tokens"]
    usage = message.json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    words = {"instructions": SYSTEM["content"], "input": USER["content"]}
    response = post(server, "/v1/responses", **words)
    assert response.json()["usage"]["input_tokens"] == counted
    ollama = post(server, "/api/chat", messages=[SYSTEM, USER], stream=False)
    assert ollama.json()["prompt_eval_count"] == counted
    for answer in (chat, message, response, ollama):
        assert answer.headers[HEADER] == "system into user"
    assert HEADER not in post(server, "/v1/chat/completions", messages=[USER]).headers


def test_the_next_turn_reuses_the_cached_prompt(server: ServerProcess) -> None:
    long = {"role": "system", "content": "The mill has a wheel, a race and a stone. " * 40}
    first = post(server, "/v1/chat/completions", messages=[long, USER]).json()
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    usage = post(server, "/v1/chat/completions", messages=[long, USER, answer, AGAIN]).json()[
        "usage"
    ]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * first["usage"]["prompt_tokens"]


def test_a_batch_line_is_answered(server: ServerProcess) -> None:
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": BODY | {"messages": MESSAGES},
    }
    data = {"purpose": "batch"}
    files = {"file": ("lines.jsonl", json.dumps(line).encode())}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        file = client.post("/v1/files", data=data, files=files).json()
        asked = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
