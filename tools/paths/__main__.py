"""Measures how long the paths through the code are, in calls and files, on a running server.

    python -m tools.paths                        # this tree
    python -m tools.paths --sources OTHER/src    # a different tree
    python -m tools.paths --tree token           # who calls what; also step and request

Starts a server with headrace-mini and counts how often functions of `headrace` and
`headrace_kernels` are entered in the gateway and the engine. `sys.setprofile` reports the
entries: a coroutine or generator that continues after a yield is entered again. Workers and
libraries are not counted.

token: entries in the gateway per token of one stream, from the difference between a long and a
short answer. step: entries in the engine per step of the same stream; without guessing, a step
makes one token. request: entries in the gateway for a prompt of one word and an answer of one
token, less the entries in an idle server in the same time. The result is the median of the
second to the tenth request. A file belongs to a path if one of its functions is entered at
least once in two tokens. Rarer functions, such as the report of the engine's status, only count
as calls.
"""

import argparse
import ast
import json
import os
import socket
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import httpx

from tools.harness.servers import running_server

HERE = Path(__file__).parent
# The numbers of tokens of short and long answers, and the number of rounds with both answers.
SHORT, LONG, ROUNDS = 40, 280, 3
REQUESTS = 10
# A function belongs to a path from OFTEN entries on, and is shown in its tree from SHOWN on.
OFTEN, SHOWN = 0.5, 0.05
LONG_FUNCTION = 40
# Work within this time after the last byte of an answer is counted for that request.
SETTLED_S = 0.2


class Function(NamedTuple):
    file: str
    line: int
    name: str


class Entries(NamedTuple):
    """How often a function was called, and how often the function was `resumed` after a yield."""

    started: float = 0.0
    resumed: float = 0.0


Way = tuple[Function, ...]
"""A function preceded by its callers, the outermost first."""

Counts = dict[Way, Entries]
"""Entries by call path, in the order of the first entries."""


class Probe:
    """A client of the counters in a server's processes (see hook/sitecustomize.py)."""

    def __init__(self, folder: str, processes: tuple[str, ...] = ("gateway", "engine")) -> None:
        self._folder, self._processes = folder, processes

    def begin(self) -> None:
        for process in self._processes:
            self._ask(process, b"begin")

    def end(self, process: str) -> Counts:
        counts: Counts = {}
        way: Way = ()
        for depth, file, line, name, *entries in json.loads(self._ask(process, b"end")):
            way = (*way[:depth], Function(file, line, name))
            counts[way] = Entries(*entries)
        return counts

    def _ask(self, process: str, what: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.path.join(self._folder, process))
            connection.sendall(what)
            return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def total(*parts: tuple[float, Counts]) -> Counts:
    """Return the sum of counts. Each part is multiplied by its factor."""
    sums: dict[Way, tuple[float, float]] = {}
    for factor, counts in parts:
        for way, (started, resumed) in counts.items():
            before = sums.get(way, (0.0, 0.0))
            sums[way] = before[0] + factor * started, before[1] + factor * resumed
    return {way: Entries(*entries) for way, entries in sums.items()}


def calls(counts: Counts) -> float:
    return sum(map(sum, counts.values()))


def functions(counts: Counts) -> dict[Function, float]:
    """Return the functions at the ends of call paths, with the entries of each function."""
    sums: defaultdict[Function, float] = defaultdict(float)
    for way, entries in counts.items():
        sums[way[-1]] += sum(entries)
    return {function: number for function, number in sums.items() if number >= OFTEN}


def per_token(client: httpx.Client, probe: Probe) -> dict[str, Counts]:
    """Count the gateway's calls per additional token, and the engine's per additional step."""
    parts: dict[str, list[tuple[float, Counts]]] = {"gateway": [], "engine": []}
    # This request warms up.
    ask(client, "Count from 1 to 500.", LONG, stream=True)
    for _ in range(ROUNDS):
        for num_tokens, sign in ((LONG, 1), (SHORT, -1)):
            probe.begin()
            ask(client, "Count from 1 to 500.", num_tokens, stream=True)
            time.sleep(SETTLED_S)
            for process, its in parts.items():
                its.append((sign / (ROUNDS * (LONG - SHORT)), probe.end(process)))
    return {"token": total(*parts["gateway"]), "step": total(*parts["engine"])}


