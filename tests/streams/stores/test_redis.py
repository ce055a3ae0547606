"""Tests a Redis store shared by two gateways in one process."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.streams.log import LogGone, LogTaken, LogUnsound
from headrace.streams.store import ByConversation, ById, Retention, Stored, StoreStalled
from headrace.streams.stores import redis_lease, redis_link, redis_scripts
from headrace.streams.stores.redis import RedisStore
from headrace.streams.stores.redis_link import risks_of
from headrace.streams.stores.state_dir import StateError
from headrace_common.ids import StreamId
from tools.harness.redis_servers import DURABLE, RedisServer, needs_redis, redis_server
from tools.harness.stream_events import A, B, everything, finish, make_record, redis_url, some

pytestmark = needs_redis


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_lease, "RENEW_S", 0.1)
    monkeypatch.setattr(redis_link, "RETRY_S", 0.02)


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(url)
    try:
        yield store
    finally:
        await store.close()


def with_two(
    test: Callable[[RedisStore, RedisStore], Awaitable[None]],
) -> Callable[[Path], Awaitable[None]]:
    """Run an async test with two gateways of one Redis server."""

    async def both(tmp_path: Path) -> None:
        url = redis_url(tmp_path)
        async with opened(url) as one, opened(url) as other, asyncio.timeout(60):
            await test(one, other)

    both.__name__ = test.__name__
    return both


async def found(store: RedisStore, stream_id: StreamId = A) -> Stored:
    stored = await store.find(ById(stream_id))
    assert stored is not None
    return stored


async def die(store: RedisStore) -> None:
    """Stop a gateway and delete its lease, as if it had been killed."""
    for part in store._parts:
        part.cancel()
    await store.link.command("DEL", store.link.key(f"g:{store.gateway}"))


@with_two
async def test_a_gateway_reads_another_gateways_events_as_they_are_written(
    one: RedisStore, other: RedisStore
) -> None:
    log = (await one.create(make_record(conversation="chat"))).log
    await log.append(0, some(3))
    stored = await other.find(ByConversation("", "chat"))
    assert stored and stored.elsewhere and stored.record == make_record(conversation="chat")
    readers = [asyncio.create_task(everything(stored.log, after)) for after in (-1, 0, 2)]
    for seq in range(3, 100):
        await log.append(seq, some(1, seq))
    await log.append(100, [finish(100)])
    whole = [*some(100), finish(100)]
    assert await asyncio.gather(*readers) == [whole, whole[1:], whole[3:]]
    assert (await found(other)).elsewhere is None


@with_two
async def test_find_sees_every_event_written_before_it(one: RedisStore, other: RedisStore) -> None:
    log = (await one.create(make_record())).log
    for seq in range(50):
        await log.append(seq, some(1, seq))
        assert (await found(other)).log.next_seq == seq + 1


@with_two
async def test_a_stop_reaches_the_writing_gateway(one: RedisStore, other: RedisStore) -> None:
    await one.create(make_record())
    writer = (await found(other)).elsewhere
    assert writer
    await writer.stop("cancelled")
    ask = await one.asked()
    assert (ask.stream_id, ask.what, ask.detail) == (A, "stop", "cancelled")


@with_two
async def test_a_heartbeat_request_reaches_the_writing_gateway(
    one: RedisStore, other: RedisStore
) -> None:
    await one.create(make_record())
    writer = (await found(other)).elsewhere
    assert writer
    writer.beat("comment", 2.5)
    ask = await one.asked()
    assert (ask.what, ask.detail, ask.interval_s) == ("beat", "comment", 2.5)


@with_two
async def test_an_unreadable_message_only_affects_its_own_stream(
    one: RedisStore, other: RedisStore
) -> None:
    unknown = msgspec.msgpack.encode([{"type": "unheard-of"}])
    logs = [(await one.create(make_record(id))).log for id in "ab"]
    readers = [asyncio.create_task(everything((await found(other, id)).log)) for id in (A, B)]
    for channel, message in (("ask", b"\xff"), ("ask", b""), (f"t:{A}", b"0 " + unknown)):
        await one.link.command("PUBLISH", one.link.key(channel), message)
    await logs[1].append(0, [finish(0)])
    assert await readers[1] == [finish(0)]
    with pytest.raises(LogUnsound):
        await readers[0]
    assert not any(part.done() for part in other._parts)


@with_two
async def test_replacing_another_gateways_stream_stops_it(
    one: RedisStore, other: RedisStore
) -> None:
    await one.create(make_record("a", "chat"))
    held = await other.create(make_record("b", "chat"))
    assert held.record.id == A and held.elsewhere
    assert (await other.create(make_record("b", "chat"), replaces=A)).record.id == B
    assert (await one.asked()).detail == "replaced"


@with_two
async def test_a_dead_gateways_streams_are_taken_over_by_another(
    one: RedisStore, other: RedisStore
) -> None:
    log = (await one.create(make_record())).log
    await log.append(0, some(40))
    following = asyncio.create_task(everything((await found(other)).log))
    await die(one)
    (stored,) = await other.orphans()
    assert stored.record.id == A and stored.elsewhere is None and stored.log.next_seq == 40
    await stored.log.append(40, [*some(2, 40), finish(42)])
    assert await following == [*some(42), finish(42)]


@with_two
async def test_a_log_never_has_two_writers(one: RedisStore, other: RedisStore) -> None:
    log = (await one.create(make_record())).log
    await log.append(0, some(2))
    await one.link.command("DEL", one.link.key(f"g:{one.gateway}"))
    (stored,) = await other.unfinished()
    with pytest.raises(LogTaken):
        await log.append(2, some(1, 2))
    await stored.log.append(2, [finish(2)])
    assert await everything((await found(one)).log) == [*some(2), finish(2)]


@with_two
async def test_a_gateway_is_notified_of_a_stream_taken_over_by_another(
    one: RedisStore, other: RedisStore
) -> None:
    await one.create(make_record())
    await one.link.command("DEL", one.link.key(f"g:{one.gateway}"))
    await other.unfinished()
    ask = await one.asked()
    assert (ask.stream_id, ask.what) == (A, "look")


@with_two
async def test_a_gateway_whose_lease_expired_is_not_sure_that_it_writes_its_streams(
    one: RedisStore, other: RedisStore
) -> None:
    await one.create(make_record())
    while not one.surely_writes(A):
        await asyncio.sleep(0.01)
    await die(one)
    await other.orphans()
    # The gateway wakes from a long pause, renews its lease and compares its streams.
    one._lease._ends_at = 0.0
    assert not one.surely_writes(A)
    renewing = asyncio.create_task(one._lease.run())
    while not one._lease.is_held:
        await asyncio.sleep(0.01)
    assert not one.surely_writes(A)
    renewing.cancel()


@with_two
async def test_a_stop_holds_even_if_its_writer_has_died(one: RedisStore, other: RedisStore) -> None:
    await one.create(make_record())
    stored = await found(other)
    await die(one)
    assert stored.elsewhere
    await stored.elsewhere.stop("cancelled")
    (left,) = await other.orphans()
    assert left.stop_code == "cancelled"


@with_two
async def test_readers_on_another_gateway_notice_a_deleted_stream(
    one: RedisStore, other: RedisStore
) -> None:
    await (await one.create(make_record())).log.append(0, some(1))
    reader = asyncio.create_task(everything((await found(other)).log))
    await one.forget(A)
    with pytest.raises(LogGone):
        await reader


@with_two
async def test_a_stream_whose_creation_was_not_confirmed_is_found_again(
    one: RedisStore, other: RedisStore
) -> None:
    # The answer to its creation was lost, and its request was given up.
    await one.create(make_record())
    del one.tails.own[A]
    (stored,) = await one.orphans()
    await stored.log.append(0, [finish(0)])
    assert await everything(stored.log) == [finish(0)]


def test_appends_and_finds_wait_for_a_restart_of_redis(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        async with opened(server.url) as one, opened(server.url) as other, asyncio.timeout(60):
            log = (await one.create(make_record())).log
            await log.append(0, some(2))
            reader = asyncio.create_task(everything((await found(other)).log))
            server.end(signal.SIGKILL)
            append = asyncio.create_task(log.append(2, some(3, 2)))
            finding = asyncio.create_task(found(other))
            await asyncio.sleep(0.1)
            assert not append.done() and not finding.done()
            await asyncio.to_thread(server.start)
            await append
            assert (await finding).log.next_seq >= 2
            await log.append(5, [finish(5)])
            assert await reader == [*some(5), finish(5)]
            assert not one.stalled.is_set()

    with redis_server(tmp_path / "redis", *DURABLE) as server:
        asyncio.run(main(server))


def test_a_long_outage_of_redis_stalls_the_store_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "STALL_S", 0.3)

    async def main(server: RedisServer) -> None:
        async with opened(server.url) as store, asyncio.timeout(60):
            log = (await store.create(make_record())).log
            server.end(signal.SIGKILL)
            append = asyncio.create_task(log.append(0, some(1)))
            await store.stalled.wait()
            with pytest.raises(StoreStalled):
                await store.create(make_record("b"))
            assert not append.done()
            await asyncio.to_thread(server.start)
            await store.writable.wait()
            await append
            await log.append(1, [finish(1)])

    with redis_server(tmp_path / "redis", *DURABLE) as server:
        asyncio.run(main(server))


def test_a_missing_redis_server_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be used"):
        asyncio.run(RedisStore.open(f"unix://{tmp_path}/none"))


def test_risky_redis_settings_are_reported() -> None:
    best = {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory": "0",
        "maxmemory-policy": "noeviction",
    }
    assert risks_of(best) == []
    for weaker in (
        {"appendonly": "no"},
        {"appendfsync": "everysec"},
        {"maxmemory": "9", "maxmemory-policy": "allkeys-lru"},
    ):
        assert len(risks_of(best | weaker)) == 1


@with_two
async def test_gateways_publish_their_state_to_each_other(
    one: RedisStore, other: RedisStore
) -> None:
    one.tell(lambda: b"one")
    other.tell(lambda: b"other")
    await one.create(make_record())

    async def told() -> dict[bytes, tuple[int, bool]]:
        return {it.about: (it.num_streams, it.is_this) for it in await one.gateways()}

    while await told() != {b"one": (1, True), b"other": (0, False)}:
        await asyncio.sleep(0.05)
    await die(other)
    while await told() != {b"one": (1, True)}:
        await asyncio.sleep(0.05)


@with_two
async def test_a_gateway_with_a_wrong_clock_deletes_nothing(
    one: RedisStore, other: RedisStore
) -> None:
    log = (await one.create(make_record())).log
    await log.append(0, [finish(0)])
    a_year_later = time.time() + 365 * 86_400
    totals = await other.sweep(Retention(keep_s=3600), a_year_later)
    assert totals.num_streams == 1
    assert await everything((await found(other)).log) == [finish(0)]


async def take(store: RedisStore, owner: RedisStore) -> Stored:
    """Take over the only stream of a gateway whose lease has expired."""
    taken: list[Stored] = []
    while not taken:
        await owner.link.command("DEL", owner.link.key(f"g:{owner.gateway}"))
        taken = await store.unfinished()
    return taken[0]


def after_creation(store: RedisStore, strike: Callable[[], Awaitable[None]]) -> None:
    """Call `strike` after Redis has created a stream but before the gateway gets the answer."""
    attempt = store.link.attempt

    async def attempt_late(script: str, *arguments: Any, is_again: int = 0) -> Any:
        answer = await attempt(script, *arguments, is_again=is_again)
        if script is redis_scripts.CREATE and not is_again:
            await strike()
        return answer

    store.link.attempt = attempt_late  # type: ignore[method-assign]


@with_two
async def test_a_stream_taken_over_during_its_creation_stays_with_its_new_writer(
    one: RedisStore, other: RedisStore
) -> None:
    async def sleep() -> None:
        await take(other, one)
        raise TimeoutError

    after_creation(one, sleep)
    with pytest.raises(StoreStalled, match="taken over"):
        await one.create(make_record())
    assert (await found(one)).elsewhere


@with_two
async def test_a_stream_deleted_during_its_creation_is_not_created_again(
    one: RedisStore, other: RedisStore
) -> None:
    async def sleep() -> None:
        await (await take(other, one)).log.append(0, [finish(0)])
        await other.forget(A)
        raise TimeoutError

    after_creation(one, sleep)
    with pytest.raises(StoreStalled, match="taken over"):
        await one.create(make_record())
    assert await other.find(ById(A)) is None


@with_two
async def test_a_stop_reaches_a_stream_that_is_still_being_created(
    one: RedisStore, other: RedisStore
) -> None:
    async def stop() -> None:
        writer = (await found(other)).elsewhere
        assert writer
        await writer.stop("cancelled")
        ask = await one.asked()
        assert (ask.stream_id, ask.what, ask.detail) == (A, "stop", "cancelled")

    after_creation(one, stop)
    await one.create(make_record())


@with_two
async def test_a_reader_follows_a_stream_that_is_taken_over_twice(
    one: RedisStore, other: RedisStore
) -> None:
    await (await one.create(make_record())).log.append(0, some(2))
    reader = asyncio.create_task(everything((await found(other)).log))
    second = await take(other, one)
    while other.tails._feed._to_leave:
        await one.link.command("PUBLISH", one.link.key("ask"), "look x")
        await asyncio.sleep(0.01)
    third = await take(one, other)
    with pytest.raises(LogTaken):
        await second.log.append(2, some(1, 2))
    await third.log.append(2, [finish(2)])
    assert await reader == [*some(2), finish(2)]


@with_two
async def test_a_writer_forgets_a_stream_that_another_gateway_deleted(
    one: RedisStore, other: RedisStore
) -> None:
    log = (await one.create(make_record())).log
    await other.forget(A)
    with pytest.raises(LogGone):
        await log.append(0, some(1))
    assert not one.tails.own
    with pytest.raises(LogGone):
        await log.read(-1, 1)


@with_two
async def test_a_stream_created_by_an_expired_gateway_is_taken_over(
    one: RedisStore, other: RedisStore
) -> None:
    await die(one)
    await one.link.command("SREM", one.link.key("gateways"), one.gateway)
    await one.create(make_record())
    (stored,) = await other.orphans()
    assert stored.record.id == A


@with_two
async def test_a_successful_write_ends_a_stall(one: RedisStore, other: RedisStore) -> None:
    one._parts[2].cancel()  # the lease would show the same
    one.link.missed(redis_link.STALL_S, TimeoutError())
    log = (await one.create(make_record())).log
    assert not one.stalled.is_set()
    one.link.missed(redis_link.STALL_S, TimeoutError())
    await log.append(0, some(1))
    assert not one.stalled.is_set()
