"""Makes small records and events, and opens each kind of store with one call."""

import atexit
import contextlib
import functools
import sqlite3
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from headrace.streams.events import (
    AnyEvent,
    ChoiceEnd,
    Error,
    Finish,
    Timings,
    Tokens,
    Usage,
)
from headrace.streams.log import Log, follow
from headrace.streams.record import Names, Record
from headrace.streams.stores.memory import MemoryStore
from headrace.streams.stores.redis import RedisStore
from headrace.streams.stores.sqlite import SqliteStore
from headrace.streams.stores.sqlite_schema import NAME
from headrace_common.ids import StreamId
from headrace_common.pieces import ChannelPiece
from headrace_common.request import Chat, Request
from headrace_common.sampling import Sampling
from tools.harness.redis_servers import RedisServer

A, B, C = StreamId("a"), StreamId("b"), StreamId("c")


def make_record(
    stream_id: str = "a", conversation: str | None = None, key: str | None = None, owner: str = ""
) -> Record:
    prompt = Chat(messages=({"role": "user", "content": "hello", "image": b"\0"},))
    return Record(
        id=StreamId(stream_id),
        created=1,
        request=Request("/v1/chat/completions", "m", (prompt,), Sampling(logit_bias={3: 0.5})),
        prompts=(array("i", [1, 2, 3]).tobytes(),),
        system_fingerprint="f",
        names=Names(owner, conversation, key, b"digest"),
        is_durable=True,
    )


def tokens(seq: int, text: str = "é") -> Tokens:
    return Tokens(seq=seq, at_ms=seq, choice=0, ids=(seq,), pieces=(ChannelPiece(text),))


def some(num: int, first: int = 0) -> list[AnyEvent]:
    return [tokens(seq) for seq in range(first, first + num)]


def finish(seq: int) -> Finish:
    ends = (ChoiceEnd("stop"),)
    return Finish(seq=seq, at_ms=seq, ends=ends, usage=Usage(3, seq), timings=Timings())


def error(seq: int, retryable: bool) -> Error:
    text = {"code": "x", "type": "x", "message": "x"}
    return Error(seq=seq, at_ms=seq, status=500, retryable=retryable, **text)


async def everything(log: Log, after: int = -1) -> list[AnyEvent]:
    """Return all events of a log that has an end."""
    return [event async for event in follow(log, after)]


@contextlib.asynccontextmanager
async def opened_memory(directory: Path) -> AsyncIterator[MemoryStore]:
    yield MemoryStore()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks the database from a second connection, so that every commit fails as on a full disk."""
    with contextlib.closing(sqlite3.connect(directory / NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@contextlib.asynccontextmanager
async def opened_sqlite(directory: Path) -> AsyncIterator[SqliteStore]:
    """Opens a store in the directory, and closes it even if the test fails."""
    store = SqliteStore.open(directory)
    try:
        yield store
    finally:
        await store.close()


@functools.cache
def shared_redis() -> RedisServer:
    """Return the server that all tests of this process share. Each test uses its own key prefix."""
    folder = tempfile.TemporaryDirectory(prefix="redis-")
    server = RedisServer(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(server.close)
    return server


def redis_url(directory: Path) -> str:
    """Return a URL with which a test sees only its own data."""
    return f"{shared_redis().url}?prefix={directory}:"


@contextlib.asynccontextmanager
async def opened_redis(directory: Path) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(redis_url(directory))
    try:
        yield store
    finally:
        await store.close()
