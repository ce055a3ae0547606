"""Headrace beside OpenVINO GenAI and llama.cpp: the same weights, the same rows, in turn.

    python -m benchmarks.peers [--rounds 3] [--out FOLDER] [--publish]
    python -m benchmarks.peers --shape small --rounds 1    # tries the script itself
    python -m benchmarks.peers --prepare                   # environments and models only

The first run makes an environment for each peer, builds llama.cpp natively and writes all models,
which takes half an hour on two cores. Then all servers are loaded side by side, each with the same
number of threads. Each round measures a row on one after another, and those that are not measured
are stopped. No server is measured through HTTP; each one's own scheduler decides what a step
computes. Keys and values have two bytes in all of them. `--publish` writes JSON, a picture and the
section of docs/benchmarks.md.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peer_report
from benchmarks.peer_setup import LLAMA, OPENVINO, Setup
from tools.make_random_model import SHAPES

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("headrace", "openvino", "llama.cpp")
MIXED = "mixed"
_LOAD = {"do": "mixed", "streams": 4, "context": 128, "tokens": 2048}
_STEPS = 24  # of decoding, each time
_STEP_TOKENS = 64  # of OpenVINO beside streams


class PeerRow(NamedTuple):
    """A bar: the ratio that must hold, of Headrace's time to another's."""

    models: str
    command: dict[str, Any]
    against: str = "quickest"  # a peer, the quickest one, or another row of Headrace's
    must: float | None = None


def _prompt(tokens: int) -> dict[str, Any]:
    return {"do": "prompt", "tokens": tokens}


def _decode(streams: int, context: int) -> dict[str, Any]:
    return {"do": "decode", "streams": streams, "context": context, "steps": _STEPS}


ROWS = {
    "prompt-512": PeerRow("bf16", _prompt(512), "openvino", 1.15),
    "prompt-2048": PeerRow("bf16", _prompt(2048), "openvino", 1.15),
    "decode-1@128": PeerRow("bf16", _decode(1, 128), "quickest", 1.1),
    "decode-4@128": PeerRow("bf16", _decode(4, 128), "quickest", 1.0),
    "decode-4@2048": PeerRow("bf16", _decode(4, 2048), "quickest", 1.0),
    "8bit-prompt-512": PeerRow("8bit", _prompt(512), "prompt-512", 1.1),
    "8bit-decode-1@128": PeerRow("8bit", _decode(1, 128)),
    "4bit-prompt-512": PeerRow("4bit", _prompt(512)),
    "4bit-decode-1@128": PeerRow("4bit", _decode(1, 128)),
    "4bit-decode-4@128": PeerRow("4bit", _decode(4, 128)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, MIXED), default=(*ROWS, MIXED))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of every server")
    parser.add_argument(
        "--llama-plain-buffers", action="store_true", help="where its own layouts crash; slower"
    )
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, default=Path("build/peers/report"))
    parser.add_argument("--publish", action="store_true", help="as the section of the docs")
    parser.add_argument("--prepare", action="store_true", help="environments and models only")
    given = parser.parse_args()
    setup = Setup(given.build, given.shape)
    kinds = {row.models for name, row in ROWS.items() if name in given.rows}
    kinds |= {MIXED} if MIXED in given.rows else set()
    commands = {kind: _commands(setup, kind, given) for kind in sorted(kinds)}
    if given.prepare:
        return
    report = _about(given)
    for kind in ("bf16", "8bit", "4bit"):
        names = [name for name in ROWS if name in given.rows and ROWS[name].models == kind]
        if names:
            with _started(commands[kind]) as servers:
                report["rows"] |= {name: _row(name, servers, given.rounds) for name in names}
    if MIXED in given.rows:
        with _started(commands[MIXED]) as servers:
            report["mixed"] = _mixed(servers, given.rounds)
    for name, row in ROWS.items():
        if name in report["rows"]:
            report["rows"][name]["ratio"] = _ratio(row, report["rows"], name)
    report["minutes"] = round((time.time() - report.pop("began")) / 60, 1)
    peer_report.write(report, given.out)
    if given.publish:
        peer_report.publish(report, ROOT / "docs")
    print(peer_report.markdown(report))


def _commands(setup: Setup, kind: str, given: argparse.Namespace) -> dict[str, list[str]]:
    """How each server is started with the models of a kind."""
    threads, found = str(given.threads), {}
    forms = {"8bit": ("int8", "Q8_0"), "4bit": ("int4", "Q4_K_M")}
    form, file = forms.get(kind, ("bf16", "BF16"))
    if "headrace" in given.peers:
        # in 4 bits it reads the very file that llama.cpp reads
        model = str(setup.gguf(file) if kind == "4bit" else setup.folder())
        flags = ("--quantize", "int8") if kind == "8bit" else ()
        python = str(setup.python("headrace"))
        found["headrace"] = [python, "-m", "benchmarks.side_headrace", model, threads, *flags]
    if "openvino" in given.peers:
        flags = ("--step-tokens", str(_STEP_TOKENS)) if kind == MIXED else ()
        python, model = str(setup.python("openvino")), str(setup.openvino(form))
        found["openvino"] = [python, "-m", "benchmarks.side_openvino", model, threads, *flags]
    if "llama.cpp" in given.peers:
        python, model = str(setup.python("llama.cpp")), str(setup.gguf(file))
        flags = ("--plain-buffers",) if given.llama_plain_buffers else ()
        found["llama.cpp"] = [python, "-m", "benchmarks.side_llama", model, threads, *flags]
    return found


class Server:
    """A process of side.py; it runs only while it is asked."""

    def __init__(self, peer: str, command: list[str]) -> None:
        path = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
        self.peer = peer
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self._answer()

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.peer} ended with code {self._process.wait()}.")
        self._process.send_signal(signal.SIGSTOP)  # no thread of it takes a core from the next
        return json.loads(line)


@contextlib.contextmanager
def _started(commands: dict[str, list[str]]) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for peer, command in commands.items():
            servers.append(Server(peer, command))
            stack.callback(servers[-1].close)
        yield servers


def _row(name: str, servers: list[Server], rounds: int) -> dict[str, Any]:
    """Milliseconds by server and round; the round before the first warms up."""
    times: dict[str, list[float]] = {server.peer: [] for server in servers}
    command = ROWS[name].command
    for number in range(rounds + 1):
        # a cold prompt is another one each time; contexts of decoding are computed once
        seed = 1000 * number if command["do"] == "prompt" else 1
        for server in servers:
            answer = server.ask(**command, seed=seed)
            took = statistics.median(answer) if isinstance(answer, list) else answer
            _say(f"{name}: {server.peer} {took:.1f} ms{'' if number else ' (warm-up)'}")
            if number:
                times[server.peer].append(round(took, 2))
    return {"ms": times}


def _ratio(row: PeerRow, rows: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The median of the rounds' ratios."""
    times = rows[name]["ms"]
    others = {peer: own for peer, own in times.items() if peer != "headrace"}
    if row.against in ROWS:
        others = {"headrace": rows[row.against]["ms"]["headrace"]} if row.against in rows else {}
    elif row.against != "quickest":
        others = {peer: own for peer, own in others.items() if peer == row.against}
    if "headrace" not in times or not others:
        return None
    best = [min(round) for round in zip(*others.values(), strict=True)]
    ratios = [own / other for own, other in zip(times["headrace"], best, strict=True)]
    found = {"is": round(statistics.median(ratios), 3), "all": [round(r, 3) for r in ratios]}
    return found | {"against": row.against, "must": row.must}


