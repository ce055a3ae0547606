"""Structured output over real HTTP: the official client's parse, and an engine that is killed."""

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


def heard(server: ServerProcess, after: int) -> tuple[list[int], int]:
    """The tokens of an answer whose engine is killed once so many have come, and how many had come
    when its death was told: a few more, for the engine runs ahead."""
    told: list[int] = []
    died_after = -1
    wanted = BODY | {"stream": True, "return_token_ids": True, "return_progress": True}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=wanted, timeout=120) as answer:
        for frame in data_of(answer.iter_lines()):
            assert "error" not in frame, frame
            died_after = len(told) if "recovering" in frame else died_after
            before = len(told)
            told += frame["choices"][0].get("token_ids", [])
            if before < after <= len(told):
                server.kill_engine()
    return told, died_after


def test_an_engine_killed_after_any_token_leaves_an_answers_form_and_its_text(
    server: ServerProcess,
) -> None:
    undisturbed, _ = heard(server, 0)
    assert len(undisturbed) == BODY["max_tokens"]
    kills = json.loads(os.environ.get("KILL_AFTER", "[7]"))  # make test-structure has all 60
    deaths = set()
    for after in kills:
        told, died_after = heard(server, after)
        assert told == undisturbed, (after, died_after)
        deaths.add(died_after)
    print(f"the engine's death was told after {sorted(deaths)} tokens")
