"""Gaps between the tokens of a server's streams beside something else: KINDS has what.

    python -m benchmarks.beside schemas|embed|body|prompts|lookups|other-killed|other-prompt [MODEL]
    python -m benchmarks.beside image MODEL
    python -m benchmarks.beside crowd [--streams 200] [--waiting 1000] [--seconds 30]
    python -m benchmarks.beside targets MODEL --out FOLDER [--targets 60 100 200 off] [--prompts 2]
    python -m benchmarks.beside llama MODEL [--rounds 2] [--threads 2]     # make llama-gap
    python -m benchmarks.beside disk MODEL [--rounds 10] [--length 512] [--threads 2]

MODEL is a folder or a name, headrace-mini if none is given. Rounds alone and rounds beside it
alternate on one server, so that whatever else the machine does falls on both. Exits with 1 if the
99th percentile of the gaps beside it is more than 1.5 times the server's stall target. Flags that
are not known here are the server's. The client shares the cores with the server.

"crowd" says instead how late the heartbeats of those are who wait, and how long control routes
take; "targets" measures cold prompts of 2,048 tokens, each stall target on a server of its own, and
writes a file and two pictures; "llama" has one GGUF file served by llama-server (LLAMA_SERVER=PATH
for your own) and by us, all loaded side by side and asked in turn; "disk" has a server that keeps
prefixes on disk in turn with one that does not.
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
from headrace.bench.load import Background, Injector, PromptSource
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
    """The URL of a server of its own, stopped at the end."""
    with running_server(str(model), "--state-dir", "none", *flags) as server:
        yield server.url


# what the streams have beside them: one request each, of which no two are alike


class Kind(NamedTuple):
    """`ask` comes again and again, or once a round; with two models `a` is asked, `b` measured."""

    ask: Callable[[httpx.AsyncClient, int], Awaitable[Any]]
    num_streams: int = 4
    is_once: bool = False
    has_two_models: bool = False


async def _post(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text


async def _schema(client: httpx.AsyncClient, number: int) -> None:
    """Close to the largest grammar that is taken: about a second to compile."""
    fields = {f"f{number}_{i}": {"enum": [f"{j} of {i}" for j in range(4)]} for i in range(2200)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    schema["additionalProperties"] = False
    await _post(client, TEXT, {"prompt": "Hi", "max_tokens": 1, "guided_json": schema})


async def _embed(client: httpx.AsyncClient, number: int) -> None:
    """The largest batch there is."""
    inputs = [f"{number} of a batch, {i} of its inputs" for i in range(2048)]
    await _post(client, "/v1/embeddings", {"input": inputs})


async def _image(client: httpx.AsyncClient, number: int) -> None:
    """40 megapixels."""
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
    """32 MiB, which is answered with 400: the prompt is too long."""
    sent = json.dumps({"prompt": "x" * (32 * 2**20 - 100), "max_tokens": 1}).encode()
    await client.post(TEXT, content=sent, headers={"Content-Type": "application/json"})


async def _prompts(client: httpx.AsyncClient, number: int) -> None:
    await client.post(TEXT, json={"prompt": ["Hi"] * 1024, "max_tokens": 1})


async def _lookup(client: httpx.AsyncClient, number: int) -> None:
    """1,000 conversations, which the first lookup makes."""
    names = [f"c{i}" for i in range(1000)]
    for name in names if number == 0 else ():
        body = {"prompt": "Hi", "max_tokens": 1, "stream": True}
        await client.post(TEXT, json=body, headers={"X-Conversation-Id": name})
    await _post(client, "/v1/streams/lookup", {"conversation_ids": names})


async def _kill(client: httpx.AsyncClient, number: int) -> None:
    """Until there is another engine."""
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


# a round, and what is seen in it


@contextlib.asynccontextmanager
async def _target(url: str, model: str = "") -> AsyncIterator[Target]:
    target = Target(url, "", secrets.token_hex(8))
    async with target.http:
        await target.learn_model()
        target.model = model or target.model
        yield target


async def _round(target: Target, act: Act | None, prompts: list[list[int]], lead_s: float) -> Round:
    """Streams from start to end, and the act between."""
    background = Background(target, prompts)
    try:
        await background.open()
        settled = time.perf_counter()
        await asyncio.sleep(lead_s)
        done = await act(target) if act else []
        await asyncio.sleep(lead_s)
        ended, lost_at = time.perf_counter(), background.lost_at
    finally:
        await background.close()
    await asyncio.sleep(lead_s)  # a server may take a step until it sees that they are gone
    # a stream that fell silent for good counts with its silence
    begun = done[0].sent if done else settled
    silent = [[ended] if times[-1] < begun else [] for times in background.arrivals]
    pairs = zip(background.arrivals, silent, strict=True)
    return Round(settled, ended, tuple((*a, *b) for a, b in pairs), tuple(done), lost_at)


_PARTS = {BASELINE: "gaps alone", STEADY: "gaps before and after it", STALL: "gaps beside it"}


def _show(name: str, cell: Cell) -> dict[str, Any]:
    """Prints the figures of a cell, in milliseconds."""
    seen = figures(cell)
    for tag, found in seen["gaps_ms"].items():
        print(f"{name}: {_PARTS[tag]}: {found}", flush=True)
    if seen["ttft_ms"]["n"]:
        print(f"{name}: each took {seen['ttft_ms']}")
    if any(round.lost_at is not None for round in cell.rounds):
        print(f"{name}: a stream ended before it was told to")
    return seen


async def compare(url: str, kind: Kind, given: argparse.Namespace) -> bool:
    """Whether the gaps beside it keep the bound."""
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
        await kind.ask(target.http, next(numbers))  # the first has no streams beside it
        await _round(target, nothing, streams, 0.3)  # the engine learns what its steps take
        props = await target.http.get("/props", params={"model": target.model})
        stall_ms = props.json()["max_stall_ms"]
        for _ in range(given.rounds):
            for cell, what in ((alone, nothing), (loaded, act)):
                async with _others(url, kind):
                    cell.rounds += (_by_frame(await _round(target, what, streams, 0.3)),)
    _show(given.kind, alone)
    ratio = _show(given.kind, loaded)["gaps_ms"][STALL]["p99"] / stall_ms
    print(f"p99 beside it is {ratio:.2f} of the target of {stall_ms} ms")
    return ratio <= BOUND


def _by_frame(round: Round) -> Round:
    """Tokens of one frame count once."""
    return replace(round, streams=tuple(tuple(dict.fromkeys(times)) for times in round.streams))


@contextlib.asynccontextmanager
async def _others(url: str, kind: Kind) -> AsyncIterator[None]:
    """Two streams of model `a`, where there is one."""
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


# the same prompt at several servers


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
        # after each, so that a run that is cut short leaves what it has
        write(given.out / "wall.json", report(runs, options))
        from headrace.bench.plots import draw

        draw(runs, given.out)
    print(table(runs))


def _flags_for(target: str) -> tuple[str, ...]:
    return WHOLE if target == "off" else ("--max-stall-ms", target)


async def llama(given: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Six places of 4,096 positions, at each server."""
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
                cells[name].rounds += (seen,) if number else ()  # the first warms up
    print(f"{machine()}, {commit()}, {threads} threads, milliseconds")
    for name, cell in cells.items():
        seen = _show(name, cell)
        rate = seen["stream_tokens_per_s_in_windows"]
        print(f"{name}: {rate:.1f} tokens/s of the four meanwhile")


