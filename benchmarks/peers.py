"""Headrace beside OpenVINO GenAI and llama.cpp: the same weights, the same rows, in turn.

    python -m benchmarks.peers [--rounds 3] [--out FOLDER] [--publish]
    python -m benchmarks.peers --shape small --rounds 1    # tries the script itself
    python -m benchmarks.peers --prepare                   # environments and models only
    python -m benchmarks.peers --isa avx2 [--resume]       # as on a machine without AVX-512
    python -m benchmarks.peers --resume --rows mixed --rounds 3 --target 950

The first run makes an environment for each peer, builds llama.cpp natively and writes all models,
which takes half an hour on two cores. Then all servers are loaded side by side, each with the same
number of threads. Each round measures a row on one after another, and those that are not measured
are stopped. No server is measured through HTTP; each one's own scheduler decides what a step
computes. Keys and values have two bytes in all of them, but four in OpenVINO where it has no
bfloat16. Each says what instructions it really uses, and one that `--isa` does not hold is left
out. A row is written to the report as soon as it is measured; `--resume` goes on from there.
`--publish` writes JSON, a picture and the section of docs/benchmarks.md.
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


_KINDS = ("bf16", "8bit", "4bit")


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


def _wanted(isa: str) -> dict[str, PeerRow]:
    """On AVX2 prompts must be as quick as the quickest peer's that it holds."""
    if isa == "native":
        return ROWS
    must = {name: 1.0 if row.command["do"] == "prompt" else None for name, row in ROWS.items()}
    return {name: row._replace(against="quickest", must=must[name]) for name, row in ROWS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, MIXED), default=(*ROWS, MIXED))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of every server")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native")
    parser.add_argument(
        "--target", nargs="*", type=int, default=(), help="of Headrace beside streams, in ms"
    )
    parser.add_argument("--resume", action="store_true", help="leave out rows of the last report")
    parser.add_argument(
        "--llama-plain-buffers", action="store_true", help="where its own layouts crash; slower"
    )
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, default=Path("build/peers/report"))
    parser.add_argument("--publish", action="store_true", help="as the section of the docs")
    parser.add_argument("--prepare", action="store_true", help="environments and models only")
    given = parser.parse_args()
    setup = Setup(given.build, given.shape, given.isa)
    found = given.out / "peers.json"
    report = json.loads(found.read_text()) if given.resume and found.exists() else _about(given)
    rows = [name for name in ROWS if name in given.rows and name not in report["rows"]]
    kinds = [kind for kind in _KINDS if any(ROWS[name].models == kind for name in rows)]
    kinds += [MIXED] if MIXED in given.rows and "mixed" not in report else []
    commands = {kind: _commands(setup, kind, given) for kind in kinds}
    if given.prepare:
        return
    for kind in kinds:
        with _started(commands[kind], given.isa, report) as servers:
            if kind == MIXED:
                report["mixed"] = _mixed(servers, given.rounds, given.target)
                peer_report.keep(report, given.out)
            for name in (name for name in rows if ROWS[name].models == kind):
                report["rows"][name] = _row(name, servers, given.rounds)
                peer_report.keep(report, given.out)
    report["rows"] = {name: report["rows"][name] for name in ROWS if name in report["rows"]}
    for name, row in _wanted(given.isa).items():
        if name in report["rows"]:
            report["rows"][name]["ratio"] = _ratio(row, report["rows"], name)
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
        flags += () if given.isa == "native" else ("--float32",)
        python, model = str(setup.python("openvino")), str(setup.openvino(form))
        found["openvino"] = [python, "-m", "benchmarks.side_openvino", model, threads, *flags]
    if "llama.cpp" in given.peers:
        python, model = str(setup.python("llama.cpp")), str(setup.gguf(file))
        flags = ("--plain-buffers",) if given.llama_plain_buffers else ()
        found["llama.cpp"] = [python, "-m", "benchmarks.side_llama", model, threads, *flags]
    return found


class Server:
    """A process of side.py; it runs only while it is asked."""

    def __init__(self, peer: str, command: list[str], environment: dict[str, str]) -> None:
        path = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
        self.peer = peer
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | environment,
        )
        self.uses: str = self._answer()

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
def _started(
    commands: dict[str, list[str]], isa: str, report: dict[str, Any]
) -> Iterator[list[Server]]:
    """Servers that the instruction set holds; the report gets what each one uses."""
    environment = {} if isa == "native" else _held_to_avx2()
    with contextlib.ExitStack() as stack:
        servers = []
        for peer, command in commands.items():
            server = Server(peer, command, environment)
            stack.callback(server.close)
            if environment and not _is_held(server.uses):
                report["left_out"][peer] = server.uses
                _say(f"{peer} is left out: it cannot be held to {isa}, it uses {server.uses}")
                server.close()
                continue
            uses = report["uses"].setdefault(peer, [])
            uses += [server.uses] if server.uses not in uses else []
            servers.append(server)
        yield servers


def _held_to_avx2() -> dict[str, str]:
    """Variables that keep servers from AVX-512; none where the processor has none.

    llama.cpp is built without it, and OpenVINO's products heed oneDNN's limit.
    """
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    features = llvm.get_host_cpu_features()
    wide = [name for name, has in features.items() if has and name.startswith(("avx512", "amx"))]
    if not wide:
        return {}
    kept = (f"{'+' if has and name not in wide else '-'}{name}" for name, has in features.items())
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return limits | {"NUMBA_CPU_FEATURES": ",".join(kept)}


def _is_held(uses: str) -> bool:
    """One that names no instructions asks the processor, which has more."""
    said = uses.lower()
    return "avx2" in said and not any(wide in said for wide in ("512", "amx"))


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


def _mixed(servers: list[Server], rounds: int, asked: list[int]) -> list[dict[str, Any]]:
    """Each server as it is; Headrace at OpenVINO's gap, as asked, at its default, and off."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    by_name = {server.peer: server for server in servers}
    for number in range(rounds + 1):
        equal, targets = None, [*map(str, asked), "default", "off"]
        for peer in ("openvino", "llama.cpp", "headrace"):
            for target in targets if peer == "headrace" else [""]:
                if peer not in by_name:
                    continue
                seed = 1000 * number
                answer = by_name[peer].ask(**_LOAD, seed=seed, target=target)
                p99 = peer_report.p99(answer["gaps_ms"])
                label = "equal" if target == equal else target
                said = f"p99 {p99:.0f} ms, first token {answer['first_s']:.1f} s"
                _say(f"{MIXED}: {peer} {label} {said}{'' if number else ' (warm-up)'}")
                if peer == "openvino":
                    equal = f"{p99:.0f}"
                    targets.insert(0, equal)
                if number:
                    runs.setdefault((peer, label), []).append(answer | {"target": target})
    return [peer_report.mixed_row(*key, answers) for key, answers in runs.items()]


def _about(given: argparse.Namespace) -> dict[str, Any]:
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "revision": revision,
        "processor": _processor(),
        "isa": given.isa,
        "uses": {},  # by peer, what it said of its instructions
        "left_out": {},
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
