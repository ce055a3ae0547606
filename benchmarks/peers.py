"""Compares Headrace with OpenVINO GenAI and llama.cpp, with the same weights and the same rows.

    python -m benchmarks.peers [--rounds 3] [--out FOLDER] [--publish]
    python -m benchmarks.peers --shape small --rounds 1    # tries the script itself
    python -m benchmarks.peers --prepare                   # environments and models only
    python -m benchmarks.peers --isa avx2 [--resume]       # as on a machine without AVX-512
    python -m benchmarks.peers --resume --rows mixed --rounds 3 --target 950

The first run creates an environment for each peer, builds llama.cpp for this machine and writes
all models; this takes half an hour on two cores. Then all servers are loaded at the same time
with the same number of threads. Each round measures a row on one server after another; SIGSTOP
pauses the other servers meanwhile. HTTP is not involved; each server's own scheduler decides what a
step computes. Keys and values are stored in two bytes each, or in four by OpenVINO without
bfloat16. Each server reports the instructions that it really uses, and a server that
does not respect `--isa` is left out. A row is written to the report as soon as the row is
measured, and `--resume` continues after the last row. `--publish` writes JSON, a picture and a
page into docs/contribute/benchmarks.
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
# The number of decode steps in each measurement.
_STEPS = 24
# OpenVINO's step size while other streams run.
_STEP_TOKENS = 64


_KINDS = ("bf16", "8bit", "4bit")


class PeerRow(NamedTuple):
    """A measured row. `must` limits Headrace's time divided by the time of `against`."""

    models: str
    command: dict[str, Any]
    # Name of a peer, "quickest" for the fastest peer, or name of another row of Headrace.
    against: str = "quickest"
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
    """Return the rows. For AVX2, the limit of prompt rows is the fastest other server's time."""
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
    parser.add_argument("--threads", type=int, default=2, help="per server")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native")
    parser.add_argument(
        "--target", nargs="*", type=int, default=(), help="of Headrace in the mixed row, in ms"
    )
    parser.add_argument("--resume", action="store_true", help="skip rows of the last report")
    parser.add_argument(
        "--llama-plain-buffers", action="store_true", help="avoid crashing weight layouts; slower"
    )
    parser.add_argument("--build", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, default=Path("build/peers/report"))
    parser.add_argument("--publish", action="store_true", help="write the page of the docs")
    parser.add_argument("--prepare", action="store_true", help="make environments and models only")
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
        peer_report.publish(report, ROOT / "docs" / "contribute")
    print(peer_report.markdown(report))


def _commands(setup: Setup, kind: str, given: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command that starts each server with the models of a kind."""
    threads, found = str(given.threads), {}
    forms = {"8bit": ("int8", "Q8_0"), "4bit": ("int4", "Q4_K_M")}
    form, file = forms.get(kind, ("bf16", "BF16"))
    if "headrace" in given.peers:
        # In 4 bits, Headrace reads the same file as llama.cpp.
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
    """A process of side.py. The process runs only while it answers a command."""

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
        # A stopped process cannot take a core from the next server.
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(line)


@contextlib.contextmanager
def _started(
    commands: dict[str, list[str]], isa: str, report: dict[str, Any]
) -> Iterator[list[Server]]:
    """Start the servers that respect `isa`; record in the report what each server uses."""
    environment = {} if isa == "native" else _held_to_avx2()
    with contextlib.ExitStack() as stack:
        servers = []
        for peer, command in commands.items():
            server = Server(peer, command, environment)
            stack.callback(server.close)
            if environment and not _is_held(server.uses):
                report["left_out"][peer] = server.uses
                _say(f"{peer} is left out: it cannot be limited to {isa} and uses {server.uses}")
                server.close()
                continue
            uses = report["uses"].setdefault(peer, [])
            uses += [server.uses] if server.uses not in uses else []
            servers.append(server)
        yield servers


def _held_to_avx2() -> dict[str, str]:
    """Return variables that keep servers from using AVX-512; none if the processor lacks AVX-512.

    llama.cpp is built without AVX-512, and OpenVINO's products respect oneDNN's limit.
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
    """Return whether a server is limited to AVX2.

    A server that reports no instructions uses all instructions of the processor, so the server is
    not limited.
    """
    said = uses.lower()
    return "avx2" in said and not any(wide in said for wide in ("512", "amx"))


def _row(name: str, servers: list[Server], rounds: int) -> dict[str, Any]:
    """Return milliseconds by server and round. The first round warms up and is left out."""
    times: dict[str, list[float]] = {server.peer: [] for server in servers}
    command = ROWS[name].command
    for number in range(rounds + 1):
        # Each cold prompt is new. All rounds decode with the same contexts, so the contexts are
        # computed only once.
        seed = 1000 * number if command["do"] == "prompt" else 1
        for server in servers:
            answer = server.ask(**command, seed=seed)
            took = statistics.median(answer) if isinstance(answer, list) else answer
            _say(f"{name}: {server.peer} {took:.1f} ms{'' if number else ' (warm-up)'}")
            if number:
                times[server.peer].append(round(took, 2))
    return {"ms": times}


def _ratio(row: PeerRow, rows: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the median of the rounds' ratios."""
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
    """Measure each server while streams and a prompt run at the same time.

    Headrace is measured with OpenVINO's 99th percentile as its target, with each target in `asked`,
    with its default, and with target off.
    """
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
        # For each peer, the instructions that the peer reported.
        "uses": {},
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