async def _prompt_round(url: str, number: int, length: int) -> Round:
    """Four streams, and a prompt that nobody has seen."""
    async with _target(url) as target:
        prompts = PromptSource(number, target.num_vocab)
        act = _prompt_act(prompts, length)
        return await _round(target, act, [prompts.fresh(128) for _ in range(4)], LEAD_S)


async def disk(given: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Pairs of rounds; the gaps count until a second after the prompt's first token."""
    flags += ("--threads", str(given.threads), "--max-model-len", "4096")
    with tempfile.TemporaryDirectory(dir=given.out) as folder, contextlib.ExitStack() as stack:
        own = {"without": (), "with": ("--prefix-cache-dir", folder)}
        opened = {name: serving(given.model, (*own[name], *flags)) for name in own}
        urls = {name: stack.enter_context(context) for name, context in opened.items()}
        cells = {name: Cell(plan=None, num_streams=4, rounds=()) for name in urls}
        for number in range(given.rounds + 1):
            # each goes first in every second pair
            for name in sorted(urls, reverse=bool(number % 2)):
                seen = _by_frame(await _prompt_round(urls[name], number, given.length))
                cells[name].rounds += (seen,) if number else ()  # the first warms up
        written = _num_bytes(Path(folder))
    print(f"{machine()}, {commit()}, prompts of {given.length}, {written / 1e6:.0f} MB written")
    worst = {name: [_p99(round) for round in cell.rounds] for name, cell in cells.items()}
    for name, cell in cells.items():
        _show(f"{name} a disk", cell)
        print(f"{name} a disk: p99 of all gaps {_p99(*cell.rounds):.1f} ms, by round {worst[name]}")
    ratios = sorted(a / b for a, b in zip(worst["with"], worst["without"], strict=True))
    print("p99 with a disk over that without, by pair:", [round(ratio, 3) for ratio in ratios])
    print(f"the median pair {statistics.median(ratios):.3f}")


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


# a crowd, whose streams are read as bytes: one process reads all of them


class Line:
    """One stream, read as it comes; `times` are when something came."""

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
        """Seconds between signs of life from `since` on."""
        return [b - a for a, b in itertools.pairwise(self.times) if a >= since]


def controls(url: str, seconds: float) -> dict[str, list[float]]:
    """Seconds that each route took, one request at a time."""
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
    """Heartbeats are due once a second."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds + 20
    lines = [Line(url) for _ in range(num_active + num_waiting)]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        for line in lines:
            tasks.create_task(line.read(until))
            await asyncio.sleep(0.005)
        await asyncio.sleep(10)  # until all are in, and the engine knows its steps
        since = time.perf_counter()
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # does not wait for our streams
            took = await loop.run_in_executor(other, controls, url, seconds)
        state = (await client.get("/manage/state")).json()
    print(f"{state['running']} streams run, {state['waiting']['requests']} wait")
    late = [max(gap - 1, 0) for line in lines[num_active:] for gap in line.gaps(since)]
    running = [gap for line in lines[:num_active] for gap in line.gaps(since)]
    print("heartbeats of those that wait come late by, in ms:", spread(late))
    print("gaps of those that run:", spread(running))
    print("control routes:", spread(itertools.chain(*took.values())))
    for route, values in took.items():
        print(f"  GET {route}", spread(values))


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("kind", choices=(*KINDS, "crowd", "targets", "llama", "disk"))
    parser.add_argument("model", nargs="?", default="headrace-mini")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="of a round; 8, and 30 of a crowd")
    parser.add_argument("--streams", type=int)
    parser.add_argument("--waiting", type=int, default=1000, help="of a crowd")
    parser.add_argument("--targets", nargs="+", default=("60", "100", "200", "off"), metavar="MS")
    parser.add_argument("--prompts", type=int, help="per target, instead of six")
    parser.add_argument("--length", type=int, default=512, help="of the prompts; for disk")
    parser.add_argument("--threads", type=int, default=2, help="of a server; for llama and disk")
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
