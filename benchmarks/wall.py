"""The wall: four streams at 128 tokens, cold prompts of 2,048, at several stall targets.

    python tools/make_random_model.py --shape qwen3-0.6b --out MODEL
    python benchmarks/wall.py MODEL --out docs/benchmarks/wall

Starts one server after the other on the folder, each with its own target, and writes wall.json
and two pictures. Between starts nothing else runs; it takes about ten minutes.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
from msgspec.structs import replace

from headrace.bench import mixed
from headrace.bench.mixed import Options
from headrace.bench.plots import draw
from headrace.bench.profile import PROFILES
from headrace.bench.record import ServerRun
from headrace.bench.report import report, table, write
from headrace.bench.target import ServerSaid

TARGETS = ("60", "100", "200", "off")
WHOLE = ("--max-stall-ms", "off", "--max-step-ms", "off", "--max-step-tokens", "4096")
_STOP_WITHIN_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="MS", help="or off")
    parser.add_argument("--profile", choices=PROFILES, default="wall")
    parser.add_argument("--prompts", type=int, help="per target, instead of the profile's")
    parser.add_argument("--flags", nargs="+", default=(), help="for every server, without dashes")
    given = parser.parse_args()
    options = Options(profile=PROFILES[given.profile])
    if given.prompts:
        few = replace(options.profile, num_warm_up=1, num_measured=given.prompts)
        options = replace(options, profile=few)
    runs: list[ServerRun] = []
    for target in given.targets:
        flags = flags_for(target) + tuple(
            part for flag in given.flags for part in f"--{flag}".split("=", 1)
        )
        try:
            runs.append(measure(given.model, target, flags, options))
        except (ServerSaid, httpx.HTTPError) as error:
            _say(f"{target}: left out: {error or type(error).__name__}")
            continue
        # after each, so that a run that is cut short leaves what it has
        write(given.out / f"{given.profile}.json", report(runs, options))
        draw(runs, given.out)
    print(table(runs))


def flags_for(target: str) -> tuple[str, ...]:
    return WHOLE if target == "off" else ("--max-stall-ms", target)


def measure(model: Path, target: str, flags: tuple[str, ...], options: Options) -> ServerRun:
    label = "off" if target == "off" else f"{target} ms"
    with serving(model, flags) as url:
        (run,) = asyncio.run(mixed.measure([(url, label)], options, _say))
    run.flags = flags
    return run


@contextlib.contextmanager
def serving(model: Path | str, flags: tuple[str, ...]) -> Iterator[str]:
    """The URL of a server of its own, stopped at the end."""
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0"]
    server = subprocess.Popen(
        [*command, "--state-dir", "none", *flags], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr
    try:
        for line in server.stderr:
            _say(line.rstrip())
            if found := re.match(r"Headrace is ready at (http://[^\s]+?):? ", line):
                # a pipe that is full would stop whoever writes to it
                threading.Thread(target=server.stderr.read, daemon=True).start()
                yield found[1]
                break
        else:
            raise SystemExit(f"The server ended with code {server.wait()}.")
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
