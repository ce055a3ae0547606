"""The requests of a run's clients, and an undisturbed server's answers."""

import random
from typing import Any

import httpx
import msgspec

from stress.frames import Said, said_in_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECOND = "second"
GREEDY: dict[str, Any] = {"temperature": 0}


class Question(msgspec.Struct, frozen=True):
    route: str
    body: dict[str, Any]
    said: Said

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.said.tokens.values()))


def make_catalog(url: str, seed: int, models: int = 1, long_prompt: int = 0) -> list[Question]:
    """Send the questions one by one to a server that nobody disturbs; return questions and answers.

    With 2 `models`, every second question goes to the model SECOND. If `long_prompt` is set, four
    more questions have prompts of this many letters.
    """
    rng = random.Random(f"{seed}/catalog")
    with httpx.Client(base_url=url, timeout=300) as client:
        questions = [
            ask_undisturbed(client, route, body | ({"model": SECOND} if i % models else {}))
            for i, (route, body) in enumerate(_bodies(rng, long_prompt))
        ]
        stopped = [q for q in (questions[0], questions[3]) if _middle(q)]
        questions += [
            ask_undisturbed(client, q.route, q.body | {"stop": _middle(q), "ignore_eos": True})
            for q in stopped
        ]
    return questions


def _bodies(rng: random.Random, long_prompt: int) -> list[tuple[str, dict[str, Any]]]:
    def text(length: int, num_tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
        return TEXT, {"prompt": _letters(rng, length), "max_tokens": num_tokens} | more

    def chat(length: int, num_tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
        messages = [{"role": "user", "content": _letters(rng, length)}]
        return CHAT, {"messages": messages, "max_tokens": num_tokens} | more

    def dice(**more: Any) -> dict[str, Any]:
        return {"temperature": 0.9, "seed": rng.randrange(1 << 30)} | more

    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    bodies = [
        text(20, 120, **GREEDY),
        text(1500, 40, return_progress=True, **GREEDY),
        text(40, 50, n=3, **dice()),
        chat(30, 80, **GREEDY),
        chat(700, 40, return_progress=True, **dice(n=2)),
        text(8, 4, **GREEDY),
        text(60, 80, **dice(**penalties)),
        text(10, 250, **GREEDY),
        chat(300, 60, **dice(ignore_eos=False)),
        text(100, 30, logprobs=2, **GREEDY),
    ]
    if long_prompt:
        bodies += [
            text(long_prompt, 60, return_progress=True, **GREEDY),
            chat(long_prompt, 60, return_progress=True, **dice()),
            chat(long_prompt, 30, **GREEDY),
            text(long_prompt, 20, **dice(n=2)),
        ]
    return bodies


def ask_undisturbed(client: httpx.Client, route: str, body: dict[str, Any]) -> Question:
    """Return a question with the answer of an undisturbed server."""
    body = {"ignore_eos": True, "return_token_ids": True} | body
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return Question(route, body, said_in_body(answer.json()))


def _middle(question: Question) -> str:
    """Return two characters from the second half of the answer, to be used as a stop string.

    Return an empty string if no two characters there are suitable.
    """
    said = question.said.texts[0]
    plain = [i for i in range(len(said) // 2, len(said) - 2) if said[i : i + 2].isprintable()]
    plain = [i for i in plain if "\ufffd" not in said[i : i + 2] and said[i : i + 2].strip()]
    return said[plain[0] : plain[0] + 2] if plain else ""


def _letters(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz     ,.") for _ in range(length))
