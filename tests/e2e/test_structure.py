"""Structured output over real HTTP: the official client's parse, and an engine that is killed."""

import json
import os
import signal
from typing import Any

import httpx
import openai
import pydantic

from tests.e2e.test_resume import engine_of
from tests.servers import ServerProcess

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 9},
    },
    "required": ["names"],
    "additionalProperties": False,
}
BODY = {
    "messages": [{"role": "user", "content": "Name some."}],
    "guided_json": SCHEMA,
    "temperature": 0,
    "max_tokens": 120,
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


def test_an_engine_killed_within_an_answer_leaves_its_form_and_its_text(
    server: ServerProcess,
) -> None:
    url = f"{server.url}/v1/chat/completions"
    undisturbed = httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["message"]["content"]
    kills = json.loads(os.environ.get("KILL_AFTER", "[7]"))  # make test-structure has them all
    for after in kills:
        texts = []
        with httpx.stream("POST", url, json=BODY | {"stream": True}, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    texts += [delta["content"]] if delta.get("content") else []
                    if len(texts) == after and delta.get("content"):
                        os.kill(engine_of(server), signal.SIGKILL)
        assert "".join(texts) == undisturbed and len(texts) > after, after
