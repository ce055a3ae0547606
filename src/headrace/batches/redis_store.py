"""Stores batches in a Redis that servers share; only one server runs a batch at a time."""

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping

from headrace.batches.records import BATCH, STOP
from headrace.batches.store import NO_SIZES, NOBODY, BatchStore, ClaimLost
from headrace.streams.store import Store, StoreStalled
from headrace.streams.stores.redis import RedisStore
from headrace.streams.stores.redis_link import ANSWER_S, LOST, RETRY_S, Argument, Link

CLAIM_MS = 6000
PART_BYTES = 64 << 20
"""The maximum bytes of a blob in one Redis value. Redis allows up to 512 MB per value."""
UPLOAD_S = 24 * 3600
"""An upload is deleted this many seconds after its last append, unless its file was recorded."""
_TRIES = 4
_CANNOT = "The server cannot store files now; try again later."

_CLAIM = """
local holder = redis.call('GET', KEYS[1])
local is_older = holder and string.sub(holder, 1, #ARGV[4]) == ARGV[4] and holder < ARGV[1]
if holder ~= ARGV[1] and (ARGV[3] == '1' or (holder and not is_older)) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_PUT = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[1] then return -1 end
for i = 4, #KEYS do
  if redis.call('STRLEN', KEYS[i]) < tonumber(ARGV[i]) then return -1 end
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
local number = 0
while redis.call('EXISTS', KEYS[3] .. ':' .. number) == 1 do
  redis.call('PERSIST', KEYS[3] .. ':' .. number)
  number = number + 1
end
return 1
"""
_APPEND = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[1] then return -1 end
local last, writer, append, content = redis.call('GET', KEYS[3]), ARGV[3], ARGV[4], ARGV[5]
if last then
  local its_writer, its_append, its_content = string.match(last, '^(%S+) (%S+) (%S+)$')
  local is_stored = its_append and (its_append >= append or its_content == content)
  if its_writer == writer and is_stored then return 0 end
end
local left, number = ARGV[2], 0
while #left > 0 do
  local key = KEYS[1] .. ':' .. number
  local room = ARGV[6] - redis.call('STRLEN', key)
  if room > 0 then
    redis.call('APPEND', key, string.sub(left, 1, room))
    left = string.sub(left, room + 1)
  end
  number = number + 1
end
if ARGV[1] == '' then
  for part = 0, number - 1 do redis.call('EXPIRE', KEYS[1] .. ':' .. part, ARGV[7]) end
end
redis.call('SET', KEYS[3], writer .. ' ' .. append .. ' ' .. content, 'EX', 3600)
return 1
"""
_REMOVE = """
local number = 0
while redis.call('UNLINK', KEYS[1] .. ':' .. number) == 1 do number = number + 1 end
return redis.call('DEL', KEYS[2])
"""


def redis_batch_store(store: Store) -> BatchStore:
    """Return a batch store in the Redis that this stream store uses."""
    assert isinstance(store, RedisStore)
    claims = _Claims(store)
    return BatchStore(RedisRecords(store, claims), RedisBlobs(store, claims))


async def _ask(link: Link, *words: Argument) -> object:
    """Run a command that can be repeated safely; return the answer.

    Raises StoreStalled if no attempt is answered.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(*LOST):
            async with asyncio.timeout(ANSWER_S):
                return await link.command(*words)
        await asyncio.sleep(RETRY_S)
    raise StoreStalled(_CANNOT)


class _Claims:
    """The value that this server stores in Redis for each batch that it has claimed.

    Each new claim gets a higher value. So a write of an earlier run that arrives late changes
    nothing in a later run of the same server.
    """

    def __init__(self, store: RedisStore) -> None:
        self.server = f"{store.gateway}:"
        self._number = 0
        self._values: dict[str, str] = {}

    def begin(self, id: str) -> None:
        self._number += 1
        self._values[id] = f"{self.server}{self._number:016d}"

    def end(self, id: str) -> None:
        self._values.pop(id, None)

    def value(self, id: str) -> str:
        """Return the value of a claim, or a value that no claim has."""
        return self._values.get(id, self.server)


