"""Tests of structured output over HTTP with the openai client and during engine kills."""

import json
import os
from typing import Any

import httpx
import openai
import pydantic

from tools.harness.servers import ServerProcess
from tools.harness.sse import data_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 9},
    },
    "required": ["names"],
    "additionalProperties": False,
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name some."}],
    "guided_json": SCHEMA,
    "temperature": 0,
    "max_tokens": 60,
}


class Point(pydantic.BaseModel):
    x: bool
    y: bool


def test_the_official_client_parses_an_answer(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Where?"}]
    answer = client.chat.completions.parse(
        model="headrace-mini", messages=messages, response_format=Point, temperature=1
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


def tokens_with_kill(server: ServerProcess, after: int) -> tuple[list[int], int]:
    """Stream an answer and kill the engine once `after` tokens have arrived.

    Return all tokens, and how many had arrived when the stream reported the recovery. These may
    be a few more than `after`, because the engine runs ahead.
    """
    tokens: list[int] = []
    died_after = -1
    wanted = BODY | {"stream": True, "return_token_ids": True, "return_progress": True}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=wanted, timeout=120) as answer:
        for frame in data_of(answer.iter_lines()):
            assert "error" not in frame, frame
            died_after = len(tokens) if "recovering" in frame else died_after
            before = len(tokens)
            tokens += frame["choices"][0].get("token_ids", [])
            if before < after <= len(tokens):
                server.kill_engine()
    return tokens, died_after


def test_an_engine_kill_after_any_token_does_not_change_the_answer(
    server: ServerProcess,
) -> None:
    undisturbed, _ = tokens_with_kill(server, 0)
    assert len(undisturbed) == BODY["max_tokens"]
    kills = json.loads(os.environ.get("KILL_AFTER", "[7]"))  # make test-structure has all 60
    deaths = set()
    for after in kills:
        tokens, died_after = tokens_with_kill(server, after)
        assert tokens == undisturbed, (after, died_after)
        deaths.add(died_after)
    print(f"the engine's death was reported after {sorted(deaths)} tokens")
