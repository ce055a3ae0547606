"""Seeded random requests of all kinds, and the parts of their answers that must be equal."""

import asyncio
import json
from random import Random
from typing import Any, NamedTuple

import httpx

from tests.e2e.test_image_chats import chat, picture, url
from tools.harness.sse import data_in

PHRASES = (
    "water over the wheel of the mill, ",
    "one two three four, one two three four, ",
    "the miller took the sack and the sack took the miller, ",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "the_name_of_it": {"enum": ["water", "wheel"]},
        "the_number_of_them": {"type": "integer", "minimum": 0, "maximum": 999},
        "is_it_at_the_mill": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
TOOL = {"type": "function", "function": {"name": "turn_the_wheel", "parameters": SCHEMA}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LIMIT_S = 280


class Made(NamedTuple):
    """A request. If `is_cut`, its client drops the connection halfway and resumes the stream."""

    kind: str
    route: str
    body: dict[str, Any]
    is_cut: bool = False


def made_requests(seed: int, number: int, sees: bool) -> list[Made]:
    """Return `number` requests, the same number of each kind, with random fields."""
    rng = Random(seed)
    makers = [_plain, _choices, _penalized, _in_grammar, _calling, _stopped, _cut]
    if sees:
        makers += [_seeing, _seeing]
    return [makers[place % len(makers)](rng) for place in range(number)]


def _prompt(rng: Random) -> str:
    return f"{rng.randrange(1000)}: " + rng.choice(PHRASES) * rng.randint(1, 5)


def _common(rng: Random) -> dict[str, Any]:
    drawn = {"temperature": rng.choice([0, 0, 0, 0.5, 1]), "seed": rng.randrange(1 << 31)}
    if rng.random() < 0.3:
        drawn |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    return drawn | {"max_tokens": rng.randint(8, 60), "ignore_eos": rng.random() < 0.8}


def _plain(rng: Random, **more: Any) -> Made:
    body = {"prompt": _prompt(rng), **_common(rng), "logprobs": rng.randint(0, 3), **more}
    return Made("plain", COMPLETIONS, body)


def _choices(rng: Random) -> Made:
    return _plain(rng, n=rng.randint(2, 4))._replace(kind="choices")


def _penalized(rng: Random) -> Made:
    penalties = [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"logit_bias": {"100": 4.0, "7": -3.0}, "min_tokens": 5},
    ]
    return _plain(rng, **rng.choice(penalties))._replace(kind="penalties")


def _in_grammar(rng: Random) -> Made:
    more = {"guided_json": SCHEMA, "ignore_eos": False, "max_tokens": 90}
    return _plain(rng, **more)._replace(kind="grammar")


def _calling(rng: Random) -> Made:
    body = {
        "messages": [{"role": "user", "content": _prompt(rng)}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **_common(rng),
        "max_tokens": 150,
        "ignore_eos": False,
        "logprobs": True,
        "top_logprobs": 2,
    }
    return Made("tools", CHATS, body)


def _stopped(rng: Random) -> Made:
    return _plain(rng, stop=rng.sample(["th", "ee", "wh", "a", "\n"], 2))._replace(kind="stop")


def _cut(rng: Random) -> Made:
    made = _plain(rng, stream=True, n=rng.choice([1, 1, 2]))
    return made._replace(kind="cut", is_cut=True)


def _seeing(rng: Random) -> Made:
    images = [url(picture(rng.randrange(20), size=(64, 48))) for _ in range(rng.randint(1, 2))]
    asked = {"logprobs": True, "top_logprobs": 1}
    return Made("images", CHATS, chat(*images, text=_prompt(rng), **_common(rng), **asked))


class Answered(NamedTuple):
    choices: Any  # as JSON, without the ids of tool calls, which are random
    num_accepted: int = 0  # accepted draft tokens


async def answer(client: httpx.AsyncClient, made: Made, name: str) -> Answered:
    """Send the request; `name` must be unique on this server."""
    if made.is_cut:
        return Answered(_joined(await _resumed(client, made, name)))
    shown = (await client.post(made.route, json=made.body)).raise_for_status().json()
    for choice in shown["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    return Answered(shown["choices"], shown["timings"].get("draft_n_accepted", 0))


async def _resumed(client: httpx.AsyncClient, made: Made, name: str) -> bytes:
    """Read 512 bytes of the stream, then resume it over a second connection."""
    got = b""
    headers = {"X-Conversation-Id": name}
    async with client.stream("POST", made.route, json=made.body, headers=headers) as answer:
        answer.raise_for_status()
        async for piece in answer.aiter_raw():
            got += piece
            if len(got) > 512:
                break
    rest = await client.get("/v1/stream", params={"conv_id": name, "from": len(got)})
    return got + rest.raise_for_status().content


def _joined(body: bytes) -> list[dict[str, Any]]:
    """Join a stream's chunks into choices, so that the number of tokens per chunk is irrelevant."""
    choices: dict[int, dict[str, Any]] = {}
    for data in data_in(body.decode()):
        for part in data.get("choices", ()):
            whole = choices.setdefault(part["index"], {"text": "", "finish_reason": None})
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
            for key, values in (part.get("logprobs") or {}).items():
                whole.setdefault(key, []).extend(values)
    return [choices[index] for index in sorted(choices)]


async def answer_all(
    server_url: str, asked: list[Made], at_once: int, kill: Any = None, every: int = 0
) -> list[Answered]:
    """Return all answers in order; call `kill` after every `every`-th answer."""
    places, done = asyncio.Semaphore(at_once), 0
    async with httpx.AsyncClient(base_url=server_url, timeout=LIMIT_S) as client:

        async def one(number: int, made: Made) -> Answered:
            nonlocal done
            async with places:
                answered = await answer(client, made, f"made-{number}")
            done += 1
            if every and done % every == 0 and done < len(asked):
                kill()
            return answered

        return await asyncio.gather(*(one(n, made) for n, made in enumerate(asked)))


def first_difference(made: Made, found: Any, expected: Any) -> str:
    """Describe where two answers differ; pytest's own message would be pages long."""
    ours, theirs = (json.dumps(it, indent=1).splitlines() for it in (found, expected))
    pairs = zip(ours, theirs, strict=False)
    lines = next((f"{one} is not {other}" for one, other in pairs if one != other), "the length")
    return f"{made.kind} {json.dumps(made.body)[:300]}: {lines}"
