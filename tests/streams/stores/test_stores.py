"""Tests the contract of every store."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from headrace.streams.log import Log, LogConflict, LogGone
from headrace.streams.record import Record
from headrace.streams.store import (
    ByConversation,
    ById,
    ByItem,
    ByKey,
    ConversationLocked,
    Name,
    Retention,
    Store,
    Totals,
)
from headrace_common.ids import StreamId
from tools.harness.eventually import settle
from tools.harness.redis_servers import needs_redis
from tools.harness.stream_events import (
    A,
    B,
    C,
    error,
    everything,
    finish,
    make_record,
    opened_memory,
    opened_redis,
    opened_sqlite,
    some,
    tokens,
)

Test = Callable[[Store], Awaitable[None]]


def store_test(test: Test) -> Callable[..., None]:
    """Run an async test once with each store."""

    @pytest.mark.parametrize(
        "opened", [opened_memory, opened_sqlite, pytest.param(opened_redis, marks=needs_redis)]
    )
    async def each(
        opened: Callable[[Path], AbstractAsyncContextManager[Store]], tmp_path: Path
    ) -> None:
        async with opened(tmp_path) as store:
            await test(store)

    each.__name__ = test.__name__
    return each


async def holder(store: Store, name: Name) -> str | None:
    found = await store.find(name)
    return found.record.id if found else None


async def conflict(log: Log, expected_seq: int) -> None:
    with pytest.raises(LogConflict):
        await log.append(expected_seq, some(1, expected_seq))


@store_test
async def test_appended_events_are_read_unchanged(store: Store) -> None:
    created = await store.create(make_record())
    await created.log.append(0, some(2))
    await created.log.append(2, [])
    await created.log.append(2, [finish(2)])
    found = await store.find(ById(A))
    assert found and found.record == created.record == make_record()
    assert await everything(found.log) == [*some(2), finish(2)]
    assert found.log.next_seq == 3


@store_test
async def test_a_settled_log_includes_the_events_of_a_cancelled_append(
    store: Store,
) -> None:
    log = (await store.create(make_record())).log
    appending = asyncio.create_task(log.append(0, some(2)))
    await settle()
    appending.cancel()
    await log.settle()
    assert (await log.read(-1, 9))[0] == some(2)
    await log.append(2, [finish(2)])
    await log.settle()


@store_test
async def test_a_read_returns_the_events_after_the_cursor_up_to_the_limit(store: Store) -> None:
    log = (await store.create(make_record())).log
    for first in range(0, 300, 3):
        await log.append(first, some(3, first))
    await log.append(300, [finish(300)])
    for reader in (log, (await store.find(ById(A))).log):
        assert await reader.read(-1, 2) == (some(2), False)
        assert await reader.read(100, 5) == (some(5, 101), False)
        assert await reader.read(297, 2) == (some(2, 298), False)
        assert await reader.read(298, 10) == ([tokens(299), finish(300)], True)
        assert await reader.read(300, 10) == ([], True)
        assert await everything(reader, 3) == [*some(296, 4), finish(300)]


@store_test
async def test_waiting_readers_are_woken_by_every_append(store: Store) -> None:
    log = (await store.create(make_record())).log
    found = [await store.find(ById(A)) for _ in range(3)]
    readers = [asyncio.create_task(everything(one.log)) for one in found if one]
    for seq in range(4):
        await log.append(seq, some(1, seq))
    await log.append(4, [finish(4)])
    assert await asyncio.gather(*readers) == [[*some(4), finish(4)]] * 3


@store_test
async def test_a_reader_at_the_end_of_an_ended_log_does_not_wait(store: Store) -> None:
    log = (await store.create(make_record())).log
    await log.append(0, [finish(0)])
    found = await store.find(ById(A))
    assert found and await everything(found.log, after=0) == []


@store_test
async def test_an_append_that_does_not_continue_the_log_is_refused(store: Store) -> None:
    log = (await store.create(make_record())).log
    await conflict(log, 1)
    await log.append(0, some(2))
    await conflict(log, 1)
    await log.append(2, [finish(2)])
    await conflict(log, 3)
    assert await everything(log) == [*some(2), finish(2)]


@store_test
async def test_only_the_last_writer_can_append(store: Store) -> None:
    first = (await store.create(make_record())).log
    found = await store.find(ById(A))
    assert found
    await conflict(found.log, 0)
    (second,) = await store.unfinished()
    await conflict(first, 0)
    assert await holder(store, ById(A)) == A
    await second.log.append(0, [finish(0)])
    assert await everything(first) == [finish(0)]


@store_test
async def test_unfinished_streams_are_returned_oldest_first(store: Store) -> None:
    logs = [(await store.create(make_record(name))).log for name in "cab"]
    await logs[1].append(0, [finish(0)])
    assert [stored.record.id for stored in await store.unfinished()] == [C, B]


@store_test
async def test_a_conversation_is_held_by_its_live_stream(store: Store) -> None:
    log = (await store.create(make_record("a", conversation="chat"))).log
    assert (await store.create(make_record("b", conversation="chat"))).record.id == A
    assert (await store.create(make_record("b", "chat"), replaces=C)).record.id == A
    assert await store.find(ById(B)) is None
    await log.append(0, some(1))  # it is still this writer's


@store_test
async def test_a_request_that_finds_an_existing_stream_cannot_write_its_log(store: Store) -> None:
    await store.create(make_record("a", conversation="chat"))
    await conflict((await store.create(make_record("b", conversation="chat"))).log, 0)
    await conflict((await store.create(make_record("a"))).log, 0)


@store_test
async def test_a_stream_takes_over_the_conversation_of_the_stream_it_replaces(store: Store) -> None:
    await store.create(make_record("a", conversation="chat"))
    assert (await store.create(make_record("b", "chat"), replaces=A)).record.id == B
    assert await holder(store, ByConversation("", "chat")) == B
    assert await holder(store, ById(A)) == A


@pytest.mark.parametrize("opened", [opened_sqlite, pytest.param(opened_redis, marks=needs_redis)])
async def test_the_conversation_of_a_deleted_stream_is_free_after_reopening_the_store(
    opened: Callable[[Path], AbstractAsyncContextManager[Store]], tmp_path: Path
) -> None:
    async with opened(tmp_path) as store:
        await store.create(make_record("a", conversation="chat"))
        await store.create(make_record("b", "chat"), replaces=A)
        await store.forget(B)
    async with opened(tmp_path) as store:
        assert await holder(store, ByConversation("", "chat")) is None
        assert await holder(store, ById(A)) == A


@store_test
async def test_a_conversation_whose_stream_has_ended_can_be_found_and_reused(store: Store) -> None:
    log = (await store.create(make_record("a", conversation="chat"))).log
    await log.append(0, [finish(0)])
    assert await holder(store, ByConversation("", "chat")) == A
    assert (await store.create(make_record("b", conversation="chat"))).record.id == B
    await store.forget(A)
    assert await holder(store, ByConversation("", "chat")) == B


@store_test
async def test_an_idempotency_key_stays_with_its_stream_after_its_end(store: Store) -> None:
    log = (await store.create(make_record("a", "chat", "key"))).log
    assert (await store.create(make_record("b", "chat", "key"), replaces=A)).record.id == A
    await log.append(0, [error(0, retryable=False)])
    assert (await store.create(make_record("b", key="key"))).record.id == A
    assert await holder(store, ByKey("", "key")) == A


@store_test
async def test_a_key_is_free_after_a_retryable_error(store: Store) -> None:
    log = (await store.create(make_record("a", key="key"))).log
    await log.append(0, [error(0, retryable=True)])
    assert await holder(store, ByKey("", "key")) is None
    assert (await store.create(make_record("b", key="key"))).record.id == B
    await store.forget(A)
    assert await holder(store, ByKey("", "key")) == B


@store_test
async def test_a_key_is_free_after_the_error_model_changed(store: Store) -> None:
    log = (await store.create(make_record("a", key="key"))).log
    await log.append(0, [msgspec.structs.replace(error(0, False), code="model_changed")])
    assert (await store.create(make_record("b", key="key"))).record.id == B


@store_test
async def test_a_retryable_error_of_another_stream_does_not_free_a_key(store: Store) -> None:
    await store.create(make_record("a", key="key"))
    log = (await store.create(make_record("b"))).log
    await log.append(0, [error(0, retryable=True)])
    assert await holder(store, ByKey("", "key")) == A


@store_test
async def test_an_item_is_found_in_the_newest_stream_of_its_owner(store: Store) -> None:
    for stream_id, owner, items in (
        *(("a", "x", ("msg_1", "msg_2")), ("b", "x", ("msg_2", "msg_2"))),
        *(("c", "y", ("msg_1", "msg_22")),),
    ):
        record = make_record(stream_id, owner=owner)
        names = msgspec.structs.replace(record.names, items=items)
        await store.create(msgspec.structs.replace(record, names=names))
    assert await holder(store, ByItem("x", "msg_1")) == A
    assert await holder(store, ByItem("x", "msg_2")) == B
    assert await holder(store, ByItem("y", "msg_22")) == C
    for unknown in (ByItem("y", "msg_2"), ByItem("x", "msg"), ByItem("x", "msg_22")):
        assert await holder(store, unknown) is None
    await store.forget(B)
    assert await holder(store, ByItem("x", "msg_2")) == A
    await store.forget(A)
    assert await holder(store, ByItem("x", "msg_2")) is None


@store_test
async def test_conversations_and_keys_belong_to_their_owner(store: Store) -> None:
    await store.create(make_record("a", "chat", "key", owner="x"))
    assert (await store.create(make_record("b", "chat", "key", owner="y"))).record.id == B
    assert await holder(store, ByConversation("x", "chat")) == A
    assert await holder(store, ByKey("y", "key")) == B
    assert await holder(store, ByKey("z", "key")) is None


@store_test
async def test_find_family_returns_a_conversation_and_those_prefixed_with_it(store: Store) -> None:
    chats = ["chat", "chat::m", "chat:::", "chat::", "chat:", "chat:;", "chat2", "cha", "%", None]
    for number, chat in enumerate(chats):
        await store.create(make_record(str(number), chat))
    await store.create(make_record("other", "chat::x", owner="other"))
    family = await store.find_family(ByConversation("", "chat"))
    assert {stored.record.id for stored in family} == {"0", "1", "2", "3"}
    assert await store.find_family(ByConversation("", "nothing")) == []


@store_test
async def test_only_one_of_several_concurrent_requests_gets_a_conversation(store: Store) -> None:
    claims = [store.create(make_record(name, conversation="chat")) for name in "abc"]
    assert len({created.record.id for created in await asyncio.gather(*claims)}) == 1


@store_test
async def test_a_deleted_stream_frees_all_its_names(store: Store) -> None:
    await store.create(make_record("a", "chat", "key"))
    await store.forget(A)
    await store.forget(A)
    for name in (ById(A), ByConversation("", "chat"), ByKey("", "key")):
        assert await store.find(name) is None
    assert (await store.create(make_record("a", "chat", "key"))).log.next_seq == 0


@store_test
async def test_readers_and_the_writer_of_a_deleted_stream_get_an_error(store: Store) -> None:
    log = (await store.create(make_record())).log
    await log.append(0, some(1))
    reader = asyncio.create_task(everything(log))
    await settle()
    await store.forget(A)
    with pytest.raises(LogGone):
        await reader
    await conflict(log, 1)


@store_test
async def test_readers_of_a_deleted_finished_stream_get_an_error(store: Store) -> None:
    await (await store.create(make_record())).log.append(0, [finish(0)])
    found = await store.find(ById(A))
    await store.forget(A)
    await (await store.create(make_record("b"))).log.append(0, some(1))
    with pytest.raises(LogGone):
        await everything(found.log)


@store_test
async def test_a_sweep_evicts_streams_that_ended_too_long_ago(store: Store) -> None:
    logs = [(await store.create(make_record(name))).log for name in "ab"]
    await logs[0].append(0, [finish(0)])
    assert (await store.sweep(Retention(keep_s=60), time.time())).num_streams == 2
    totals = await store.sweep(Retention(keep_s=0), time.time())
    assert (totals.num_live, totals.num_streams) == (1, 1)
    assert await holder(store, ById(A)) is None


@store_test
async def test_a_sweep_beyond_a_cap_evicts_the_least_recently_read(store: Store) -> None:
    for name in "abc":
        await (await store.create(make_record(name))).log.append(0, [finish(0)])
    found = [await store.find(ById(one)) for one in (C, B, A)]
    await store.sweep(Retention(), time.time())
    await everything(found[0].log)
    await store.sweep(Retention(max_streams=2), time.time())
    assert [await holder(store, ById(one)) for one in (A, B, C)] == [A, None, C]


@store_test
async def test_a_sweep_counts_bytes_and_never_evicts_live_streams(store: Store) -> None:
    live = (await store.create(make_record("a"))).log
    await live.append(0, some(1000))
    await (await store.create(make_record("b"))).log.append(0, [finish(0)])
    before = await store.sweep(Retention(), time.time())
    assert before.num_bytes > 30_000
    after = await store.sweep(Retention(max_bytes=30_000), time.time())
    assert (after.num_live, after.num_streams) == (1, 1)
    assert 30_000 < after.num_bytes < before.num_bytes
    await live.append(1000, [finish(1000)])
    assert await store.sweep(Retention(max_bytes=30_000), time.time()) == Totals(0, 0, 0)


@store_test
async def test_a_following_stream_only_takes_over_once_its_predecessor_has_ended(
    store: Store,
) -> None:
    def following(id: str, follows: str) -> Record:
        record = make_record(id, conversation="talk")
        names = msgspec.structs.replace(record.names, follows=StreamId(follows))
        return msgspec.structs.replace(record, names=names)

    with pytest.raises(ConversationLocked):
        await store.create(following(B, A))
    created = await store.create(make_record(A, conversation="talk"))
    with pytest.raises(ConversationLocked):
        await store.create(following(B, A))
    await created.log.append(0, [finish(0)])
    with pytest.raises(ConversationLocked):
        await store.create(following(C, B))
    assert (await store.create(following(B, A))).record.id == B
    with pytest.raises(ConversationLocked):
        await store.create(following(C, A))
    assert await holder(store, ByConversation("", "talk")) == B
