"""Measures the gaps between a server's tokens while the server also has an additional load.

    python -m benchmarks.beside schemas|embed|body|prompts|lookups|other-killed|other-prompt [MODEL]
    python -m benchmarks.beside image MODEL
    python -m benchmarks.beside crowd [--streams 200] [--waiting 1000] [--seconds 30]
    python -m benchmarks.beside targets MODEL --out FOLDER [--targets 60 100 200 off] [--prompts 2]
    python -m benchmarks.beside llama MODEL [--rounds 2] [--threads 2]     # make llama-gap
    python -m benchmarks.beside disk MODEL [--rounds 10] [--length 512] [--threads 2]

The table KINDS lists the loads. MODEL is a folder or a name; the default is headrace-mini.
Rounds with and without the load alternate on one server, so that other activity on the machine
affects both. The exit code is 1 if the 99th percentile of the gaps under load is more than 1.5
times the server's stall target. Unknown flags are passed to the server. The client shares the
cores with the server.

"crowd" measures instead how late the heartbeats of queued streams are, and how long control
routes take. "targets" measures cold prompts of 2,048 tokens with each stall target on a
separate server, and writes a file and two pictures. "llama" serves one GGUF file with
llama-server (LLAMA_SERVER=PATH for your own build) and with Headrace. All servers are loaded at
the same time and measured in turn. "disk" alternates between a server that stores prefixes on
disk and a server that does not.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from msgspec.structs import replace

from headrace.bench import mixed
from headrace.bench.figures import BASELINE, STALL, STEADY, figures, gaps, spread
from headrace.bench.load import Background, Injector, PromptSource, run_round
from headrace.bench.profile import PROFILES
from headrace.bench.record import Cell, CellPlan, Injection, Round, ServerRun
from headrace.bench.report import commit, machine, report, table, write
from headrace.bench.target import ServerSaid, Target
from tools.harness.servers import running_server

TEXT = "/v1/completions"
LEAD_S, PATIENCE_S, LIMIT_S = 1.0, 100.0, 300.0
BOUND = 1.5
WHOLE = ("--max-stall-ms", "off", "--max-step-ms", "off", "--max-step-tokens", "4096")
Act = Callable[[Target], Awaitable[list[Injection]]]


@contextlib.contextmanager
def serving(model: Path | str, flags: tuple[str, ...]) -> Iterator[str]:
    """Start a server and yield its URL; stop it at the end."""
    with running_server(str(model), "--state-dir", "none", *flags) as server:
        yield server.url


# The additional load of a server. Each request is different, so no request hits a cache.


class Kind(NamedTuple):
    """A kind of additional load. `ask` is called repeatedly, or once per round if `is_once` is set.

    With two models, `ask` calls model `a` and the gaps of model `b` are measured.
    """

    ask: Callable[[httpx.AsyncClient, int], Awaitable[Any]]
    num_streams: int = 4
    is_once: bool = False
    has_two_models: bool = False


async def _post(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text


async def _schema(client: httpx.AsyncClient, number: int) -> None:
    """Send nearly the largest grammar that is accepted; the server compiles for about a second."""
    fields = {f"f{number}_{i}": {"enum": [f"{j} of {i}" for j in range(4)]} for i in range(2200)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    schema["additionalProperties"] = False
    await _post(client, TEXT, {"prompt": "Hi", "max_tokens": 1, "guided_json": schema})


async def _embed(client: httpx.AsyncClient, number: int) -> None:
    """Send the largest batch that is accepted."""
    inputs = [f"{number} of a batch, {i} of its inputs" for i in range(2048)]
    await _post(client, "/v1/embeddings", {"input": inputs})


async def _image(client: httpx.AsyncClient, number: int) -> None:
    """Send an image with 40 megapixels."""
    url = await asyncio.to_thread(_picture, number)
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": parts}]
    await _post(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def _picture(number: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8000, 5000), (number % 256, 90, 200)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def _body(client: httpx.AsyncClient, number: int) -> None:
    """Send a body of 32 MiB; the answer is 400, because the prompt is too long."""
    sent = json.dumps({"prompt": "x" * (32 * 2**20 - 100), "max_tokens": 1}).encode()
    await client.post(TEXT, content=sent, headers={"Content-Type": "application/json"})


async def _prompts(client: httpx.AsyncClient, number: int) -> None:
    await client.post(TEXT, json={"prompt": ["Hi"] * 1024, "max_tokens": 1})


async def _lookup(client: httpx.AsyncClient, number: int) -> None:
    """Look up 1,000 conversations, which the first lookup creates."""
    names = [f"c{i}" for i in range(1000)]
    for name in names if number == 0 else ():
        body = {"prompt": "Hi", "max_tokens": 1, "stream": True}
        await client.post(TEXT, json=body, headers={"X-Conversation-Id": name})
    await _post(client, "/v1/streams/lookup", {"conversation_ids": names})


async def _kill(client: httpx.AsyncClient, number: int) -> None:
    """Kill the other engine, and wait until a new engine runs."""
    models = (await client.get("/manage/state")).json()["models"]
    (pid,) = (one["engine"]["pid"] for one in models if one["model"] == "a")
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.5)
    await _both_up(client)


async def _long_prompt(client: httpx.AsyncClient, number: int) -> None:
    entries = (await client.get("/models")).json()["data"]
    (length,) = (one["max_model_len"] for one in entries if one["id"] == "a")
    ids = (list(range(5, 105)) * (length // 100 + 1))[: length - 8]
    body = {"model": "a", "prompt": ids, "max_tokens": 1, "cache_prompt": False}
    await _post(client, TEXT, body)


async def _both_up(client: httpx.AsyncClient) -> None:
    for model in "ab":
        await _post(client, TEXT, {"model": model, "prompt": "a", "max_tokens": 1})
    async with asyncio.timeout(LIMIT_S):
        while True:
            models = (await client.get("/manage/state")).json()["models"]
            if all(one["engine"]["state"] == "up" for one in models):
                return
            await asyncio.sleep(0.2)


KINDS = {
    "schemas": Kind(_schema),
    "embed": Kind(_embed),
    "image": Kind(_image),
    "body": Kind(_body, num_streams=8),
    "prompts": Kind(_prompts, num_streams=8),
    "lookups": Kind(_lookup, num_streams=8),
    "other-killed": Kind(_kill, is_once=True, has_two_models=True),
    "other-prompt": Kind(_long_prompt, is_once=True, has_two_models=True),
}


# One round and its figures.


@contextlib.asynccontextmanager
async def _target(url: str, model: str = "") -> AsyncIterator[Target]:
    target = Target(url, "", secrets.token_hex(8))
    async with target.http:
        await target.learn_model()
        target.model = model or target.model
        yield target


async def _round(target: Target, act: Act | None, prompts: list[list[int]], lead_s: float) -> Round:
    """Run streams, and call `act` while the streams run; return the times."""

    async def do() -> list[Injection]:
        return await act(target) if act else []

    round = await run_round(Background(target, prompts), do, lead_s)
    # After the clients have disconnected, the server may take one more step.
    await asyncio.sleep(lead_s)
    # If a stream was silent until the end, count the silence as a gap.
    begun = round.injections[0].sent if round.injections else round.settled
    ended = (round.ended,)
    streams = tuple((*times, *(ended if times[-1] < begun else ())) for times in round.streams)
    return replace(round, streams=streams)


_PARTS = {
    BASELINE: "gaps alone",
    STEADY: "gaps before and after the load",
    STALL: "gaps during the load",
}


def _show(name: str, cell: Cell) -> dict[str, Any]:
    """Print the figures of a cell in milliseconds, and return them."""
    seen = figures(cell)
    for tag, found in seen["gaps_ms"].items():
        print(f"{name}: {_PARTS[tag]}: {found}", flush=True)
    if seen["ttft_ms"]["n"]:
        print(f"{name}: time per load: {seen['ttft_ms']}")
    if any(round.lost_at is not None for round in cell.rounds):
        print(f"{name}: a stream ended too early")
    return seen


async def compare(url: str, kind: Kind, given: argparse.Namespace) -> bool:
    """Return whether the gaps under load stay within the bound."""
    numbers = itertools.count()

    async def act(target: Target) -> list[Injection]:
        done: list[Injection] = []
        until = time.perf_counter() + given.seconds
        while (sent := time.perf_counter()) < until and not (done and kind.is_once):
            await kind.ask(target.http, next(numbers))
            done.append(Injection(sent, time.perf_counter(), 0, is_warm_up=False))
        return done

    async def nothing(target: Target) -> list[Injection]:
        await asyncio.sleep(given.seconds)
        return []

    num = given.streams or kind.num_streams
    alone, loaded = (Cell(plan=None, num_streams=num, rounds=()) for _ in range(2))
    async with _target(url, "b" if kind.has_two_models else "") as target:
        target.http.timeout = httpx.Timeout(LIMIT_S)
        streams = [[5 + n] for n in range(num)]
        if kind.has_two_models:
            await _both_up(target.http)
        # The first request runs without streams, to warm up.
        await kind.ask(target.http, next(numbers))
        # In this round the engine learns how long its steps take.
        await _round(target, nothing, streams, 0.3)
        props = await target.http.get("/props", params={"model": target.model})
        stall_ms = props.json()["max_stall_ms"]
        for _ in range(given.rounds):
            for cell, what in ((alone, nothing), (loaded, act)):
                async with _others(url, kind):
                    cell.rounds += (_by_frame(await _round(target, what, streams, 0.3)),)
    _show(given.kind, alone)
    ratio = _show(given.kind, loaded)["gaps_ms"][STALL]["p99"] / stall_ms
    print(f"p99 during the load is {ratio:.2f} of the target of {stall_ms} ms")
    return ratio <= BOUND


def _by_frame(round: Round) -> Round:
    """Count the tokens of one frame only once."""
    return replace(round, streams=tuple(tuple(dict.fromkeys(times)) for times in round.streams))


@contextlib.asynccontextmanager
async def _others(url: str, kind: Kind) -> AsyncIterator[None]:
    """Run two streams of model `a` if there are two models."""
    if not kind.has_two_models:
        yield
        return
    async with _target(url, "a") as target:
        await _both_up(target.http)
        background = Background(target, [[9], [10]])
        await background.open()
        try:
            yield
        finally:
            await background.close()


# The same prompt on several servers.


def targets(given: argparse.Namespace, flags: tuple[str, ...]) -> None:
    options = mixed.Options(profile=PROFILES["wall"])
    if given.prompts:
        few = replace(options.profile, num_warm_up=1, num_measured=given.prompts)
        options = replace(options, profile=few)
    runs: list[ServerRun] = []
    for target in given.targets:
        own = (*_flags_for(target), *flags)
        label = "off" if target == "off" else f"{target} ms"
        try:
            with serving(given.model, own) as url:
                (run,) = asyncio.run(mixed.measure([(url, label)], options, _say))
        except (ServerSaid, httpx.HTTPError) as error:
            _say(f"{target}: left out: {error or type(error).__name__}")
            continue
        run.flags = own
        runs.append(run)
        # Write the report after each server, so that an interrupted run keeps the results.
        write(given.out / "wall.json", report(runs, options))
        from headrace.bench.plots import draw

        draw(runs, given.out)
    print(table(runs))


def _flags_for(target: str) -> tuple[str, ...]:
    return WHOLE if target == "off" else ("--max-stall-ms", target)


async def llama(given: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Measure llama-server and Headrace, each with six sequences of 4,096 positions."""
    from tools.harness.llama_server import llama_server

    file, threads = _gguf(Path(given.model), given.out), given.threads
    sizes = ("--lane", "llama-cpp", "--threads", str(threads), "--max-model-len", "4096")
    sizes += ("--max-num-seqs", "6", *flags)
    with contextlib.ExitStack() as stack:
        opened = {
            "llama-server": llama_server(file, threads, 6, 4096, 2048),
            "llama-server, `-b 64`": llama_server(file, threads, 6, 4096, 64),
            "Headrace, target 200 ms": serving(file, (*_flags_for("200"), *sizes)),
            "Headrace, target off": serving(file, (*_flags_for("off"), *sizes)),
        }
        urls = {name: stack.enter_context(context) for name, context in opened.items()}
        cells = {name: Cell(plan=None, num_streams=4, rounds=()) for name in urls}
        for number in range(given.rounds + 1):
            for name, url in urls.items():
                seen = await _prompt_round(url, number, 2048 if number else 512)
                # The first round warms up.
                cells[name].rounds += (seen,) if number else ()
    print(f"{machine()}, {commit()}, {threads} threads, milliseconds")
    for name, cell in cells.items():
        seen = _show(name, cell)
        rate = seen["stream_tokens_per_s_in_windows"]
        print(f"{name}: {rate:.1f} tokens/s of the four streams during the prompt")


