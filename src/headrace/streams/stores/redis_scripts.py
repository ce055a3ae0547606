"""The store's Lua scripts. Each script is one atomic operation on the keys of one prefix.

PREFIXs:ID     hash: a stream's record, names and writer, and the length of its log
PREFIXl:ID     Redis stream: the log, one entry per append; entry N+1-0 starts with event N
PREFIXc:OWNER  sorted set of `<conversation> NUL <stream id>`, read by range
PREFIXk:OWNER  hash: idempotency key to stream id
PREFIXi:OWNER  sorted set of `<item id> NUL <number, 16 digits> NUL <stream id>`, read by range
PREFIXlive     sorted set of the ids of live streams, by age
PREFIXended    sorted set of the ids of ended streams, by the time of the end
PREFIXread     sorted set of stream ids, by the time of the last read
PREFIXbytes    sorted set of stream ids, by size
PREFIXgateways set of gateways
PREFIXg:GATEWAY  string: the gateway's lease, with data for other gateways; expires unless renewed
PREFIXo:GATEWAY  sorted set of the live streams that the gateway writes, by age
PREFIXd:ID     string: the stream was taken over, ended and deleted; expires after an hour

Channels: PREFIXt:ID receives each append to a log, PREFIXask receives requests to writers.

The scripts build their keys themselves, so all keys must be stored on one Redis server. The first
argument of every script is 1 if the call is a retry because an earlier answer was lost.
"""

_COMMON = """
local P, is_again = KEYS[1], ARGV[1] == '1'
local call = redis.call

local function whole(number) return string.format('%.0f', number) end
local function time()
  local t = call('TIME')
  return string.format('%d.%06d', t[1], t[2])
end
local function meta(id) return P .. 's:' .. id end
local function shown(id)
  local found = call('HMGET', meta(id), 'n', 'next', 'ended', 'gateway', 'epoch', 'stop', 'record')
  if not found[1] then return false end
  table.insert(found, 1, id)
  return found
end
local function of_conversation(owner, name)
  local range = {'[' .. name .. '\\0', '(' .. name .. '\\1'}
  local member = call('ZRANGEBYLEX', P .. 'c:' .. owner, range[1], range[2], 'LIMIT', 0, 1)[1]
  return member and string.sub(member, #name + 2)
end
local function of_item(owner, item)
  local range = {'(' .. item .. '\\1', '[' .. item .. '\\0'}
  local member = call('ZREVRANGEBYLEX', P .. 'i:' .. owner, range[1], range[2], 'LIMIT', 0, 1)[1]
  return member and string.sub(member, #item + 19)
end
local function place_of(item, n, id) return string.format('%s\\0%016d\\0%s', item, n, id) end
local function drop_key(id, owner, key)
  if key ~= '' and call('HGET', P .. 'k:' .. owner, key) == id then
    call('HDEL', P .. 'k:' .. owner, key)
  end
end
local function ask_to_stop(id, code)
  if call('HSETNX', meta(id), 'stop', code) == 1 then
    call('PUBLISH', P .. 'ask', 'stop ' .. code .. ' ' .. id)
  end
end
local function take(id, gateway, claim)
  local k = meta(id)
  local before = call('HMGET', k, 'gateway', 'n')
  call('ZREM', P .. 'o:' .. before[1], id)
  call('ZADD', P .. 'o:' .. gateway, before[2], id)
  call('SADD', P .. 'gateways', gateway)
  call('HINCRBY', k, 'epoch', 1)
  call('HSET', k, 'gateway', gateway, 'claim', claim)
  return shown(id)
end
"""

# Returns 1 and the new stream, or 0 and the stream that holds one of the names. Returns -1 if the
# conversation is locked, and -2 if another gateway has taken over the stream of an earlier call.
CREATE = """
local _, id, owner, conversation, key, record, replaces, gateway, claim, items, follows =
  unpack(ARGV)
local k = meta(id)
local exists = call('EXISTS', k) == 1
if exists and not is_again then return {0, shown(id)} end
if exists and call('HGET', k, 'claim') == claim then return {1, shown(id)} end
if exists or (is_again and call('EXISTS', P .. 'd:' .. id) == 1) then return {-2} end
if key ~= '' then
  local holder = call('HGET', P .. 'k:' .. owner, key)
  if holder then return {0, shown(holder)} end
end
if conversation ~= '' then
  local holder = of_conversation(owner, conversation)
  local is_next = holder == follows and call('HGET', meta(follows), 'ended')
  if follows ~= '' and not is_next then return {-1} end
  if holder then
    if not call('HGET', meta(holder), 'ended') then
      if holder ~= replaces then return {0, shown(holder)} end
      ask_to_stop(holder, 'replaced')
    end
    call('ZREM', P .. 'c:' .. owner, conversation .. '\\0' .. holder)
  end
  call('ZADD', P .. 'c:' .. owner, 0, conversation .. '\\0' .. id)
end
if key ~= '' then call('HSET', P .. 'k:' .. owner, key, id) end
local n = call('INCR', P .. 'n')
call('HSET', k, 'n', n, 'next', 0, 'epoch', 1, 'gateway', gateway, 'claim', claim,
  'owner', owner, 'conversation', conversation, 'key', key, 'record', record, 'items', items)
for item in string.gmatch(items, '%S+') do
  call('ZADD', P .. 'i:' .. owner, 0, place_of(item, n, id))
end
call('ZADD', P .. 'live', n, id)
call('ZADD', P .. 'o:' .. gateway, n, id)
call('SADD', P .. 'gateways', gateway)
call('ZADD', P .. 'read', time(), id)
call('ZADD', P .. 'bytes', #record, id)
return {1, shown(id)}
"""

