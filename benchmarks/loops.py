"""Counts how many answers to everyday questions repeat themselves.

    python -m benchmarks.loops [--url http://127.0.0.1:8000] [-o repetition_penalty=1.1]

Each question is asked once, with a fixed seed and at most 400 tokens for the answer. An answer
loops if a sentence of three or more words, or a run of eight words, occurs three times. An answer
that reaches the limit also loops if such a repetition occurs twice.
"""

import argparse
import asyncio
import json
import re
from collections import Counter
from typing import Any

import httpx

_LIMIT, _RUN, _SENTENCE = 400, 8, 3
_SENTENCE_END = re.compile(r"[.!?:;]\s+|\n+")
_TOGETHER = 20
_PATIENCE_S = 900.0

QUESTIONS = """
How do I boil eggs so that the yolk stays soft?
What can I cook with rice, tomatoes and an onion?
Give me a recipe for pancakes.
How long should I bake a potato?
What is a good side dish for grilled fish?
How do I keep bread fresh?
Suggest three quick breakfasts.
How do I make vegetable soup?
What should I pack for a weekend in the mountains?
Plan one day in Paris for a family.
How can I sleep on a long flight?
What is the best season to visit Japan?
How do I find a cheap hotel?
Tell me three sights in Rome.
What should I do if I lose my passport abroad?
Is it better to travel by train or by car?
Write a short letter to my landlord about a broken heater.
Write a thank-you note to my aunt for a birthday present.
Write an email to my boss: I am ill and stay at home today.
Write an invitation to a garden party.
Write a polite complaint about a late delivery.
Write a short application for a job in a bakery.
Write a card for a colleague who retires.
Write a message that cancels a dentist appointment.
How do I remove a coffee stain from a shirt?
How do I change a bicycle tire?
How do I tie a tie?
How can I learn ten new words a day?
How do I water houseplants while I am away?
How do I clean a window without streaks?
How can I save electricity at home?
How do I choose a good password?
Hello! Who are you?
How are you today?
Tell me a joke.
What is your favorite color, and why?
I am bored. What can I do this evening?
What do you think about cats?
Tell me something interesting about the moon.
Explain how a water mill works, to a child of ten.
""".strip().splitlines()


def loops(answer: str, is_cut: bool) -> bool:
    """Return whether an answer repeats itself."""
    words = answer.lower().split()
    runs = Counter(tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1))
    sentences = Counter(
        it.strip() for it in _SENTENCE_END.split(answer.lower()) if len(it.split()) >= _SENTENCE
    )
    most = max([*runs.values(), *sentences.values()], default=0)
    return most >= (2 if is_cut else 3)


async def ask(url: str, fields: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the answer to each question, and whether the limit cut the answer off."""
    places = asyncio.Semaphore(_TOGETHER)

    async def one(seed: int, question: str) -> tuple[str, bool]:
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": _LIMIT,
            "seed": seed,
        }
        async with places:
            got = await client.post(f"{url}/v1/chat/completions", json=body | fields)
        choice = got.raise_for_status().json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"] == "length"

    async with httpx.AsyncClient(timeout=_PATIENCE_S) as client:
        return await asyncio.gather(*(one(n, it) for n, it in enumerate(QUESTIONS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("-o", dest="pairs", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--answers", action="store_true", help="also print the answers")
    given = parser.parse_args()
    fields = {
        name: json.loads(value) for name, _, value in (it.partition("=") for it in given.pairs)
    }
    answers = asyncio.run(ask(given.url, fields))
    looping = [loops(*it) for it in answers]
    if given.answers:
        for question, (text, is_cut), looped in zip(QUESTIONS, answers, looping, strict=True):
            print(f"\n--- {question} [{'cut' * is_cut} {'LOOPS' * looped}]\n{text}")
    words = sum(len(text.split()) for text, _ in answers) / len(answers)
    cut = sum(is_cut for _, is_cut in answers)
    print(
        f"{sum(looping)} of {len(answers)} answers loop, {cut} reach the limit, "
        f"{words:.0f} words on average"
    )


if __name__ == "__main__":
    main()
