"""How soon a stream goes on whose engine was killed, against the time that reading its prompt took.

    python tools/make_random_model.py --shape qwen3-0.6b --out MODEL
    python -m benchmarks.recovery MODEL [--length 6000] [--answer 60] [--check]

The prompt is kept on disk. The engine is killed once the stream has some tokens; its next one comes
after the start of another engine, whose own time the server's log tells, and what was restored.
`--check` reads the prompt again, and compares the tokens of both.
Flags that are not known here are the server's.
"""

import argparse
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from headrace.bench.report import commit, machine
from tools.harness.servers import ServerProcess, running_server

_BEFORE = 40  # tokens, then the kill
_LATE_S = 0.3  # what a dead engine had said may still come so late
_LIMIT_S = 3600.0


class Told(NamedTuple):
    """The tokens of an answer, and when each came."""

    token_ids: list[int]
    times: list[float]


def ask(server: ServerProcess, body: dict[str, Any], on_token: Callable[[int], None]) -> Told:
    told = Told([], [])
    url, body = f"{server.url}/v1/completions", body | {"stream": True, "return_token_ids": True}
    with httpx.stream("POST", url, json=body, timeout=_LIMIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
            assert "error" not in chunk, chunk
            for choice in chunk.get("choices", ()):
                for token_id in choice.get("token_ids") or ():
                    told.token_ids.append(token_id)
                    told.times.append(time.perf_counter())
                    on_token(len(told.token_ids))
    return told


def measure(server: ServerProcess, body: dict[str, Any]) -> Told:
    killed = 0.0

    def kill(number: int) -> None:
        nonlocal killed
        if number == _BEFORE:
            os.kill(server.engine_pid, signal.SIGKILL)
            killed = time.perf_counter()

    began = time.perf_counter()
    told = ask(server, body, kill)
    reading = told.times[0] - began
    gone = next(at for at in told.times if at > killed + _LATE_S) - killed
    (start,) = (float(found[1]) for line in server.lines if (found := _UP.search(line)))
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    restored = sum(map(float, _RESTORED.findall(metrics)))
    print(f"first token after {reading:.1f} s of reading")
    print(
        f"next token {gone:.2f} s after the kill, {start:.2f} of them until an engine was up again"
    )
    print(f"{gone / reading:.3f} of the reading; {restored:.0f} tokens from disk", flush=True)
    return told


_UP = re.compile(r"The engine is up again after ([0-9.]+) s")
_RESTORED = re.compile(r"^headrace_disk_prefix_tokens_total\S* ([0-9.e+]+)$", re.MULTILINE)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=6000, help="of the prompt")
    parser.add_argument("--answer", type=int, default=60, help="its tokens; more if they are fast")
    parser.add_argument("--check", action="store_true")
    given, flags = parser.parse_known_args()
    dice = random.Random(1)
    prompt = [dice.randrange(5, 250) for _ in range(given.length)]
    body = {"prompt": prompt, "max_tokens": given.answer, "temperature": 0, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as name:
        disk, state = str(Path(name) / "disk"), str(Path(name) / "state")
        own = ("--prefix-cache-dir", disk, "--state-dir", state)
        own += ("--max-model-len", str(given.length + 256), *flags)
        with running_server(given.model, *own) as server:
            print(f"{machine()}, {commit()}, a prompt of {given.length} tokens")
            told = measure(server, body)
            if given.check:
                again = ask(server, body | {"cache_prompt": False}, lambda number: None)
                print("the same tokens without a kill:", told.token_ids == again.token_ids)


if __name__ == "__main__":
    main()