async def _prompt_round(url: str, number: int, length: int) -> Round:
    """Run four streams and a prompt that no server has seen."""
    async with _target(url) as target:
        prompts = PromptSource(number, target.num_vocab)
        act = _prompt_act(prompts, length)
        return await _round(target, act, [prompts.fresh(128) for _ in range(4)], LEAD_S)


async def disk(given: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Measure rounds with and without a disk, up to a second after the prompt's first token."""
    flags += ("--threads", str(given.threads), "--max-model-len", "4096")
    with tempfile.TemporaryDirectory(dir=given.out) as folder, contextlib.ExitStack() as stack:
        own = {"without": (), "with": ("--prefix-cache-dir", folder)}
        opened = {name: serving(given.model, (*own[name], *flags)) for name in own}
        urls = {name: stack.enter_context(context) for name, context in opened.items()}
        cells = {name: Cell(plan=None, num_streams=4, rounds=()) for name in urls}
        for number in range(given.rounds + 1):
            # The order alternates from pair to pair.
            for name in sorted(urls, reverse=bool(number % 2)):
                seen = _by_frame(await _prompt_round(urls[name], number, given.length))
                # The first round warms up.
                cells[name].rounds += (seen,) if number else ()
        written = _num_bytes(Path(folder))
    print(f"{machine()}, {commit()}, prompts of {given.length}, {written / 1e6:.0f} MB written")
    worst = {name: [_p99(round) for round in cell.rounds] for name, cell in cells.items()}
    for name, cell in cells.items():
        _show(f"{name} a disk", cell)
        print(f"{name} a disk: p99 of all gaps {_p99(*cell.rounds):.1f} ms, by round {worst[name]}")
    ratios = sorted(a / b for a, b in zip(worst["with"], worst["without"], strict=True))
    print(
        "p99 with a disk divided by p99 without a disk, by pair:",
        [round(ratio, 3) for ratio in ratios],
    )
    print(f"median of the pairs: {statistics.median(ratios):.3f}")


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*"))


def _p99(*rounds: Round) -> float:
    return float(spread(gap.seconds for one in rounds for gap in gaps(one))["p99"])


def _prompt_act(prompts: PromptSource, length: int) -> Act:
    plan = CellPlan(name="", prompt_tokens=length, interval_s=0.0, num_warm_up=0, num_measured=1)
    return lambda target: Injector(target, prompts, plan, PATIENCE_S).send(0, 1)


def _gguf(model: Path, folder: Path) -> Path:
    from gguf import GGMLQuantizationType

    from benchmarks.peer_setup import write_gguf

    folder.mkdir(parents=True, exist_ok=True)
    if not (file := folder / "Q8_0.gguf").exists():
        write_gguf(model, half := folder / "half.gguf", GGMLQuantizationType.Q8_0)
        half.rename(file)
    return file


# Many streams at the same time. One process reads all streams, so it reads only bytes.


class Line:
    """A stream that is read as its bytes arrive; `times` has the times of the arrivals."""

    def __init__(self, url: str) -> None:
        self._at = urlsplit(url)
        self.times: list[float] = []

    async def read(self, until: float) -> None:
        body = {"prompt": "Once", "max_tokens": -1, "ignore_eos": True, "stream": True}
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._at.hostname, self._at.port)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {self._at.netloc}\r\nContent-Length: {len(sent)}"
        writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + sent)
        try:
            async with asyncio.timeout_at(until):
                first = await reader.readline()
                assert b" 200 " in first, first
                while await reader.read(65536):
                    self.times.append(time.perf_counter())
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()

    def gaps(self, since: float) -> list[float]:
        """Return the seconds between arrivals from `since` on."""
        return [b - a for a, b in itertools.pairwise(self.times) if a >= since]


