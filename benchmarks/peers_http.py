"""Compares Headrace with vLLM and llama.cpp's server over HTTP: streams of cold, random prompts.

    python -m benchmarks.peers_http MODEL [--rounds 2] [--loads 1x512+128 4x512+128]

`vllm bench serve` generates the load. The load "16x512+128" has 16 requests that are sent together.
Each has a prompt of 512 tokens and an answer of 128. The generator shares the cores with the
server. Only one server runs at a time; a round measures all servers, and rounds reverse their
order. All servers draw at temperature 1, and otherwise use their defaults. On processors that
cannot multiply bfloat16, vLLM computes in float32, because it is quicker then. llama.cpp reads a
GGUF file with the same weights. Each run is written to OUT/peers_http.json as soon as it ends. If
the script is interrupted, the same command continues after the last run.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.peer_report import p99
from benchmarks.peer_setup import write_gguf
from headrace.bench.report import commit, machine
from tools.harness.llama_server import llama_server
from tools.harness.processes import free_port
from tools.harness.servers import running_server
from tools.harness.sse import data_of

_LOADS = ("1x512+128", "4x512+128", "16x512+128", "64x128+64", "4x2048+128")
_NAMES = {"headrace": "Headrace", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
_VLLM = Path("build/vllm-venv")
# The name that clients use for the model.
_SERVED = "peer"
# Headrace would send events without text while a request waits, and the generator would count the
# first of them as the first token.
_EXTRA = {"heartbeat": False}
# vLLM compiles for some minutes when it starts for the first time.
_LOAD_TIMEOUT_S = 900
_FIGURES = {
    "tokens_per_s": "tokens/s",
    "first_p50_s": "first token, s: 50 %",
    "first_p99_s": "99 %",
    "gap_p50_ms": "gap, ms: 50 %",
    "gap_p99_ms": "99 %",
}


class Load(NamedTuple):
    """Requests that are sent at the same time, and the tokens of each prompt and each answer."""

    streams: int
    prompt: int
    answer: int


def _load(name: str) -> Load:
    return Load(*map(int, re.split("[x+]", name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of make_random_model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", nargs="+", default=_LOADS, metavar="STREAMSxPROMPT+ANSWER")
    parser.add_argument("--peers", nargs="+", choices=_NAMES, default=tuple(_NAMES))
    parser.add_argument("--threads", type=int, default=2, help="per server")
    parser.add_argument("--out", type=Path, default=Path("build/peers-http"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file, about = given.out / "peers_http.json", _about(given)
    report = json.loads(file.read_text()) if file.exists() else {"about": about, "runs": {}}
    if report["about"] | {"date": about["date"]} != about:
        raise SystemExit(f"{file} is from another revision or machine. Choose another --out.")
    for number in range(given.rounds):
        for peer in given.peers[:: -1 if number % 2 else 1]:
            runs = report["runs"].setdefault(peer, {})
            missing = [name for name in given.loads if len(runs.get(name, ())) <= number]
            # llama.cpp's server divides its cache by the number of streams, so that each load needs
            # its own server.
            groups = [[name] for name in missing] if peer == "llama.cpp" else [missing]
            for names in filter(None, groups):
                for name, run in _measured(peer, names, number, given):
                    runs.setdefault(name, []).append(run)
                    file.write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))


def _measured(
    peer: str, names: list[str], number: int, given: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start a server, and yield the figures of each load as soon as they are measured."""
    loads = [_load(name) for name in names]
    with _SERVERS[peer](given, loads) as url:
        after = _empty_events(url)
        for name, load in zip(names, loads, strict=True):
            # No two rounds and loads have the same prompts.
            run = _bench(url, load, zlib.crc32(f"{number} {name}".encode()), after, given.model)
            said = ", ".join(f"{key} {run[key]}" for key in _FIGURES)
            print(f"round {number + 1}, {name}, {peer}: {said}", file=sys.stderr, flush=True)
            yield name, run