# After a failover, Redis may know an older epoch and count up to the same epoch again. So a writer
# must also be the gateway that Redis knows.
APPEND = """
local gateway, outcomes = ARGV[2], {}
local function was_appended(id, first, num, next_seq, data)
  if not is_again or next_seq < first + num then return false end
  local entry = whole(first + 1) .. '-0'
  local found = call('XRANGE', P .. 'l:' .. id, entry, entry)[1]
  return found and found[2][2] == data
end
local function append(id, epoch, first, num, data, is_end, frees_key)
  local k = meta(id)
  local found = call('HMGET', k, 'epoch', 'next', 'ended', 'gateway', 'owner', 'key')
  if not found[1] then return 'gone' end
  if found[1] ~= epoch or found[4] ~= gateway then return 'taken' end
  local next_seq = tonumber(found[2])
  if was_appended(id, first, num, next_seq, data) then return 'ok' end
  if next_seq < first and not found[3] then return 'behind ' .. found[2] end
  if found[3] or next_seq ~= first then return 'conflict' end
  call('XADD', P .. 'l:' .. id, whole(first + 1) .. '-0', 'e', data)
  call('HSET', k, 'next', whole(first + num))
  call('ZINCRBY', P .. 'bytes', #data, id)
  if is_end then
    local now = time()
    call('HSET', k, 'ended', now)
    call('ZADD', P .. 'ended', now, id)
    call('ZADD', P .. 'read', now, id)
    call('ZREM', P .. 'live', id)
    call('ZREM', P .. 'o:' .. found[4], id)
    if frees_key then drop_key(id, found[5], found[6]) end
  end
  call('PUBLISH', P .. 't:' .. id, whole(first) .. ' ' .. data)
  return 'ok'
end
for i = 3, #ARGV, 7 do
  local id, epoch, first, num, data, is_end, frees_key = unpack(ARGV, i, i + 6)
  table.insert(outcomes, append(
    id, epoch, tonumber(first), tonumber(num), data, is_end == '1', frees_key == '1'))
end
return outcomes
"""

READ = """
local _, id, after, limit = unpack(ARGV)
local found = call('HMGET', meta(id), 'next', 'ended')
if not found[1] then return false end
local log = P .. 'l:' .. id
local first = call('XREVRANGE', log, whole(after + 2), '-', 'COUNT', 1)[1]
return {found[1], found[2], call('XRANGE', log, first and first[1] or '-', '+', 'COUNT', limit)}
"""

FIND = """
local _, kind, owner, name = unpack(ARGV)
local id = name
if kind == 'key' then id = call('HGET', P .. 'k:' .. owner, name) end
if kind == 'conversation' then id = of_conversation(owner, name) end
if kind == 'item' then id = of_item(owner, name) end
local found = id and shown(id)
return found and {found} or {}
"""

FAMILY = """
local _, owner, name = unpack(ARGV)
local found = {}
local function gather(first, last)
  for _, member in ipairs(call('ZRANGEBYLEX', P .. 'c:' .. owner, first, last)) do
    local row = shown(string.match(member, '%z(.*)$'))
    if row then table.insert(found, row) end
  end
end
gather('[' .. name .. '\\0', '(' .. name .. '\\1')
gather('[' .. name .. '::', '(' .. name .. ':;')
return found
"""

