"""One of the servers that peers.py compares, as a process: it steps, and this measures.

Runs in each server's own environment, so it imports nothing but the standard library. Commands come
on stdin and answers leave on stdout, a line of JSON each.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

_SETTLING = 4  # steps of decoding that do not count
_ALONE, _AFTER = 16, 4  # steps of a mixed load before the prompt comes and after its first token
_FEWEST, _MOST = 0.02, 0.98  # of the vocabulary, between which prompts are drawn


class Side(Protocol):
    """A server without its HTTP: the caller says when it steps."""

    vocab_size: int
    uses: str  # the instructions that it really computes with, in its own words

    def add(self, prompt: list[int]) -> int:
        """Begins an endless, greedy stream; returns its number. Computes nothing yet."""

    def step(self) -> Collection[int]:
        """One step of all streams; returns those that it gave a token."""

    def end(self, stream: int) -> None:
        """Keeps the prompt that it has computed for the next stream that begins so."""

    def aim(self, target: str) -> None:
        """Takes another stall target, in ms, or default or off, where there is such a thing."""


def serve(make: Callable[[], Side]) -> None:
    """Answers commands until stdin ends. What a library prints goes to stderr."""
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
    """Milliseconds until the first token of a cold prompt, alone."""
    began = time.perf_counter()
    stream = side.add(_ids(side, tokens, seed))
    _until_each(side, {stream})
    took = time.perf_counter() - began
    _end(side, {stream})
    return 1e3 * took


def decode(side: Side, streams: int, context: int, steps: int, seed: int) -> list[float]:
    """Milliseconds of steps in which every stream gets a token; contexts grow from `context`."""
    prompts = [_ids(side, context, seed + n) for n in range(streams)]
    for ids in prompts:  # one after another, so that no stream runs ahead of the others
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
    """Gaps of streams that run while a cold prompt is computed, and when it had its first token."""
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
    """Milliseconds between two tokens, of all streams, for some steps or until a stream's first."""
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
    """Steps until each of them had a token."""
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
