"""Prompt and decode speed of one GGUF file, by llama-server and by us, over HTTP and in turn.

    python -m benchmarks.file_speed FILE [--rounds 3] [--threads 2]

llama-server is that of the wheel xllamacpp, or LLAMA_SERVER=PATH. One stream; figures are medians.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import httpx

from tools.harness.llama_server import llama_server
from tools.harness.servers import running_server

_PROMPT, _DECODED = 512, 128
_ROUNDS_OF_IDS = 1000  # prompts share no beginning: each round has ids of its own

Ask = Callable[[list[int], int], None]
"""Completes a prompt by so many tokens, greedily."""


def measured(ask: Ask, number: int) -> tuple[float, float]:
    """Tokens a second, of the prompt and of the answer."""
    first = 1000 + number * _ROUNDS_OF_IDS
    prompt, other = (list(range(begin, begin + _PROMPT)) for begin in (first, first + 500))
    one, many = (timed(ask, ids, num) for ids, num in ((prompt, 1), (other, 1 + _DECODED)))
    return _PROMPT / one, _DECODED / (many - one)


def timed(ask: Ask, prompt: list[int], num: int) -> float:
    began = time.perf_counter()
    ask(prompt, num)
    return time.perf_counter() - began


def asks(url: str, path: str, count: str) -> Ask:
    client = httpx.Client(base_url=url, timeout=600)

    def ask(prompt: list[int], num: int) -> None:
        body = {"prompt": prompt, count: num, "temperature": 0, "ignore_eos": True}
        body |= {"cache_prompt": False}
        client.post(path, json=body).raise_for_status()

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    flags = ("--threads", str(given.threads), "--max-model-len", "1024")
    with (
        llama_server(given.file, threads=given.threads, positions=1024) as theirs,
        running_server(str(given.file), *flags) as ours,
    ):
        both = {
            "Headrace": asks(ours.url, "/v1/completions", "max_tokens"),
            "llama-server": asks(theirs, "/completion", "n_predict"),
        }
        rows: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
        for number in range(given.rounds + 1):
            for name, ask in both.items():
                rows[name].append(measured(ask, number))
    print(f"{given.file.name}, {given.threads} threads, {_PROMPT} + {_DECODED} tokens, one stream")
    print("| | prompt, tokens/s | decode, tokens/s |\n|---|---|---|")
    for name, speeds in rows.items():
        prompt, decoded = (median(column) for column in zip(*speeds[1:], strict=True))  # warm
        print(f"| {name} | {prompt:.0f} | {decoded:.1f} |")


if __name__ == "__main__":
    main()
