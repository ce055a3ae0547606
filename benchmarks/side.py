"""Measures steps in one of the servers that peers.py compares, in a separate process.

The process runs in each server's own environment, so it imports only the standard library.
Commands arrive on stdin and answers go to stdout, each as one line of JSON.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

# The number of first decode steps that are not counted.
_SETTLING = 4
# The number of steps of a mixed load before the prompt arrives, and after its first token.
_ALONE, _AFTER = 16, 4
# Prompts are drawn from this part of the vocabulary, without its two ends.
_FEWEST, _MOST = 0.02, 0.98


class Side(Protocol):
    """A server without HTTP; the caller decides when the server takes a step."""

    vocab_size: int
    # The instructions that the server really uses, in its own words.
    uses: str

    def add(self, prompt: list[int]) -> int:
        """Starts an endless, greedy stream without a step; returns the stream's number."""

    def step(self) -> Collection[int]:
        """Takes one step of all streams; returns the streams that received a token."""

    def end(self, stream: int) -> None:
        """Ends a stream. Its computed prompt stays for the next stream with the same prompt."""

    def aim(self, target: str) -> None:
        """Sets the stall target, if the server has one: milliseconds, "default" or "off"."""


def serve(make: Callable[[], Side]) -> None:
    """Answers commands until stdin ends. The output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = make()
    kinds: dict[str, Callable[..., Any]] = {"prompt": prompt, "decode": decode, "mixed": mixed}
    print(json.dumps(side.uses), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = kinds[command.pop("do")](side, **command)
        print(json.dumps(answer), file=answers, flush=True)


def prompt(side: Side, tokens: int, seed: int) -> float:
    """Return the milliseconds until the first token of a cold prompt that runs alone."""
    began = time.perf_counter()
    stream = side.add(_ids(side, tokens, seed))
    _until_each(side, {stream})
    took = time.perf_counter() - began
    _end(side, {stream})
    return 1e3 * took


def decode(side: Side, streams: int, context: int, steps: int, seed: int) -> list[float]:
    """Return the milliseconds of steps in which every stream gets a token.

    The contexts have `context` tokens at first and grow.
    """
    prompts = [_ids(side, context, seed + n) for n in range(streams)]
    # Compute the prompts one after another, so that all streams start at the same time.
    for ids in prompts:
        _end(side, _until_each(side, {side.add(ids)}))
    running = _until_each(side, {side.add(ids) for ids in prompts})
    for _ in range(_SETTLING):
        side.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        _until_each(side, running)
        times.append(1e3 * (time.perf_counter() - began))
    _end(side, running)
    return times


def mixed(
    side: Side, streams: int, context: int, tokens: int, seed: int, target: str
) -> dict[str, Any]:
    """Return the token gaps of streams during a cold prompt, and the prompt's time in seconds."""
    side.aim(target)
    running = {side.add(_ids(side, context, seed + n)) for n in range(streams)}
    _until_each(side, running)
    alone = _gaps(side, running, _ALONE, None)
    began = time.perf_counter()
    late = side.add(_ids(side, tokens, seed + streams))
    gaps = _gaps(side, running, 0, late)
    first = time.perf_counter() - began
    gaps += _gaps(side, running, _AFTER, None)
    _end(side, running | {late})
    return {"alone_ms": alone, "gaps_ms": gaps, "first_s": first}


def _gaps(side: Side, running: set[int], steps: int, until: int | None) -> list[float]:
    """Return the milliseconds between two tokens of each stream.

    Stops after `steps` steps, or when the stream `until` has its first token.
    """
    last = dict.fromkeys(running, time.perf_counter())
    found = []
    while steps or until is not None:
        given, now = side.step(), time.perf_counter()
        for stream in running.intersection(given):
            found.append(1e3 * (now - last[stream]))
            last[stream] = now
        steps -= bool(steps)
        until = None if until in given else until
    return found


def _until_each(side: Side, streams: set[int]) -> set[int]:
    """Takes steps until each of the streams has received a token."""
    missing = set(streams)
    while missing:
        missing.difference_update(side.step())
    return streams


def _end(side: Side, streams: set[int]) -> None:
    for stream in streams:
        side.end(stream)


def _ids(side: Side, count: int, seed: int) -> list[int]:
    low, high = (int(share * side.vocab_size) for share in (_FEWEST, _MOST))
    return random.Random(seed).choices(range(low, high), k=count)
