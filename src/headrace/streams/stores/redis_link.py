"""Connects to one Redis server: runs scripts, checks settings, tracks whether writes succeed."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from headrace.streams.store import StoreStalled
from headrace.streams.stores import redis_scripts
from headrace.streams.stores.state_dir import StateError

logger = logging.getLogger(__name__)

RETRY_S = 0.25
# The store counts as stalled after this many seconds without a successful write.
STALL_S = 8.0
# A connection counts as lost after this many seconds without an answer.
ANSWER_S = 4.0
_NUM_CONNECTIONS = 32
_PREFIX = "headrace:"
_STALLED = "The server cannot write its streams now; try again later."

Argument = str | bytes | int

LOST = (RedisError, OSError, TimeoutError)
"""Errors of a command. Redis may have run the command nevertheless."""


_BROKEN = ("is closed", "is already waiting for incoming data")


@contextlib.contextmanager
def broken_as_lost() -> Iterator[None]:
    """Raise ConnectionResetError instead of the RuntimeErrors that a broken connection can cause.

    uvloop raises such an error if a command is written to a connection that was just closed.
    asyncio raises one if two tasks notice a break: the redis client then reconnects in both.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _BROKEN):
            raise
        raise ConnectionResetError(str(error)) from error


class Link:
    """Runs scripts in Redis, and repeats failed scripts.

    After STALL_S without a successful write, scripts raise StoreStalled.
    """

    def __init__(self, url: str) -> None:
        address, self.prefix = _split(url)
        self.stalled = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        # The number of seconds for which writes have failed.
        self._silent_s = 0.0
        try:
            pool = BlockingConnectionPool.from_url(
                address,
                max_connections=_NUM_CONNECTIONS,
                timeout=ANSWER_S,
                protocol=2,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                retry=Retry(NoBackoff(), 0),
            )
        except (ValueError, TypeError) as error:
            raise StateError(
                f"--state-dir: {error}. Write redis://HOST:PORT/DB, and add ?prefix=NAME: to "
                "change the prefix of all keys."
            ) from None
        self.client = Redis.from_pool(pool)

    async def close(self) -> None:
        await self.client.aclose()

    def key(self, name: str) -> str:
        return self.prefix + name

    async def run(
        self, script: str, *arguments: str | bytes | int, is_patient: bool = False
    ) -> Any:
        """Run a script, and repeat the script until Redis answers; return the answer.

        Raises StoreStalled if the store is stalled, unless `is_patient` is set.
        """
        is_again = 0
        while True:
            try:
                return await self.attempt(script, *arguments, is_again=is_again)
            except LOST as error:
                is_again = 1
                if self.stalled.is_set() and not is_patient:
                    raise StoreStalled(_STALLED) from error
            await asyncio.sleep(RETRY_S)

    async def attempt(self, script: str, *arguments: str | bytes | int, is_again: int = 0) -> Any:
        """Run a script once, without retries."""
        text = redis_scripts.full(script)
        digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        keys_and_arguments = (1, self.prefix, is_again, *arguments)
        async with asyncio.timeout(ANSWER_S):
            try:
                return await self.command("EVALSHA", digest, *keys_and_arguments)
            # A server that has just started knows no scripts.
            except NoScriptError:
                return await self.command("EVAL", text, *keys_and_arguments)

    async def command(self, *words: Argument) -> Any:
        """Run any command and return its answer."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            with broken_as_lost():
                return await self.client.execute_command(*words)  # type: ignore[no-untyped-call]
        finally:
            # The redis client may swallow a cancellation while connecting or reading.
            if task.cancelling() > before:
                raise asyncio.CancelledError

    def heard(self) -> None:
        """Record that the server can write."""
        self._silent_s = 0.0
        if self.stalled.is_set():
            logger.warning("The stream store can write again")
            self.stalled.clear()
            self.writable.set()

    def missed(self, seconds: float, error: BaseException) -> None:
        """Add `seconds` to the time for which the server could not write.

        `seconds` must exclude delays of this process's event loop.
        """
        self._silent_s += seconds
        if self._silent_s >= STALL_S and not self.stalled.is_set():
            logger.warning("The stream store cannot write: %s", str(error) or "no answer")
            self.stalled.set()
            self.writable.clear()

    async def check(self) -> list[str]:
        """Return the risks of the server's settings, in sentences.

        Raises StateError if the server cannot be used at all.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.command("PING")
                return await self._risks()
        except LOST as error:
            why = str(error).rstrip(".") or "no answer"
            raise StateError(
                f"--state-dir: the Redis server cannot be used: {why}. Start it, or correct the "
                "address."
            ) from None

    async def _risks(self) -> list[str]:
        settings = {}
        for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy"):
            try:
                answer = await self.command("CONFIG", "GET", name)
            except RedisError:
                return ["Redis refuses CONFIG GET, so the risks of its settings are unknown."]
            values = answer.values() if isinstance(answer, dict) else answer[1::2]
            settings[name] = "".join(
                value.decode() if isinstance(value, bytes) else str(value) for value in values
            )
        return risks_of(settings)


async def risks_at(url: str) -> list[str]:
    """Return the risks of the settings of the server at `url`.

    Raises StateError if the server cannot be used.
    """
    link = Link(url)
    try:
        return await link.check()
    finally:
        await link.close()


def risks_of(settings: dict[str, str]) -> list[str]:
    """Describe how a Redis server with these settings can lose data that was reported as
    durable.
    """
    found = []
    fsync = settings["appendfsync"]
    if settings["appendonly"] != "yes":
        found.append(
            "Redis does not write an append-only file (appendonly no): when it stops, all streams "
            "since its last snapshot are lost. Set appendonly yes and appendfsync always."
        )
    elif fsync != "always":
        lost = "a second" if fsync == "everysec" else "about half a minute"
        found.append(
            f"appendfsync is {fsync}: a power failure or a crash of the machine can lose {lost} of "
            "text that clients have already received. The affected streams end in an error. Set "
            "appendfsync always."
        )
    policy = settings["maxmemory-policy"]
    if settings["maxmemory"] not in ("", "0") and policy != "noeviction":
        found.append(
            f"maxmemory-policy is {policy}: when memory is short, Redis drops parts of streams. "
            "Set noeviction."
        )
    return found


def _split(url: str) -> tuple[str, str]:
    """Split the URL into an address for redis-py and the prefix of all keys."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    prefix = dict(query).get("prefix", _PREFIX)
    rest = urlencode([(name, value) for name, value in query if name != "prefix"])
    return urlunsplit(parts._replace(query=rest)), prefix
