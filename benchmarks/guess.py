"""Compares tokens per second with and without speculative decoding; the texts must be equal.

    python -m benchmarks.guess MODEL [--pairs 10] [--tokens 200] [FLAGS OF THE SERVER]

MODEL is a folder, a GGUF file or a name; `--quantize none` reads a 4-bit file as bfloat16. One
stream copies a text, repeats code with another name in it, fills a JSON schema or writes prose
without repetition; then eight streams do the same. Both requests of a pair go to one server, in
alternating order. The ratio is the rate with guesses divided by the rate without guesses. A
rate is counted from the first token to the last; for eight streams, over the wall-clock time.
The exit code is 1 if a text differs.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

import httpx

from tools.harness.servers import running_server

ROUTE = "/v1/completions"
TEXT = (
    "The mill at the lower bridge was built of oak and slate in the year of the flood. Its wheel "
    "took the water from a channel that forty men had dug, and turned two stones of granite. "
    "Anna kept the books, weighed every sack twice, and wrote the weather beside each sale. When "
    "the river froze, the children skated past the sluice, and nobody ground any corn until March."
)
CODE = '''def read_prices(path, currency):
    """Prices of a file, by name, in one currency."""
    prices = {}
    for line in open(path):
        name, value, unit = line.strip().split(",")
        if unit != currency:
            raise ValueError(f"{name} is in {unit}, not in {currency}")
        prices[name] = float(value)
    if not prices:
        raise ValueError(f"{path} has no prices in {currency}")
    return prices
'''
SCHEMA = {
    "type": "object",
    "properties": {
        "delivery_address_street": {"type": "string", "maxLength": 20},
        "delivery_address_city": {"type": "string", "maxLength": 20},
        "is_express_delivery": {"type": "boolean"},
        "number_of_packages": {"type": "integer", "minimum": 0, "maximum": 99},
        "preferred_carrier_name": {"enum": ["northern post", "harbour lines"]},
        "customer_satisfaction_rating": {"enum": ["excellent", "acceptable", "poor"]},
        "estimated_arrival_in_days": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
GREEDY = {"temperature": 0, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "copy": {"prompt": f"{TEXT}\n\nThe same again:\n\n{TEXT}\n\nThe same again:\n\n", **GREEDY},
    "code edit": {
        "prompt": f"{CODE}\n\n# the same with `costs` instead of `prices`\n"
        f"{CODE.replace('prices', 'costs')}\n\n# the same with `rates` instead of `prices`\n",
        **GREEDY,
    },
    "JSON": {"prompt": "An order as JSON:\n", "temperature": 0, "guided_json": SCHEMA},
    "prose": {"prompt": "The history of the village began", "temperature": 1, "ignore_eos": True},
}
NUM_STREAMS, PROMPT = 8, 600
NAMES = {False: "off", True: "on"}
Clients = dict[bool, httpx.AsyncClient]
"""Maps True to a client whose requests use guesses, and False to a client without guesses."""


class Answer(NamedTuple):
    text: str
    rate: float  # tokens per second
    num_guessed: int
    num_accepted: int


async def ask(client: httpx.AsyncClient, kind: str, seed: int, tokens: int, guess: bool) -> Answer:
    body = {**KINDS[kind], "seed": seed, "max_tokens": tokens, "guess": guess}
    answer = await client.post(ROUTE, json=body)
    shown = answer.raise_for_status().json()
    timings = shown["timings"]
    guessed = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return Answer(shown["choices"][0]["text"], timings["predicted_per_second"], *guessed)


async def ask_all(
    client: httpx.AsyncClient, kind: str, seed: int, tokens: int, guess: bool
) -> Answer:
    """Run eight streams at the same time; return their texts and their total rate."""
    began = time.perf_counter()
    asked = (ask(client, kind, 8 * seed + i, tokens, guess) for i in range(NUM_STREAMS))
    answers = await asyncio.gather(*asked)
    rate = NUM_STREAMS * tokens / (time.perf_counter() - began)
    sums = sum(one.num_guessed for one in answers), sum(one.num_accepted for one in answers)
    return Answer("\n".join(one.text for one in answers), rate, *sums)


async def beside_prompts(client: httpx.AsyncClient, guess: bool, tokens: int) -> list[float]:
    """Return the seconds between frames of two streams that copy a text, while prompts arrive."""
    gaps: list[float] = []

    async def stream() -> None:
        body = {**KINDS["copy"], "max_tokens": tokens, "guess": guess, "stream": True}
        last = 0.0
        async with client.stream("POST", ROUTE, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last = now
        # Remove the time before the first frame, which is the longest of these gaps.
        gaps.remove(max(gaps))

    async def prompts() -> None:
        rng = Random(tokens)
        while True:
            ids = [rng.randrange(100, 1000) for _ in range(PROMPT)]
            (await client.post(ROUTE, json={"prompt": ids, "max_tokens": 1})).raise_for_status()

    beside = asyncio.create_task(prompts())
    await asyncio.gather(stream(), stream())
    beside.cancel()
    return gaps


async def measure_gaps(url: str, options: argparse.Namespace) -> bool:
    """Return whether the 99th percentile of the gaps with guesses is acceptable.

    Acceptable is at most the target, or at most the 99th percentile without guesses.
    """
    found: dict[bool, list[float]] = {True: [], False: []}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        target = (await client.get("/props")).json()["max_stall_ms"]
        for number in range(options.pairs + 1):
            for guess in (True, False) if number % 2 else (False, True):
                gaps = await beside_prompts(client, guess, options.tokens)
                found[guess] += gaps if number else []
    longest = {guess: 1000 * quantiles(gaps, n=100)[98] for guess, gaps in found.items()}
    print(f"p99 of gaps during prompts of {PROMPT} tokens, one by one; target {target} ms")
    told = (f"{name} {longest[key]:.0f} ms of {len(found[key])}" for key, name in NAMES.items())
    print(", ".join(told))
    return longest[True] <= max(target, longest[False])


class Pair(NamedTuple):
    on: Answer
    off: Answer


async def pairs(clients: Clients, ask: Any, kind: str, options: Any) -> list[Pair]:
    """Return pairs of answers, without the first pair, which warms up."""
    made = []
    for number in range(options.pairs + 1):
        order = (True, False) if number % 2 else (False, True)
        found = {
            guess: await ask(clients[guess], kind, number, options.tokens, guess) for guess in order
        }
        made.append(Pair(found[True], found[False]))
    return made[1:]


def show(name: str, found: list[Pair]) -> bool:
    ratios = [pair.on.rate / pair.off.rate for pair in found]
    guessed, right = (sum(pair.on[field] for pair in found) for field in (2, 3))
    print(
        f"| {name} | {median(p.off.rate for p in found):.1f} | "
        f"{median(p.on.rate for p in found):.1f} | {median(ratios):.2f} | "
        f"{min(ratios):.2f} to {max(ratios):.2f} | {guessed // len(found)} | "
        f"{right / guessed if guessed else 0:.0%} |",
        flush=True,
    )
    return all(pair.on.text == pair.off.text for pair in found)


async def measure(on_url: str, off_url: str, options: argparse.Namespace) -> bool:
    print("| | off, tokens/s | on | ratio | range of the pairs | guessed | right |")
    print("|---|---|---|---|---|---|---|")
    is_same = True
    async with (
        httpx.AsyncClient(base_url=on_url, timeout=600) as on,
        httpx.AsyncClient(base_url=off_url, timeout=600) as off,
    ):
        clients = {True: on, False: off}
        for kind in options.kinds or KINDS:
            is_same &= show(kind, await pairs(clients, ask, kind, options))
        for kind in () if options.kinds else ("prose", "copy"):
            name = f"{NUM_STREAMS} streams, {kind}"
            is_same &= show(name, await pairs(clients, ask_all, kind, options))
    print("The texts are equal." if is_same else "SOME TEXTS DIFFER.")
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="with one stream each")
    parser.add_argument("--gaps", action="store_true", help="measure gaps during prompts")
    options, flags = parser.parse_known_args()
    flags = ["--state-dir", "none", "--guess", "auto", *flags]
    with running_server(str(options.model), *flags) as server:
        print(next((line for line in server.lines if "kernels " in line), ""), file=sys.stderr)
        if options.gaps:
            return 0 if asyncio.run(measure_gaps(server.url, options)) else 1
        return 0 if asyncio.run(measure(server.url, server.url, options)) else 1


if __name__ == "__main__":
    sys.exit(main())
