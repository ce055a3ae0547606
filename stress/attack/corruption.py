"""Damages a stream store on disk, opens it again, and compares the streams with the originals.

`python -m stress.attack.corruption -n 1000 --servers 30 --seed 0`; exits with 1 if there is a
violation.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.streams.events import AnyEvent
from headrace.streams.log import LogUnsound
from headrace.streams.record import Record
from headrace.streams.store import ByConversation, ById, ByKey
from headrace.streams.stores.sqlite import SqliteStore
from headrace.streams.stores.sqlite_schema import NAME
from headrace_common.ids import StreamId
from tools.harness.stream_events import finish, make_record, some

LIMIT_S = 30.0
NUM_STREAMS = 12


class Original(msgspec.Struct):
    """A stream as it was written."""

    n: int
    record: Record
    events: list[AnyEvent]
    is_live: bool


class Damage(msgspec.Struct):
    """The damage that was done to a copy.

    `rows` holds the numbers of the affected streams; None if any stream may be affected.
    """

    what: str
    rows: set[int] | None
    is_wal: bool = False


# The originals are written to two directories. One was closed properly; in the other, the
# write-ahead log was left behind.


async def write(directory: Path, rng: random.Random) -> list[Original]:
    """Writes streams into `directory`/closed and `directory`/killed, and returns the streams."""
    store = SqliteStore.open(directory / "open")
    originals = []
    for n in range(1, NUM_STREAMS + 1):
        record = make_record(f"stream-{n:032x}", f"chat {n}", f"key {n}", owner="xy"[n % 2])
        log = (await store.create(record)).log
        original = Original(n, record, [], n % 4 == 0)
        for _ in range(rng.randint(1, 6)):
            batch = some(rng.randint(1, 90), log.next_seq)
            await log.append(log.next_seq, batch)
            original.events += batch
        if not original.is_live:
            original.events.append(finish(log.next_seq))
            await log.append(log.next_seq, original.events[-1:])
        originals.append(original)
    killed = directory / "killed"
    shutil.copytree(directory / "open", killed, ignore=shutil.ignore_patterns("*-shm"))
    await store.close()
    (directory / "open").rename(directory / "closed")
    return originals


# Damaged rows.


def _changed(rng: random.Random, data: Any) -> bytes:
    """Flip a bit, cut off or append bytes, or replace all of them."""
    blob = bytearray(data if isinstance(data, bytes) else b"")
    kind = rng.randrange(4) if blob else 2
    if kind == 0:
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del blob[rng.randrange(len(blob)) :]
    elif kind == 2:
        blob += rng.randbytes(rng.randint(1, 9))
    else:
        blob = bytearray(rng.randbytes(len(blob)))
    return bytes(blob)


_ODD = [
    *("NULL", "0", "-1", "1", "7", "1e300", "9223372036854775807", "'x'", "''", "x''", "x'ff00'"),
    *("CAST(x'ff' AS TEXT)", "zeroblob(70000)"),
]
_BLOBS = [("records", "record"), ("batches", "events")]
_BLOBS += [(table, "checksum") for table in ("streams", "records", "batches")]
_NUMBERS = {
    "streams": ["n", "id", "owner", "conversation", "key", "epoch", "next_seq", "num_bytes"],
    "batches": ["n", "first_seq"],
    "records": ["n"],
}
_NUMBERS["streams"] += ["read_at", "ended_at"]


def _pick(db: sqlite3.Connection, rng: random.Random, table: str) -> tuple[int, str]:
    """Draw a row, and return the number of its stream and an SQL condition that finds the row."""
    key = "n, first_seq" if table == "batches" else "n, 0"
    n, first_seq = rng.choice(db.execute(f"SELECT {key} FROM {table}").fetchall())
    return n, f"n = {n}" + (f" AND first_seq = {first_seq}" if table == "batches" else "")


def _change_blob(db: sqlite3.Connection, rng: random.Random) -> set[int]:
    table, column = rng.choice(_BLOBS)
    n, where = _pick(db, rng, table)
    (data,) = db.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()
    db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (_changed(rng, data),))
    return {n}


def _change_number(db: sqlite3.Connection, rng: random.Random) -> set[int]:
    table = rng.choice(["streams", "streams", "batches", "records"])
    column = rng.choice(_NUMBERS[table])
    n, where = _pick(db, rng, table)
    value = rng.choice([*_ODD, f"{column} + 1", f"{column} - 1", f"{column} * 2"])
    if column == "ended_at" and rng.random() < 0.5:
        value = "CASE WHEN ended_at IS NULL THEN 5 END"
    db.execute(f"UPDATE OR IGNORE {table} SET {column} = {value} WHERE {where}")
    return {n, n + 1, n - 1, 2 * n, 0, 1, 7} if column == "n" else {n}


def _swap(db: sqlite3.Connection, rng: random.Random) -> set[int]:
    """Swap the same columns of two rows."""
    table, column = rng.choice([*_BLOBS, ("streams", "id"), ("streams", "owner, conversation")])
    (n, where), (m, other) = _pick(db, rng, table), _pick(db, rng, table)
    columns = f"{column}, checksum" if rng.random() < 0.3 and column != "checksum" else column
    first = db.execute(f"SELECT {columns} FROM {table} WHERE {where}").fetchone()
    second = db.execute(f"SELECT {columns} FROM {table} WHERE {other}").fetchone()
    marks = ", ".join("?" * len(first))
    if table == "streams" and column != "checksum":
        db.execute(f"UPDATE streams SET id = 'for now', conversation = NULL WHERE {where}")
    db.execute(f"UPDATE {table} SET ({columns}) = ({marks}) WHERE {other}", first)
    if table == "streams" and column.startswith("owner"):
        db.execute(f"UPDATE streams SET id = 'lost {n}' WHERE {where}")
    db.execute(f"UPDATE {table} SET ({columns}) = ({marks}) WHERE {where}", second)
    return {n, m}


def _delete(db: sqlite3.Connection, rng: random.Random) -> set[int]:
    table = rng.choice(["streams", "records", "batches", "batches", "batches"])
    n, where = _pick(db, rng, table)
    db.execute(f"DELETE FROM {table} WHERE {where}")
    return {n}


def _duplicate(db: sqlite3.Connection, rng: random.Random) -> set[int]:
    """Insert a copy of a row under another stream or another number."""
    table = rng.choice(["streams", "records", "batches", "batches"])
    (n, where), (m, _) = _pick(db, rng, table), _pick(db, rng, "streams")
    row = list(db.execute(f"SELECT * FROM {table} WHERE {where}").fetchone())
    row[0] = rng.choice([m, 999])
    if table == "batches":
        row[1] = rng.choice([row[1], row[1] + 1, 0, 5000])
    if table == "streams":
        row[0], row[1], row[3], row[4] = 999, "another", None, None
    db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    return {n, m, 999}


def _wedge(db: sqlite3.Connection, rng: random.Random) -> set[int]:
    db.execute(f"UPDATE sqlite_sequence SET seq = {rng.choice(_ODD)}")
    return set()


_ROWS = [_change_blob, _change_blob, _change_number, _change_number, _swap, _delete, _duplicate]
_ROWS += [_wedge]


def wrong_rows(directory: Path, rng: random.Random) -> Damage:
    kind = rng.choice(_ROWS)
    with contextlib.closing(sqlite3.connect(directory / NAME)) as db, db:
        try:
            return Damage(kind.__name__.strip("_"), kind(db, rng))
        # The constraints of the tables rejected the change.
        except sqlite3.IntegrityError:
            return Damage("forbidden", set())


# Damaged pages.


def damaged_pages(directory: Path, rng: random.Random) -> Damage:
    """Overwrite, cut off or move bytes of the database or of its write-ahead log."""
    files = [file for file in (directory / NAME, directory / f"{NAME}-wal") if file.exists()]
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    start = rng.randrange(min(len(data), rng.choice([100, 4096, 1 << 30])))
    length = rng.choice([1, 4, 64, 700, 4096])
    kind = rng.choice(["noise", "zeros", "ones", "cut off", "moved", "flipped"])
    if kind == "cut off":
        del data[start:]
    elif kind == "moved":
        source = rng.randrange(len(data))
        data[start : start + length] = data[source : source + length]
    elif kind == "flipped":
        data[start] ^= 1 << rng.randrange(8)
    else:
        value = {"noise": rng.randbytes(length), "zeros": bytes(length), "ones": b"\xff" * length}
        end = min(start + length, len(data))
        data[start:end] = value[kind][: end - start]
    path.write_bytes(data)
    return Damage(f"{kind} in {path.suffix}", None, "wal" in path.name)


# The damaged store is read.


class Said(logging.Handler):
    """Collects the messages of the server's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.has_traceback = False

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.has_traceback |= record.exc_info is not None


