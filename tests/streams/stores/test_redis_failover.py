"""Tests a Redis that lost its last writes in a failover to a replica that was behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.streams.log import LogConflict, LogTaken, LogUnsound
from headrace.streams.store import ById, Stored
from headrace.streams.stores import redis_lease, redis_link
from headrace.streams.stores.redis import RedisStore
from headrace_common.ids import StreamId
from tools.harness.redis_servers import needs_redis
from tools.harness.stream_events import A, error, everything, finish, make_record, redis_url, some

pytestmark = needs_redis
# A tail keeps at most this many events.
MAX_KEPT = 64
TAKE_OVER = """
local leases = KEYS[1] .. 'g:'
local function is_lease(key) return string.sub(key, 1, #leases) == leases end
for _, key in ipairs(redis.call('KEYS', KEYS[1] .. '*')) do
  if not is_lease(key) then redis.call('DEL', key) end
end
for i = 1, #ARGV, 2 do
  if not is_lease(ARGV[i]) then redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1]) end
end
return 1
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_lease, "RENEW_S", 0.1)
    monkeypatch.setattr(redis_link, "RETRY_S", 0.02)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[list[RedisStore]]:
    """Yield the stores of three gateways of one Redis server."""
    url = redis_url(tmp_path)
    opened = [await RedisStore.open(url) for _ in range(3)]
    async with asyncio.timeout(60):
        yield opened
        for store in opened:
            await store.close()


class Replica:
    """A copy of the current data, to be restored later."""

    @classmethod
    async def copy(cls, store: RedisStore) -> "Replica":
        replica = cls()
        replica._store = store
        command = store.link.command
        keys = await command("KEYS", store.link.key("*"))
        replica._data = {key: await command("DUMP", key) for key in keys}
        return replica

    _store: RedisStore
    _data: dict[bytes, Any]

    async def take_over(self) -> None:
        """Undo all writes since the copy, except those of leases."""
        pairs = [part for pair in self._data.items() if pair[1] is not None for part in pair]
        prefix = self._store.link.key("")
        await self._store.link.command("EVAL", TAKE_OVER, 1, prefix, *pairs)


async def found(store: RedisStore, stream_id: StreamId = A) -> Stored:
    stored = await store.find(ById(stream_id))
    assert stored is not None
    return stored


async def take(store: RedisStore, owner: RedisStore) -> Stored:
    """Take over the only stream of a gateway whose lease has expired."""
    await owner.link.command("DEL", owner.link.key(f"g:{owner.gateway}"))
    (stored,) = await store.unfinished()
    return stored


def silence(*stores: RedisStore) -> None:
    """Stop the renewals of leases, which would notice a change of the data."""
    for store in stores:
        store._parts[2].cancel()


async def test_events_that_redis_lost_are_stored_again(stores: list[RedisStore]) -> None:
    one, other, _ = stores
    log = (await one.create(make_record())).log
    await log.append(0, some(5))
    replica = await Replica.copy(one)
    for seq in range(5, 20):
        await log.append(seq, some(1, seq))
    following = asyncio.create_task(everything((await found(other)).log, 3))
    await replica.take_over()
    await log.append(20, some(2, 20))
    await log.append(22, [finish(22)])
    whole = [*some(22), finish(22)]
    assert await following == whole[4:]
    for store in stores:
        assert await everything((await found(store)).log) == whole


async def test_a_log_that_lost_too_many_events_ends(stores: list[RedisStore]) -> None:
    one, other, third = stores
    log = (await one.create(make_record())).log
    await log.append(0, some(1))
    replica = await Replica.copy(one)
    for seq in range(1, MAX_KEPT + 2):
        await log.append(seq, some(1, seq))
    following = asyncio.create_task(everything((await found(other)).log, MAX_KEPT + 1))
    await asyncio.sleep(0)
    silence(*stores)
    await replica.take_over()
    with pytest.raises(LogConflict):
        await log.append(MAX_KEPT + 2, some(1, MAX_KEPT + 2))
    end = error(MAX_KEPT + 2, retryable=False)
    await log.append(end.seq, [end])
    left = [*some(1), msgspec.structs.replace(end, seq=1)]
    assert await everything((await found(third)).log) == left
    with pytest.raises(LogUnsound):
        await following


async def test_an_epoch_that_redis_assigns_twice_has_one_writer(stores: list[RedisStore]) -> None:
    one, other, third = stores
    await (await one.create(make_record())).log.append(0, some(1))
    silence(*stores)
    replica = await Replica.copy(one)
    first = await take(other, one)
    await replica.take_over()
    second = await take(third, one)
    with pytest.raises(LogTaken):
        await first.log.append(1, some(1, 1))
    await second.log.append(1, [finish(1)])
    assert await everything((await found(third)).log) == [*some(1), finish(1)]
