"""Accidents not caused by clients: no descriptors, a full disk, no engine, damaged data."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.streams.stores.sqlite_schema import NAME
from stress.attack.bodies import CHAT, TEXT, WORST, overrun
from stress.attack.target import Manner, Target, post, until
from stress.http import Call
from stress.site import Site

NUM_DESCRIPTORS = 256
DISK_BYTES = 8 << 20
DRAIN_S = 1.0
# After SIGTERM, a server with unfinished requests must exit within this time.
_STOP_S = DRAIN_S + 6.0
# Within this time a new engine must be running. The server pauses between starts of engines.
_NEXT_S = 60.0
# During an accident, a server may also refuse connections.
_LENIENT = Manner("rude", within_s=12.0)


async def kill_engine(target: Target) -> None:
    before = target.site.engine_pid()
    target.site.kill_engine()
    if not await until(_has_new_engine(target.site, before), _NEXT_S):
        target.fail(f"no new engine {_NEXT_S:g} s after the last kill")


async def kill_loading(target: Target) -> None:
    """Kills each new engine before it is ready, as Linux does to a process when memory runs out."""
    rng = target.rng()
    for _ in range(4):
        before = target.site.engine_pid()
        target.site.kill_engine()
        if not await until(_has_new_engine(target.site, before), _NEXT_S):
            target.fail(f"no new engine {_NEXT_S:g} s after the last kill")
            return
        await asyncio.sleep(rng.uniform(0.0, 0.5))


def _has_new_engine(site: Site, before: int | None) -> Callable[[], bool]:
    return lambda: site.has_ended or site.engine_pid() not in (None, before)


async def freeze(target: Target) -> None:
    """Freezes the engine for less than ten seconds; the same engine must go on afterwards."""
    before = target.site.engine_pid()
    await target.site.freeze_engine(target.rng().uniform(0.5, 5.0))
    if target.site.engine_pid() != before:
        target.fail("an engine that was frozen for less than ten seconds was killed")


async def freeze_long(target: Target) -> None:
    """Freezes the engine for more than ten seconds; the server must replace it."""
    before = target.site.engine_pid()
    await target.site.freeze_engine(13.0)
    if not await until(_has_new_engine(target.site, before), _NEXT_S):
        target.fail("a frozen engine was not replaced")


async def descriptors(target: Target) -> None:
    """Opens idle sockets until no file descriptor is left, and then kills the engine."""
    sockets = []
    with contextlib.suppress(OSError, TimeoutError):
        for _ in range(NUM_DESCRIPTORS + 50):
            async with asyncio.timeout(2.0):
                sockets.append(await asyncio.open_connection("127.0.0.1", target.site.port))
    target.site.kill_engine()
    await asyncio.sleep(2.0)
    for _, writer in sockets:
        writer.transport.abort()


async def disk_full(target: Target) -> None:
    """Cancels, deletes and reads streams while the disk is full."""
    ended = await _stream(target, "ended", b'{"prompt":"one","max_tokens":4}')
    live = await _stream(target, "live", b'{"prompt":"a","max_tokens":3000,"ignore_eos":true}', 1)
    with _full(target.site):
        calls = [
            Call("DELETE", f"/v1/streams/{ended}"),
            Call("DELETE", f"/v1/streams/{live}"),
            Call("DELETE", "/v1/stream?conv_id=live"),
            Call("POST", f"/v1/streams/{live}/cancel"),
            Call("GET", f"/v1/streams/{live}"),
            Call("GET", f"/v1/streams/{ended}/events"),
            post(TEXT, b'{"prompt":"two","max_tokens":4}', ("Idempotency-Key", "new")),
            post(TEXT, b'{"prompt":"two","max_tokens":4}'),
        ]
        talks = [target.talk([call.raw()], _LENIENT) for call in calls]
        for call, talk in zip(calls, await asyncio.gather(*talks), strict=True):
            if not talk.answers:
                target.fail(f"{call.method} {call.path} on a full disk: no answer, {talk.end}")


async def _stream(target: Target, name: str, body: bytes, cut_after: int | None = None) -> str:
    """Starts a durable stream, reads `cut_after` bytes or all of it, and returns its id."""
    if cut_after:
        body = body[:-1] + b',"stream":true}'
    names = (("Idempotency-Key", name), ("X-Conversation-Id", name))
    answer = await target.ask(post(TEXT, body, *names), Manner("good", 30.0, cut_after=cut_after))
    return answer.headers.get("x-stream-id", "none")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a small disk on the folder. If mounting is not permitted, nothing is mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextlib.contextmanager
def _full(site: Site) -> Iterator[None]:
    """Fills the small disk. If no small disk is mounted, keeps the server's files from growing."""
    disk, filler, before = os.statvfs(site.state_dir), site.state_dir / "filler", None
    try:
        if disk.f_blocks * disk.f_frsize == DISK_BYTES:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass
        else:
            limit = (1 << 12, resource.RLIM_INFINITY)
            before = resource.prlimit(site.pid, resource.RLIMIT_FSIZE, limit)
        yield
    finally:
        filler.unlink(missing_ok=True)
        if before is not None:
            resource.prlimit(site.pid, resource.RLIMIT_FSIZE, before)