@contextlib.contextmanager
def listening() -> Iterator[Said]:
    said, root = Said(), logging.getLogger("headrace")
    root.addHandler(said)
    root.propagate = False
    try:
        yield said
    finally:
        root.removeHandler(said)
        root.propagate = True


async def _outcome(store: SqliteStore, original: Original, name: Any) -> str:
    """Return "whole", "shorter" (a prefix), "unsound" or "gone"; other results name a violation."""
    try:
        found = await store.find(name)
        if found is None:
            return "gone"
        if found.record != original.record:
            return "ANOTHER STREAM"
        events: list[AnyEvent] = []
        while page := (await found.log.read(len(events) - 1, 50))[0]:
            events += page
    except LogUnsound as unsound:
        return "unsound" if unsound.owner in (None, original.record.names.owner) else "FOREIGN"
    if events == original.events:
        return "whole"
    return "shorter" if events == original.events[: len(events)] else "ALTERED"


async def _serve(directory: Path, originals: list[Original], said: Said) -> dict[int, str]:
    """Opens the store as a server does, and reads each stream by id, conversation and key."""
    store = SqliteStore.open(directory)
    try:
        await store.unfinished()
        outcomes = {}
        for original in originals:
            record, names = original.record, original.record.names
            assert names.conversation and names.key
            outcomes[original.n] = await _outcome(store, original, ById(record.id))
            for name in (
                ByConversation(names.owner, names.conversation),
                ByKey(names.owner, names.key),
            ):
                again = await _outcome(store, original, name)
                if again not in (outcomes[original.n], "gone", "unsound"):
                    outcomes[original.n] = f"BY NAME {again}"
            if outcomes[original.n] == "unsound":
                await store.forget(record.id)
                gone = await _outcome(store, original, ById(record.id))
                outcomes[original.n] = "unsound" if gone == "gone" else "NOT DELETED"
        log = (await store.create(make_record("new", "new", "new"))).log
        await log.append(0, [*some(3), finish(3)])
        found = await store.find(ById(StreamId("new")))
        assert found and (await found.log.read(-1, 9))[0] == [*some(3), finish(3)]
        return outcomes
    finally:
        await store.close()