def _bench(url: str, load: Load, seed: int, after: int, model: Path) -> dict[str, Any]:
    """Run the load generator and return its figures.

    The generator also counts gaps before the `after` events without text at the end of an answer.
    These gaps are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "base-url": url,
            "model": model,
            "served-model-name": _SERVED,
            "dataset-name": "random",
            "random-input-len": load.prompt,
            "random-output-len": load.answer,
            "num-prompts": load.streams,
            "temperature": 1,
            "extra-body": json.dumps(_EXTRA),
            "seed": seed,
            "result-dir": folder,
            "result-filename": "run.json",
        }
        flags = ("--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm")
        command = [str(_VLLM / "bin" / "vllm"), "bench", "serve", *flags]
        command += [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed:\n{done.stderr[-4000:]}")
        run = json.loads((Path(folder) / "run.json").read_text())
    if run["completed"] != load.streams:
        raise SystemExit(f"Some requests failed: {run['errors']}")
    firsts = run["ttfts"]
    gaps = [gap for own in run["itls"] for gap in own[: len(own) - after]]
    found = {
        "tokens_per_s": load.streams * load.answer / run["duration"],
        "first_p50_s": statistics.median(firsts),
        "first_p99_s": p99(firsts),
        "gap_p50_ms": 1000 * statistics.median(gaps),
        "gap_p99_ms": 1000 * p99(gaps),
    }
    rounded = {name: round(value, 3) for name, value in found.items()}
    return rounded | {"seed": seed, "prompt_tokens": run["input_lens"], "gaps": len(gaps)}


def _empty_events(url: str) -> int:
    """Return the number of events without text at the end of an answer."""
    body = _EXTRA | {"model": _SERVED, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=300)
    events = data_of(answer.raise_for_status().text.splitlines())
    texts = [bool(event["choices"][0]["text"]) for event in events if event["choices"]]
    assert texts[0], "An event without text would count as the first token."
    return texts[::-1].index(True)


@contextlib.contextmanager
def _headrace(given: argparse.Namespace, loads: list[Load]) -> Iterator[str]:
    flags = ("--threads", str(given.threads), "--served-model-name", _SERVED)
    # Headrace stores prefixes on disk by default, but the harness only does so in a given folder.
    own = {"XDG_CACHE_HOME": str(given.out.absolute() / "cache")}
    with running_server(str(given.model), *flags, environment=own) as server:
        yield server.url


@contextlib.contextmanager
def _vllm(given: argparse.Namespace, loads: list[Load]) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    cores = f"0-{given.threads - 1}"
    # 4 GiB hold the keys and values of about 18,000 tokens in float32.
    own = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "4"}
    # vLLM only starts if one sequence of the largest length fits into the cache.
    options = ("--max-model-len", "8192", "--dtype", _vllm_format(), "--port", str(port))
    options += ("--served-model-name", _SERVED)
    with (given.out / "vllm.log").open("w") as log:
        process = subprocess.Popen(
            [str(_VLLM / "bin" / "vllm"), "serve", str(given.model), *options],
            env=os.environ | own,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _LOAD_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            time.sleep(1)
        else:
            raise SystemExit(f"vLLM is not ready; see {given.out / 'vllm.log'}.")
        yield url
    finally:
        # The engine is a process of its own. The server has no state to save.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _llama(given: argparse.Namespace, loads: list[Load]) -> Iterator[str]:
    if not (file := given.out / "BF16.gguf").exists():
        write_gguf(given.model, half := given.out / "half.gguf")
        half.rename(file)
    streams = max(load.streams for load in loads)
    # A few more positions, because a prompt's last tokens may be divided differently.
    positions = max(load.prompt + load.answer for load in loads) + 64
    with llama_server(file, given.threads, streams, positions) as url:
        yield url


_SERVERS: dict[str, Callable[..., contextlib.AbstractContextManager[str]]] = {
    "headrace": _headrace,
    "vllm": _vllm,
    "llama.cpp": _llama,
}


def _vllm_format() -> str:
    features = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if "avx512_bf16" in features or "amx_bf16" in features else "float32"


def _about(given: argparse.Namespace) -> dict[str, Any]:
    sites = [str(path) for path in _VLLM.glob("lib/*/site-packages")]
    (vllm,) = importlib.metadata.distributions(path=sites, name="vllm-cpu")
    llama = importlib.metadata.version("xllamacpp")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "revision": commit(),
        "machine": machine(),
        "threads": given.threads,
        "model": given.model.name,
        "servers": f"vLLM {vllm.version} ({_vllm_format()}), llama.cpp of xllamacpp {llama}",
    }


def markdown(report: dict[str, Any]) -> str:
    """Return a table with the median of the rounds for each load and server."""
    about, runs = report["about"], report["runs"]
    lines = [
        f"{about['machine']['cpu']}, {about['threads']} threads, revision {about['revision']}, "
        f"{about['date']}, model {about['model']}; {about['servers']}.",
        "",
        f"| load | server | rounds | {' | '.join(_FIGURES.values())} |",
        "|---" * (len(_FIGURES) + 3) + "|",
    ]
    for name in dict.fromkeys(name for own in runs.values() for name in own):
        for peer in (peer for peer in _NAMES if name in runs.get(peer, {})):
            own = runs[peer][name]
            middle = {key: statistics.median(run[key] for run in own) for key in _FIGURES}
            shown = [f"{it:,.{0 if 'gap' in key else 1}f}" for key, it in middle.items()]
            lines.append(f"| {name} | {_NAMES[peer]} | {len(own)} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
