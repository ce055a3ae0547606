"""Helpers that write batch lines and answer the same requests without a batch."""

import json
from typing import Any

import openai


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat_line(number: int, **fields: Any) -> dict[str, Any]:
    """Return a chat line whose question is unique to `number`."""
    body = {
        "model": "headrace-mini",
        "messages": [{"role": "user", "content": f"What is {number} + {number % 7}?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    return line(f"line-{number}", body | fields)


def in_lines(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(it).encode() + b"\n" for it in lines)


def results(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(it) for it in data.splitlines()]


def answers_alone(client: openai.OpenAI, lines: list[dict[str, Any]]) -> dict[str, str | None]:
    """Return the answers to the lines' chats, requested one after the other, by custom id."""
    found = {}
    for it in lines:
        body = {"seed": None, **it["body"]}
        known = {name: body.pop(name) for name in ("model", "messages")}
        answer = client.chat.completions.create(**known, extra_body=body)
        found[it["custom_id"]] = answer.choices[0].message.content
    return found