def violations(damage: Damage, outcomes: dict[int, str], said: Said) -> list[str]:
    found = []
    was_moved = any("is kept as" in line for line in said.lines)
    mark = " is damaged and was ended"
    named = Counter(line.split(mark)[0] for line in said.lines if mark in line)
    for n, outcome in outcomes.items():
        if outcome == "whole" or (was_moved and damage.rows is None and outcome == "gone"):
            continue
        if outcome == "unsound" and named[f"The stream in row {n}"] == 0 and damage.rows is None:
            found.append(f"stream {n} is unsound, and no log line names it")
        may = {"unsound", "gone"} if damage.rows is None or n in damage.rows else set()
        if damage.rows is None and not damage.is_wal:
            may.discard("gone")
        if damage.is_wal:
            may |= {"shorter", "gone"}
        if outcome not in may:
            found.append(f"{n} is {outcome}")
    found += [
        f"{times} log lines name {row}; expected at most 1"
        for row, times in named.items()
        if times > 1
    ]
    if any(word in line for line in said.lines for word in ("stream-0", "chat ", "key ")):
        found.append("the log contains a stream's name")
    return found + (["a traceback"] if said.has_traceback else [])


def corrupt(master: Path, directory: Path, originals: list[Original], seed: int) -> list[str]:
    """Damages one copy of the originals, opens the copy, and returns the faults of the store."""
    rng = random.Random(seed)
    shutil.copytree(master / rng.choice(["closed", "killed"]), directory)
    damage = (wrong_rows if seed % 2 else damaged_pages)(directory, rng)
    with listening() as said:
        try:
            served = asyncio.wait_for(_serve(directory, originals, said), LIMIT_S)
            outcomes = asyncio.run(served)  # type: ignore[arg-type]
            wrong = violations(damage, outcomes, said)
        except Exception as error:
            outcomes, wrong = {}, [f"{type(error).__name__}: {error}"]
    shutil.rmtree(directory)
    tally.update(outcomes.values())
    return [f"seed {seed}, {damage.what}: {one}" for one in wrong]


tally: Counter[str] = Counter()


def run(num: int, seed: int, directory: Path) -> list[str]:
    """Damages `num` copies of one state directory, and opens each copy in this process."""
    originals = asyncio.run(write(directory, random.Random(seed)))
    found = []
    for number in range(num):
        found += corrupt(directory, directory / str(number), originals, seed * 1_000_000 + number)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-n", type=int, default=1000, help="number of damaged stores to open in this process"
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=30,
        help="number of damaged stores to open with a real server",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-corrupt-") as name:
        found = run(options.n, options.seed, Path(name) / "rows")
        print(f"{options.n} in process: {dict(tally)}, {time.monotonic() - began:.0f} s")
        if options.servers:
            # corrupted_servers imports this module, so its import cannot be at the top.
            from stress.attack.corrupted_servers import run_servers

            found += run_servers(options.servers, options.seed, Path(name) / "servers")
    print("\n".join(found) or "no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