async def corrupt_rows(target: Target) -> None:
    """Damages or deletes rows of events and records; only the streams of these rows may suffer."""

    def spoil(path: Path, rng: random.Random) -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as base:
            batches = base.execute("SELECT n, first_seq, events FROM batches").fetchall()
            for n, first, events in rng.sample(batches, min(6, len(batches))):
                where = "WHERE n = ? AND first_seq = ?"
                if rng.random() < 0.3:
                    base.execute(f"DELETE FROM batches {where}", (n, first))
                else:
                    values = (_flipped(events, rng), n, first)
                    base.execute(f"UPDATE batches SET events = ? {where}", values)
            records = base.execute("SELECT n, record FROM records").fetchall()
            for n, record in rng.sample(records, min(2, len(records))):
                base.execute(
                    "UPDATE records SET record = ? WHERE n = ?", (_flipped(record, rng), n)
                )

    await _corrupt(target, spoil)


async def corrupt_bytes(target: Target) -> None:
    """Changes bytes of the database file."""

    def spoil(path: Path, rng: random.Random) -> None:
        raw = path.read_bytes()
        path.write_bytes(_flipped(raw, rng))

    await _corrupt(target, spoil)


def _flipped(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 3, 20))):
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
    return bytes(changed)


async def _corrupt(target: Target, spoil: Callable[[Path, random.Random], None]) -> None:
    site = target.site
    ids = [
        *[await _stream(target, f"e{n}", b'{"prompt":"one","max_tokens":9}') for n in range(4)],
        await _stream(target, "l", b'{"prompt":"a","max_tokens":3000,"ignore_eos":true}', 1),
    ]
    await site.bring_down(signal.SIGKILL)
    path = site.state_dir / NAME
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    spoil(path, target.rng())
    site.start()
    if not await site.ready():
        target.fail(f"the server does not start on a damaged store: {site.last_lines[-3:]}")
        return
    for stream_id in ids:
        for method, path in (
            ("GET", f"/v1/streams/{stream_id}"),
            ("GET", f"/v1/streams/{stream_id}/events"),
            ("GET", f"/v1/streams/{stream_id}/events?view=wire"),
            ("DELETE", f"/v1/streams/{stream_id}"),
        ):
            await target.ask(Call(method, path), Manner(cut_after=1 << 16))
    for name in ("e0", "e1", "l"):
        await target.ask(Call("GET", f"/v1/stream?conv_id={name}"), Manner(cut_after=1 << 16))


async def terminate(target: Target) -> None:
    """Sends SIGTERM while the server processes the most expensive requests."""
    site = target.site
    # These clients are expected to lose their connections, so their failures are not reported.
    deaf = Target(site, "", target.folder, 0, lambda problem: None)
    asking = asyncio.gather(
        *(deaf.talk([post(CHAT, overrun()).raw()]) for _ in range(2)), WORST["worst-ids-5m"](deaf)
    )
    await asyncio.sleep(target.rng().uniform(0.1, 1.5))
    began = time.monotonic()
    try:
        code = await site.bring_down(signal.SIGTERM, within_s=20.0)
        took = time.monotonic() - began
        if code or took > _STOP_S:
            target.fail(f"exit code {code}, {took:.1f} s after SIGTERM; limit {_STOP_S:g} s")
    except subprocess.TimeoutExpired:
        target.fail("the server did not exit within 20 s after SIGTERM")
        await site.stop(signal.SIGKILL)
    asking.cancel()
    site.start()
    if not await site.ready():
        target.fail(f"the server does not start again: {site.last_lines[-3:]}")


ACCIDENTS = {
    f"accident-{attack.__name__.replace('_', '-')}": attack
    for attack in (
        kill_engine,
        kill_loading,
        freeze,
        freeze_long,
        descriptors,
        disk_full,
        corrupt_rows,
        corrupt_bytes,
        terminate,
    )
}
