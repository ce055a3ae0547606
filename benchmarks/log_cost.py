"""The cost of a durable log: bytes a stream on disk; an append to a long log against a short.

Run it as `python benchmarks/log_cost.py`; it needs no server and no model, only a quiet disk.
"""

import argparse
import asyncio
import itertools
import os
import platform
import resource
import sqlite3
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from headrace.core.ids import StreamId
from headrace.core.pieces import ChannelPiece
from headrace.core.request import Chat, Request
from headrace.core.sampling import Sampling
from headrace.streams.events import ChoiceEnd, Finish, Timings, Tokens, Usage
from headrace.streams.log import Log
from headrace.streams.record import Record
from headrace.streams.store import ById, Retention
from headrace.streams.stores.sqlite import SqliteStore

AT_ONCE = 500  # streams that are written side by side
ROUND = 200  # appends per measurement


def make_record(number: int, num_prompt: int) -> Record:
    text = "word " * num_prompt
    return Record(
        id=StreamId(f"chatcmpl-{number:032x}"),
        created=int(time.time()),
        request=Request(
            "/v1/chat/completions",
            "m",
            (Chat(messages=({"role": "user", "content": text},)),),
            Sampling(),
        ),
        prompts=(array("i", range(num_prompt)).tobytes(),),
        system_fingerprint="fp",
        is_durable=True,
    )


def token(seq: int) -> Tokens:
    pieces = (ChannelPiece(" word"),)
    return Tokens(seq=seq, at_ms=seq * 20, choice=0, ids=(1000 + seq % 30_000,), pieces=pieces)


def finish(seq: int) -> Finish:
    ends = (ChoiceEnd("stop"),)
    return Finish(seq=seq, at_ms=seq * 20, ends=ends, usage=Usage(1, seq), timings=Timings())


async def write_streams(store: SqliteStore, numbers: range, options: argparse.Namespace) -> None:
    """Streams of `--tokens` tokens, one append each; those beyond `--finished` are left live."""
    records = [make_record(number, options.prompt) for number in numbers]
    logs = [stored.log for stored in await asyncio.gather(*map(store.create, records))]
    for seq in range(options.tokens):
        await asyncio.gather(*(log.append(seq, [token(seq)]) for log in logs))
    done = [log for number, log in zip(numbers, logs, strict=True) if number < options.finished]
    await asyncio.gather(*(log.append(options.tokens, [finish(options.tokens)]) for log in done))


async def bytes_per_stream(directory: Path, options: argparse.Namespace) -> None:
    num_streams = options.finished + options.live
    before = resident_bytes()
    store = SqliteStore.open(directory)
    begun, cpu = time.perf_counter(), time.process_time()
    for start in range(0, num_streams, AT_ONCE):
        await write_streams(store, range(start, min(start + AT_ONCE, num_streams)), options)
    num_appends = num_streams * options.tokens
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    begun = time.perf_counter()
    totals = await store.sweep(Retention(max_streams=num_streams), time.time())
    sweep_s = time.perf_counter() - begun
    memory = resident_bytes() - before
    begun = time.perf_counter()
    await store.find(ById(make_record(1, 0).id))
    find_s = time.perf_counter() - begun
    await store.close()
    on_disk = sum(os.stat(directory / name).st_size for name in os.listdir(directory))
    print(f"{options.finished} finished and {options.live} live streams of {options.tokens} tokens")
    print(f"  on disk   {on_disk / num_streams:9.0f} bytes per stream")
    print(f"  counted   {totals.num_bytes / num_streams:9.0f} bytes per stream")
    print(f"  the process grew by {memory / 2**20:.0f} MiB")
    print(f"  {num_appends} appends, {AT_ONCE} at once: {seconds / num_appends * 1e6:.1f} us each,")
    print(f"  of which {cpu / num_appends * 1e6:.1f} us of CPU in all threads")
    print(f"  a sweep {sweep_s * 1000:.0f} ms, a find {find_s * 1000:.1f} ms")
    begun = time.perf_counter()
    store = SqliteStore.open(directory)
    await store.unfinished()
    print(f"  a start, every page checked: {time.perf_counter() - begun:.2f} s")
    await store.close()


async def append_round(log: Log) -> tuple[float, float]:
    """Seconds of CPU and of wall clock per append, one after the other."""
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(ROUND):
        await log.append(log.next_seq, [token(log.next_seq)])
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return cpu / ROUND, seconds / ROUND


async def grow(log: Log, num_events: int) -> None:
    """One row per event, as a stream would have made them."""
    while log.next_seq < num_events:
        first = log.next_seq
        seqs = range(first, min(first + 2000, num_events))
        await asyncio.gather(*(log.append(seq, [token(seq)]) for seq in seqs))


async def append_cost(directory: Path, options: argparse.Namespace) -> None:
    store = SqliteStore.open(directory)
    numbers = itertools.count()
    long = (await store.create(make_record(next(numbers), 10))).log
    await grow(long, options.long)
    rounds: dict[int, list[tuple[float, float]]] = {1000: [], options.long: []}
    for _ in range(options.rounds):  # turn about, so that a busy disk is busy for both
        short = (await store.create(make_record(next(numbers), 10))).log
        await grow(short, 1000)
        rounds[1000].append(await append_round(short))
        rounds[options.long].append(await append_round(long))
    print(f"an append, median of {options.rounds} rounds of {ROUND}")
    for length, measured in rounds.items():
        cpu, wall = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"  at event {length:9d}: {cpu * 1e6:7.1f} us of CPU, {wall * 1e3:6.2f} ms")
    await store.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finished", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=100, help="per stream")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--long", type=int, default=1_000_000, help="events of the long log")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, SQLite {sqlite3.sqlite_version}")
    for measure in (bytes_per_stream, append_cost):
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(measure(Path(directory), options))


if __name__ == "__main__":
    main()