FORGET = """
for i = 2, #ARGV do
  local id = ARGV[i]
  local found = call('HMGET', meta(id),
    'owner', 'conversation', 'key', 'gateway', 'n', 'items', 'epoch')
  if found[1] then
    local owner, conversation, key, gateway, n, items, epoch = unpack(found)
    for item in string.gmatch(items or '', '%S+') do
      call('ZREM', P .. 'i:' .. owner, place_of(item, n, id))
    end
    call('ZREM', P .. 'c:' .. owner, conversation .. '\\0' .. id)
    drop_key(id, owner, key)
    for _, set in ipairs({'live', 'ended', 'read', 'bytes', 'o:' .. gateway}) do
      call('ZREM', P .. set, id)
    end
    call('DEL', meta(id), P .. 'l:' .. id)
    -- The gateway that created the stream may have slept since, and may repeat the creation.
    if epoch ~= '1' then call('SET', P .. 'd:' .. id, '', 'EX', 3600) end
    call('PUBLISH', P .. 't:' .. id, 'gone')
  end
end
return 1
"""

TOUCH = """
local now = tonumber(time())
for i = 2, #ARGV, 2 do
  call('ZADD', P .. 'read', 'XX', 'GT', string.format('%.6f', now - ARGV[i]), ARGV[i + 1])
end
return 1
"""

KEPT = """
local found = {time()}
for i, set in ipairs({'bytes', 'read', 'ended'}) do
  found[i + 1] = call('ZRANGE', P .. set, 0, -1, 'WITHSCORES')
end
return found
"""

RENEW = """
local _, gateway, lease_ms, about = unpack(ARGV)
local had = call('EXISTS', P .. 'g:' .. gateway)
call('SET', P .. 'g:' .. gateway, about, 'PX', lease_ms)
call('SADD', P .. 'gateways', gateway)
local missing = {}
for _, other in ipairs(call('SMEMBERS', P .. 'gateways')) do
  if call('EXISTS', P .. 'g:' .. other) == 0 then table.insert(missing, other) end
end
return {had, call('ZCARD', P .. 'o:' .. gateway), missing}
"""

GATEWAYS = """
local found = {}
for _, gateway in ipairs(call('SMEMBERS', P .. 'gateways')) do
  local about = call('GET', P .. 'g:' .. gateway)
  if about then table.insert(found, {gateway, about, call('ZCARD', P .. 'o:' .. gateway)}) end
end
return found
"""

UNFINISHED = """
local _, gateway, claim = unpack(ARGV)
local taken = {}
for _, id in ipairs(call('ZRANGE', P .. 'live', 0, -1)) do
  local writer = call('HGET', meta(id), 'gateway')
  if writer == gateway or call('EXISTS', P .. 'g:' .. writer) == 0 then
    table.insert(taken, take(id, gateway, claim))
  end
end
return taken
"""

TAKE = """
local _, gateway, dead, claim = unpack(ARGV)
local taken = {}
if is_again then
  for _, id in ipairs(call('ZRANGE', P .. 'o:' .. gateway, 0, -1)) do
    if call('HGET', meta(id), 'claim') == claim then table.insert(taken, shown(id)) end
  end
end
if call('EXISTS', P .. 'g:' .. dead) == 1 then return taken end
local num_alive = 0
for _, other in ipairs(call('SMEMBERS', P .. 'gateways')) do
  num_alive = num_alive + call('EXISTS', P .. 'g:' .. other)
end
local left = call('ZCARD', P .. 'o:' .. dead)
local share = math.ceil(left / math.max(1, num_alive))
if left > 0 then
  for _, id in ipairs(call('ZRANGE', P .. 'o:' .. dead, 0, share - 1)) do
    table.insert(taken, take(id, gateway, claim))
  end
else
  call('SREM', P .. 'gateways', dead)
end
return taken
"""

OWNED = """
local _, gateway = unpack(ARGV)
return call('ZRANGE', P .. 'o:' .. gateway, 0, -1)
"""

RECLAIM = """
local _, gateway, claim = unpack(ARGV)
local taken = {}
for i = 4, #ARGV do
  if call('HGET', meta(ARGV[i]), 'gateway') == gateway then
    table.insert(taken, take(ARGV[i], gateway, claim))
  end
end
return taken
"""

STOP = """
local _, id, code = unpack(ARGV)
local found = call('HMGET', meta(id), 'n', 'ended')
if found[1] and not found[2] then ask_to_stop(id, code) end
return 1
"""

STOPS = """
local asked = {}
for i = 2, #ARGV do asked[i - 1] = call('HGET', meta(ARGV[i]), 'stop') end
return asked
"""

RELEASE = """
local _, gateway = unpack(ARGV)
call('DEL', P .. 'g:' .. gateway)
if call('ZCARD', P .. 'o:' .. gateway) == 0 then call('SREM', P .. 'gateways', gateway) end
return 1
"""


def full(script: str) -> str:
    """Return the complete script: the common functions, then `script`."""
    return _COMMON + script
