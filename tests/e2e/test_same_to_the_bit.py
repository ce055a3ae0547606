"""Tests that batching, chunked prompts, guesses and kills do not change a bfloat16 answer."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kernels.own_kernels import needs_own_kernels
from tools.harness.servers import ServerProcess, running_server

# Each draw of mirostat depends on all earlier draws.
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"mirostat": 2, "mirostat_eta": 0.5},
    {"mirostat": 1},
    {"dry_multiplier": 2, "dry_allowed_length": 1},
]
# With temperature 1 and a seed, even a tiny difference of logits would change a token.
BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"{number}: " + "water over the wheel " * (1 + 7 * (number % 5)),
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 1,
        "seed": number,
        "logprobs": 2,
        **SAMPLERS[number % 4],
    }
    for number in range(12)
]

pytestmark = needs_own_kernels  # torch's own products depend on the number of rows


@pytest.fixture(scope="module")
def short_steps() -> Iterator[ServerProcess]:
    with running_server("--dtype", "bfloat16", "--max-step-tokens", "24") as running:
        yield running


@pytest.fixture(scope="module")
def guessing() -> Iterator[ServerProcess]:
    with running_server("--dtype", "bfloat16", "--guess", "auto") as running:
        yield running


def instructions_of(server: ServerProcess) -> str:
    kernels: str = httpx.get(f"{server.url}/manage/state").json()["engine"]["kernels"]
    return kernels


def ask(server: ServerProcess, at_once: int, kill: bool = False) -> list[Any]:
    """Return the choices of all bodies, with logprobs to the last digit."""

    async def decodes(client: httpx.AsyncClient) -> bool:
        state = (await client.get(f"{server.url}/manage/state")).json()
        return any(stream["state"] == "decode" for stream in state["requests"])

    async def run() -> list[Any]:
        places = asyncio.Semaphore(at_once)

        async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
            async with places:
                answer = await client.post(f"{server.url}/v1/completions", json=body)
            return answer.raise_for_status().json()["choices"]

        async with httpx.AsyncClient(timeout=120) as client:
            asking = asyncio.gather(*(one(client, body) for body in BODIES))
            if kill:
                while not await decodes(client):
                    await asyncio.sleep(0.01)
                server.kill_engine()
            return await asking

    return asyncio.run(run())


def agree(found: list[Any], expected: list[Any]) -> None:
    """Compare answers token by token, since pytest's own message would be pages long."""
    for body, (ours, theirs) in zip(BODIES, zip(found, expected, strict=True), strict=True):
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            pairs = zip(ours[0]["logprobs"][key], theirs[0]["logprobs"][key], strict=True)
            for place, (one, other) in enumerate(pairs):
                assert one == other, f"{body['prompt'][:3]} {key} {place}"
    assert found == expected


def test_batching_chunked_prompts_and_a_kill_change_no_digit(
    server: ServerProcess, short_steps: ServerProcess
) -> None:
    assert instructions_of(server) == instructions_of(short_steps), server.lines + short_steps.lines
    alone = ask(server, 1)
    agree(ask(server, len(BODIES)), alone)
    agree(ask(short_steps, len(BODIES)), alone)
    agree(ask(short_steps, len(BODIES), kill=True), alone)


def test_guesses_and_an_engine_kill_change_no_digit(
    server: ServerProcess, guessing: ServerProcess
) -> None:
    alone = ask(server, 1)
    agree(ask(guessing, 2), alone)
    agree(ask(guessing, 4, kill=True), alone)
    shown = httpx.get(f"{guessing.url}/metrics").text.splitlines()
    metrics = dict(line.split(" ", 1) for line in shown if "_tokens_total" in line)
    guessed, accepted = (
        sum(float(value) for name, value in metrics.items() if kind in name)
        for kind in ("guessed_tokens", "accepted_tokens")
    )
    assert guessed >= accepted and guessed > 0