def one_request(client: httpx.Client, probe: Probe) -> Counts:
    """Return the counts of the median request, without the first request."""
    counted = []
    for _ in range(REQUESTS):
        probe.begin()
        ask(client, "Hello", 1, stream=False)
        time.sleep(SETTLED_S)
        counted.append(probe.end("gateway"))
    probe.begin()
    time.sleep(SETTLED_S)
    idle = probe.end("gateway")
    return total((1, sorted(counted[1:], key=calls)[(REQUESTS - 1) // 2]), (-1, idle))


def ask(client: httpx.Client, prompt: str, num_tokens: int, stream: bool) -> None:
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": num_tokens, "stream": stream, "temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json=body | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass


def measure(sources: Path) -> dict[str, Counts]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "HEADRACE_PATHS": folder,
            "HEADRACE_SOURCES": str(sources),
            "PYTHONPATH": os.pathsep.join([str(HERE / "hook"), str(sources)]),
        }
        flags = ("--state-dir", os.path.join(folder, "state"), "--guess", "off")
        with running_server(*flags, environment=environment) as server:
            probe = Probe(folder)
            with httpx.Client(base_url=server.url, timeout=300) as client:
                measured = per_token(client, probe)
                return measured | {"request": one_request(client, probe)}


def lengths(sources: Path, found: set[Function]) -> dict[Function, int]:
    """Return the number of lines of each function, without decorators."""
    lines: dict[tuple[str, int], int] = {}
    for file in {function.file for function in found}:
        for node in ast.walk(ast.parse((sources / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(it.lineno for it in node.decorator_list)])
                lines[file, first] = (node.end_lineno or node.lineno) - node.lineno + 1
    return {it: lines.get((it.file, it.line), 1) for it in found}


def show(name: str, counts: Counts, sources: Path) -> set[Function]:
    """Print the figures of a path; return its long functions."""
    found = functions(counts)
    resumed = sum(entries.resumed for entries in counts.values())
    files = {function.file for function in found}
    print(
        f"{name}: {calls(counts):.0f} calls in {len(files)} files, {len(found)} functions; "
        f"{resumed:.0f} of the calls continue a coroutine or generator"
    )
    sizes = lengths(sources, set(found))
    for it in sorted(sizes, key=lambda it: -sizes[it])[:3]:
        print(f"    {sizes[it]} lines: {it.name}, {it.file}:{it.line}")
    return {it for it, size in sizes.items() if size > LONG_FUNCTION}


def show_tree(counts: Counts) -> None:
    """Print a line for each call path, indented below its caller."""
    first = {way: number for number, way in enumerate(counts)}
    for way in sorted(counts, key=lambda it: [first[it[: n + 1]] for n in range(len(it))]):
        started, resumed = counts[way]
        if started + resumed >= SHOWN:
            again = f" ({resumed:.1f} resumed)" if resumed >= SHOWN else ""
            name = "  " * len(way) + way[-1].name
            print(f"{started + resumed:7.1f} {name}{again}  {way[-1].file}:{way[-1].line}")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--sources", type=Path, default=HERE.parents[1] / "src")
    parser.add_argument("--tree", choices=("token", "step", "request"), action="append", default=[])
    given = parser.parse_args()
    sources = given.sources.resolve()
    measured = measure(sources)
    long = set().union(*(show(name, counts, sources) for name, counts in measured.items()))
    print(f"functions over {LONG_FUNCTION} lines: {len(long)}")
    for name in given.tree:
        print(f"\n{name}, in the order of first calls")
        show_tree(measured[name])


if __name__ == "__main__":
    main()