class RedisRecords:
    """Stores all records of a kind in one Redis hash, with a field for each record."""

    def __init__(self, store: RedisStore, claims: _Claims) -> None:
        self._link = store.link
        self._claims = claims

    async def put(
        self,
        kind: str,
        id: str,
        record: bytes,
        holder: str = NOBODY,
        sizes: Mapping[str, int] = NO_SIZES,
    ) -> None:
        if kind == BATCH and not holder:
            # A repeated command that arrives late must not undo the progress of the batch.
            await _ask(self._link, "HSETNX", self._key(kind), id, record)
            return
        # Storing a file's record makes its uploaded blob permanent. Both have the same id.
        keys = [self._key(kind), claim_key(self._link, holder), blob_key(self._link, id)]
        claim = self._claims.value(holder) if holder else ""
        least = []
        for blob, num_bytes in sizes.items():
            number, num_before = divmod(num_bytes - 1, PART_BYTES)
            keys.append(f"{blob_key(self._link, blob)}:{number}")
            least.append(num_before + 1)
        words: tuple[Argument, ...] = (len(keys), *keys, claim, id, record, *least)
        if await _ask(self._link, "EVAL", _PUT, *words) == -1:
            raise ClaimLost

    async def get(self, kind: str, id: str) -> bytes | None:
        found = await _ask(self._link, "HGET", self._key(kind), id)
        return found if isinstance(found, bytes) else None

    async def now(self) -> int:
        found = await _ask(self._link, "TIME")
        # redis-py turns the two strings of the answer into two numbers.
        assert isinstance(found, tuple)
        return int(found[0])

    async def all(self, kind: str) -> list[bytes]:
        found = await _ask(self._link, "HVALS", self._key(kind))
        return list(found) if isinstance(found, list) else []

    async def remove(self, kind: str, id: str) -> None:
        await _ask(self._link, "HDEL", self._key(kind), id)
        if kind == STOP:
            # The batch has ended.
            self._claims.end(id)

    async def claim(self, id: str, is_held: bool = False) -> bool:
        if not is_held:
            self._claims.begin(id)
        claims = self._claims
        words = (claim_key(self._link, id), claims.value(id), CLAIM_MS, int(is_held), claims.server)
        is_claimed = await _ask(self._link, "EVAL", _CLAIM, 1, *words) == 1
        if not is_claimed:
            claims.end(id)
        return is_claimed

    def _key(self, kind: str) -> str:
        return self._link.key(f"batches:{kind}")


class RedisBlobs:
    """Stores a blob as strings of PART_BYTES, numbered from 0; only the last string grows."""

    def __init__(self, store: RedisStore, claims: _Claims) -> None:
        self._link = store.link
        self._gateway = store.gateway
        self._claims = claims
        self._num_appends = 0

    async def append(self, id: str, data: bytes, holder: str = NOBODY) -> None:
        self._num_appends += 1
        # A repeated command adds nothing, even if Redis receives it only after later appends of the
        # same writer. The server that holds the claim on a batch may also repeat the whole call;
        # then the hash of the data ensures that no line is stored twice.
        number = f"{self._num_appends:016d}"
        content = hashlib.sha256(data).hexdigest() if holder else number
        keys = (self._key(id), claim_key(self._link, holder), self._key(f"{id}:last"))
        claim = self._claims.value(holder) if holder else ""
        writer = claim or self._gateway
        words = (*keys, claim, data, writer, number, content, PART_BYTES, UPLOAD_S)
        if await _ask(self._link, "EVAL", _APPEND, 3, *words) == -1:
            raise ClaimLost

    async def read(self, id: str, start: int, most: int) -> bytes:
        number, start = divmod(start, PART_BYTES)
        key = self._key(f"{id}:{number}")
        found = await _ask(self._link, "GETRANGE", key, start, start + most - 1)
        return found if isinstance(found, bytes) else b""

    async def remove(self, id: str) -> None:
        await _ask(self._link, "EVAL", _REMOVE, 2, self._key(id), self._key(f"{id}:last"))

    def _key(self, id: str) -> str:
        return blob_key(self._link, id)


def blob_key(link: Link, id: str) -> str:
    return link.key(f"batches:blob:{id}")


def claim_key(link: Link, id: str) -> str:
    return link.key(f"batches:claim:{id}")