def controls(url: str, seconds: float) -> dict[str, list[float]]:
    """Return the seconds that each route took, with one request at a time."""
    routes = ("/health", "/v1/models", "/metrics", "/manage/state", "/slots")
    took: dict[str, list[float]] = {route: [] for route in routes}
    until = time.perf_counter() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.perf_counter() < until:
            for route, times in took.items():
                begun = time.perf_counter()
                client.get(route).raise_for_status()
                times.append(time.perf_counter() - begun)
                time.sleep(0.02)
    return took


async def crowd(url: str, num_active: int, num_waiting: int, seconds: float) -> None:
    """Measure how late heartbeats are. A heartbeat is due every second."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds + 20
    lines = [Line(url) for _ in range(num_active + num_waiting)]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        for line in lines:
            tasks.create_task(line.read(until))
            await asyncio.sleep(0.005)
        # After this time, all requests have arrived, and the engine knows how long its steps take.
        await asyncio.sleep(10)
        since = time.perf_counter()
        # A separate process is not delayed by the streams that this process reads.
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            took = await loop.run_in_executor(other, controls, url, seconds)
        state = (await client.get("/manage/state")).json()
    print(f"{state['running']} streams run, {state['waiting']['requests']} wait")
    late = [max(gap - 1, 0) for line in lines[num_active:] for gap in line.gaps(since)]
    running = [gap for line in lines[:num_active] for gap in line.gaps(since)]
    print("lateness of waiting streams' heartbeats, in ms:", spread(late))
    print("gaps of running streams:", spread(running))
    print("control routes:", spread(itertools.chain(*took.values())))
    for route, values in took.items():
        print(f"  GET {route}", spread(values))


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("kind", choices=(*KINDS, "crowd", "targets", "llama", "disk"))
    parser.add_argument("model", nargs="?", default="headrace-mini")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="per round; default: 8, for crowd 30")
    parser.add_argument("--streams", type=int)
    parser.add_argument("--waiting", type=int, default=1000, help="waiting streams of crowd")
    parser.add_argument("--targets", nargs="+", default=("60", "100", "200", "off"), metavar="MS")
    parser.add_argument("--prompts", type=int, help="prompts per target; default: 6")
    parser.add_argument("--length", type=int, default=512, help="tokens per prompt of disk")
    parser.add_argument("--threads", type=int, default=2, help="per server of llama and disk")
    parser.add_argument("--out", type=Path, default=Path("build/llama-gap"))
    given, rest = parser.parse_known_args()
    given.seconds = given.seconds or (30.0 if given.kind == "crowd" else 8.0)
    flags = tuple(rest)
    if given.kind == "targets":
        targets(given, flags)
    elif given.kind == "llama":
        asyncio.run(llama(given, flags))
    elif given.kind == "disk":
        given.out.mkdir(parents=True, exist_ok=True)
        asyncio.run(disk(given, flags))
    elif given.kind == "crowd":
        active = given.streams or 200
        flags += ("--max-num-seqs", str(active), "--heartbeat-s", "1")
        with serving(given.model, ("--max-num-queued-reqs", "2000", *flags)) as url:
            asyncio.run(crowd(url, active, given.waiting, given.seconds))
    else:
        kind = KINDS[given.kind]
        flags += ("--alias", "a", f"--model=b={given.model}") if kind.has_two_models else ()
        with serving(given.model, ("--max-num-queued-reqs", "2000", *flags)) as url:
            return 0 if asyncio.run(compare(url, kind, given)) else 1
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