def _mixed(servers: list[Server], rounds: int) -> list[dict[str, Any]]:
    """Each server as it is; Headrace at the gap that OpenVINO has, at its default, and off."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    by_name = {server.peer: server for server in servers}
    for number in range(rounds + 1):
        targets = ["default", "off"]
        for peer in ("openvino", "llama.cpp", "headrace"):
            for target in targets if peer == "headrace" else [""]:
                if peer not in by_name:
                    continue
                seed = 1000 * number
                answer = by_name[peer].ask(**_LOAD, seed=seed, target=target)
                p99 = peer_report.p99(answer["gaps_ms"])
                label = "equal" if target not in ("", "default", "off") else target
                said = f"p99 {p99:.0f} ms, first token {answer['first_s']:.1f} s"
                _say(f"{MIXED}: {peer} {label} {said}{'' if number else ' (warm-up)'}")
                if peer == "openvino":
                    targets = [f"{p99:.0f}", *targets]
                if number:
                    runs.setdefault((peer, label), []).append(answer | {"target": target})
    return [peer_report.mixed_row(*key, answers) for key, answers in runs.items()]


def _about(given: argparse.Namespace) -> dict[str, Any]:
    import torch

    from headrace_kernels import choose_instructions

    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "began": time.time(),
        "revision": revision,
        "processor": _processor(),
        "kernels": choose_instructions("auto", torch.bfloat16).instructions,
        "threads": given.threads,
        "shape": given.shape,
        "rounds": given.rounds,
        "llama_plain_buffers": given.llama_plain_buffers,
        "packages": [*OPENVINO[:1], *LLAMA],
        "rows": {},
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
