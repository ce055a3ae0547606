"""Counts calls in a process that does not know it is being counted."""

import os
import subprocess
import sys
from pathlib import Path

from tools.paths.__main__ import HERE, Entries, Function, Probe, functions, total

SMALL = """
def outer():
    inner()
    return sum(numbers())

def inner():
    pass

def numbers():
    yield 1
    yield 2
"""
PROGRAM = """
import small, sys
for line in sys.stdin:
    small.outer()
    print(flush=True)
"""


def test_functions_are_counted_below_their_callers_and_resumed_ones_apart(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    environment = os.environ | {
        "HEADRACE_PATHS": str(tmp_path),
        "HEADRACE_SOURCES": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE / "hook"), str(tmp_path)]),
    }
    command = [sys.executable, "-c", PROGRAM, "headrace", "serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        probe = Probe(str(tmp_path), ("gateway",))

        def run() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        run()  # is not counted
        probe.begin()
        run()
        run()
        counts = probe.end("gateway")
        process.stdin.close()
    outer = Function("small.py", 2, "outer")
    inner, numbers = Function("small.py", 6, "inner"), Function("small.py", 9, "numbers")
    assert counts == {
        (outer,): Entries(2, 0),
        (outer, inner): Entries(2, 0),
        (outer, numbers): Entries(2, 4),
    }


def test_a_difference_of_counts_is_what_one_more_token_takes() -> None:
    step, start = Function("a.py", 1, "step"), Function("b.py", 1, "start")
    long = {(start,): Entries(1), (start, step): Entries(30, 60)}
    short = {(start,): Entries(1), (start, step): Entries(10, 20)}
    more = total((1 / 20, long), (-1 / 20, short))
    assert more == {(start,): Entries(0, 0), (start, step): Entries(1, 2)}
    assert functions(more) == {step: 3}
