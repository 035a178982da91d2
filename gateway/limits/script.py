"""The script that counts in Redis, and what it keeps there.

All of a tenant's counts are one hash, `forebay:limits:{TENANT}`, and the leases of its requests in
flight one sorted set beside it, `forebay:limits:{TENANT}:leases`, by the microsecond at which they
end. In the hash, with ACCOUNT as `t`, `k:KEY` or `m:MODEL`:

- `ACCOUNT|n`, `ACCOUNT|u`: requests and tokens in the window; `ACCOUNT|h`, `ACCOUNT|l`: its first
  and last bucket; `ACCOUNT|n17…`, `ACCOUNT|u17…`: what is in each
- `ACCOUNT|c`: requests in flight
- `ACCOUNT|d$`, `ACCOUNT|d@`, `ACCOUNT|d^` (a day's; `m` for a month's): nUSD spent or set aside,
  when the period began, and when it was last summed up from the ledger
- `i|ID`: what a request in flight holds
- `e`: the epoch. A hash with another one has lost what the one before it held, and takes no batch
  that was made for that.
- `g|GATEWAY`: its generation, the number of the last batch that was applied, and when

Nothing of this expires by itself: under `volatile-lru` a server that is full of KV would push out
what has a time to live. Every call drops what has passed, and gateways sweep tenants that have gone
quiet (the `sweep` verb), whose names are in the set `forebay:limits:tenants`.

Time is the server's own. Where its clock is set back, what it counted ahead of that is counted as
of now, so that setting it never lets more through within a minute of its time.

Batches of a gateway are numbered; one that has been applied is not applied again, and none is
applied before the one that it follows. A `reserve` of an older generation than the last batch's is
refused as stale. So whatever still lies in the socket of a server that had stopped can neither
count twice, nor be passed over, nor come back after it was undone.
"""

from __future__ import annotations

import hashlib

PREFIX = "forebay:limits:"
TENANTS_KEY = PREFIX + "tenants"

SCRIPT = r"""
local hash, leases = KEYS[1], KEYS[2]
local arguments, read = cmsgpack.unpack(ARGV[1]), 0

local function arg()
  read = read + 1
  return arguments[read]
end

local verb, me, generation = arg(), arg(), arg()
local width, buckets, lease_us, proposed_epoch = arg(), arg(), arg(), arg()

local clock = redis.call('TIME')
local now_s = tonumber(clock[1])
local now = now_s * 1000000 + tonumber(clock[2])
local bucket = math.floor(now / width)

-- Lua takes no more than a few thousand arguments.
local function in_parts(items, call)
  for from = 1, #items, 1000 do call(from, math.min(from + 999, #items)) end
end

-- The hash as this call sees and leaves it: read where needed, written once at the end.
local fields, changed = {}, {}

local function fetch(names)
  in_parts(names, function(from, to)
    for i, value in ipairs(redis.call('HMGET', hash, unpack(names, from, to))) do
      fields[names[from + i - 1]] = value
    end
  end)
end

local function get(name)
  local value = fields[name]
  if value == nil then
    value = redis.call('HGET', hash, name)
    fields[name] = value
  end
  return value
end

local function number(name) return tonumber(get(name) or 0) end

local function put(name, value) fields[name], changed[name] = value, true end

local function remove(name) put(name, false) end

local function add(name, amount) put(name, number(name) + amount) end

-- What requests in flight hold, by their ids, and their leases.
local records, has_lease = {}, {}

local function record_of(id)
  local record = records[id]
  if record == nil then
    local packed = get('i|' .. id)
    record = packed and cmsgpack.unpack(packed)
    records[id] = record
  end
  return record
end

local function keep_record(id, record)
  records[id] = record
  put('i|' .. id, record)
end

local function tell(command, key, items)
  in_parts(items, function(from, to) redis.call(command, key, unpack(items, from, to)) end)
end

local function lease(id) has_lease[id] = true end

local function end_lease(id) has_lease[id] = false end

local function write_leases()
  local leased, ended = {}, {}
  for id, has in pairs(has_lease) do
    if has then
      leased[#leased + 1] = now + lease_us
      leased[#leased + 1] = id
    else
      ended[#ended + 1] = id
    end
  end
  tell('ZREM', leases, ended)
  tell('ZADD', leases, leased)
  has_lease = {}
end

local function write()
  local sets, removed = {}, {}
  for name in pairs(changed) do
    local value = fields[name]
    if value then
      sets[#sets + 1] = name
      sets[#sets + 1] = type(value) == 'table' and cmsgpack.pack(value) or value
    else
      removed[#removed + 1] = name
    end
  end
  tell('HDEL', hash, removed)
  tell('HSET', hash, sets)
  write_leases()
end

local function period_start(kind)
  local day = math.floor(now_s / 86400)
  if kind == 'd' then return day * 86400 end
  local of_era = (day + 719468) % 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153)
  return (day - (of_year - math.floor((153 * month + 2) / 5))) * 86400
end

-- Requests and tokens of some buckets, which are removed.
local function take_buckets(account, first, last)
  local names = {}
  for i = first, last do
    names[#names + 1] = account .. '|n' .. i
    names[#names + 1] = account .. '|u' .. i
  end
  local missing = {}
  for _, name in ipairs(names) do
    if fields[name] == nil then missing[#missing + 1] = name end
  end
  fetch(missing)
  local requests, tokens = 0, 0
  for i = 1, #names, 2 do
    requests, tokens = requests + number(names[i]), tokens + number(names[i + 1])
    remove(names[i])
    remove(names[i + 1])
  end
  return requests, tokens
end

-- Drops what is too old of an account's window. Its first and last bucket as they then are.
local function slide(account)
  local first, last = get(account .. '|h'), get(account .. '|l')
  if not first then
    put(account .. '|h', bucket)
    put(account .. '|l', bucket)
    return bucket, bucket
  end
  first, last = tonumber(first), tonumber(last)
  local oldest = bucket - buckets
  if first >= oldest and last <= bucket then return first, last end
  if last > bucket then
    local requests, tokens = take_buckets(account, math.max(first, bucket + 1), last)
    add(account .. '|n' .. bucket, requests)
    add(account .. '|u' .. bucket, tokens)
    first, last = math.min(first, bucket), bucket
  end
  if first < oldest then
    local requests, tokens = take_buckets(account, first, math.min(oldest - 1, last))
    add(account .. '|n', -requests)
    add(account .. '|u', -tokens)
    first, last = oldest, math.max(last, oldest)
  end
  put(account .. '|h', first)
  put(account .. '|l', last)
  return first, last
end

local function add_to_bucket(account, at, requests, tokens)
  add(account .. '|n' .. at, requests)
  add(account .. '|u' .. at, tokens)
  add(account .. '|n', requests)
  add(account .. '|u', tokens)
end

-- Corrects what was counted in a bucket, if that still counts; never to less than nothing.
local function correct(account, at, requests, tokens)
  local first, last = slide(account)
  at = math.min(at, last)
  if at < first then return end
  add_to_bucket(account, at, math.max(requests, -number(account .. '|n' .. at)),
    math.max(tokens, -number(account .. '|u' .. at)))
end

-- Counts what came `age` microseconds ago.
local function count_late(account, age, requests, tokens)
  local at = math.min(bucket, math.floor((now - age) / width))
  if at < bucket - buckets then return end
  local first, last = slide(account)
  add_to_bucket(account, at, requests, tokens)
  put(account .. '|h', math.min(first, at))
  put(account .. '|l', math.max(last, at))
end

-- Adds to a budget if it is still of that period, and only if `age` is none or it has not been
-- summed up since: the ledger knows what was over by then. True if it was added.
local function spend(account, kind, start, amount, age)
  local name = account .. '|' .. kind
  if tonumber(get(name .. '@') or nil) ~= start then return false end
  if age and now - age <= number(name .. '^') then return false end
  add(name .. '$', amount)
  return true
end

-- A request is over: its place is free.
local function close(id, record)
  for _, account in ipairs(record.accounts) do add(account .. '|c', -1) end
  records[id] = false
  remove('i|' .. id)
  end_lease(id)
end

local function unspend(record)
  if record.settled then return end
  for _, budget in ipairs(record.budgets) do
    spend(budget[1], budget[2], budget[3], -record.cost)
  end
end

-- Requests whose gateway has not been heard of: nobody knows what they used.
local function expire()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 256)) do
    local record = record_of(id)
    if record then
      unspend(record)
      close(id, record)
    else
      end_lease(id)
    end
  end
end

local function epoch()
  if not get('e') then put('e', proposed_epoch) end
  return get('e')
end

-- Generation and number of the last batch of this gateway.
local function last_batch()
  local kept = get('g|' .. me)
  if not kept then return 0, 0 end
  local known_generation, last = string.match(kept, '^(%d+) (%d+) ')
  return tonumber(known_generation), tonumber(last)
end

-- Whether requests under these limits are counted. Under a budget alone they only cost.
local function counts(a) return a.rpm or a.tpm or a.places end

-- Microseconds until `surplus` of a window has gone.
local function wait_for(account, lane, first, last, surplus)
  if surplus <= 0 then return 0 end
  for i = first, last do
    surplus = surplus - number(account .. '|' .. lane .. i)
    if surplus <= 0 then return (i + 1 + buckets) * width - now end
  end
  return 0
end

local function lacks_room(demand, limit, used) return demand > math.max(0, limit - used) end

local function read_accounts()
  local accounts, names = {}, {'e', 'g|' .. me}
  for i = 1, arg() do
    local a = {name = arg(), rpm = arg(), tpm = arg(), places = arg(),
      budget = arg(), kind = arg(), seed = arg(), seed_start = arg(),
      seed_age = arg(), assumed = arg()}
    accounts[i] = a
    for _, suffix in ipairs({'n', 'u', 'h', 'l', 'c', 'n' .. bucket, 'u' .. bucket}) do
      names[#names + 1] = a.name .. '|' .. suffix
    end
    if a.budget then
      a.field = a.name .. '|' .. a.kind
      names[#names + 1] = a.field .. '$'
      names[#names + 1] = a.field .. '@'
    end
  end
  return accounts, names
end

-- What was spent of a budget, and whether it is counted here; nil if that is to be asked first.
local function spent_of(a)
  a.start = period_start(a.kind)
  if tonumber(get(a.field .. '@') or nil) == a.start then return number(a.field .. '$'), true end
  if a.seed and a.seed_start == a.start then
    put(a.field .. '$', a.seed)
    put(a.field .. '@', a.start)
    put(a.field .. '^', now - a.seed_age)
    return a.seed, true
  end
  return a.assumed, false
end

local function reserve()
  local id, tokens, wanted = arg(), arg(), arg()
  local cost, wanted_cost = arg(), arg()
  local accounts, names = read_accounts()
  names[#names + 1] = 'i|' .. id
  fetch(names)
  if last_batch() > generation then return {'stale', epoch(), now} end
  expire()
  local granted, granted_cost = wanted, wanted_cost
  local unseeded, refused = false, false
  for _, a in ipairs(accounts) do
    a.first, a.last = slide(a.name)
    a.n, a.u, a.c = number(a.name .. '|n'), number(a.name .. '|u'), number(a.name .. '|c')
    refused = refused or (a.rpm and a.n >= a.rpm) or (a.places and a.c >= a.places)
    if a.tpm then
      refused = refused or lacks_room(tokens, a.tpm, a.u)
      granted = math.min(granted, a.tpm - a.u)
    end
    if a.budget then
      a.spent, a.counted = spent_of(a)
      unseeded = unseeded or not a.spent
      refused = refused or (a.spent and lacks_room(cost, a.budget, a.spent))
      granted_cost = math.min(granted_cost, a.budget - (a.spent or 0))
    end
  end
  granted, granted_cost = math.max(granted, tokens), math.max(granted_cost, cost)
  local status = unseeded and 'unseeded' or refused and 'refused' or 'granted'
  local record = record_of(id)
  if record then  -- asked a second time, as the answer was lost
    status, granted, granted_cost = 'granted', record.tokens, record.cost
  elseif status == 'granted' then
    record = {bucket = bucket, tokens = granted, cost = granted_cost, settled = false,
      accounts = {}, budgets = {}}
    for _, a in ipairs(accounts) do
      if counts(a) then
        table.insert(record.accounts, a.name)
        add_to_bucket(a.name, bucket, 1, granted)
        add(a.name .. '|c', 1)
        put(a.name .. '|l', bucket)
        a.n, a.u, a.c, a.last = a.n + 1, a.u + granted, a.c + 1, bucket
      end
      if a.spent then a.spent = a.spent + granted_cost end
      if a.counted then
        put(a.field .. '$', a.spent)
        table.insert(record.budgets, {a.name, a.kind, a.start})
      end
    end
    keep_record(id, record)
    lease(id)
  end
  local answer = {status, epoch(), now, granted, granted_cost}
  local waits = status == 'refused'
  for _, a in ipairs(accounts) do
    for _, value in ipairs({
      a.n, a.u, a.c, a.spent or -1, a.start or 0, a.counted and 1 or 0,
      (a.n > 0 or a.u > 0) and (a.last + 1 + buckets) * width - now or 0,
      waits and a.rpm and wait_for(a.name, 'n', a.first, a.last, a.n + 1 - a.rpm) or 0,
      waits and a.tpm and wait_for(a.name, 'u', a.first, a.last, a.u + tokens - a.tpm) or 0,
    }) do answer[#answer + 1] = value end
  end
  return answer
end

local missing = {}  -- leases that were to be renewed and are not there
local ops = {}

function ops.settle()
  local id, tokens, cost, age = arg(), arg(), arg(), arg()
  local record = record_of(id)
  local counted = {}
  if record and not record.settled then
    for _, account in ipairs(record.accounts) do
      correct(account, record.bucket, 0, tokens - record.tokens)
    end
    for _, budget in ipairs(record.budgets) do
      spend(budget[1], budget[2], budget[3], cost - record.cost)
      counted[budget[1]] = true
    end
    record.tokens, record.cost, record.settled = tokens, cost, true
    keep_record(id, record)
  end
  -- a budget that nothing had been set aside in, or from which that was given back
  for _ = 1, arg() do
    local account, kind, start = arg(), arg(), arg()
    if not counted[account] then spend(account, kind, start, cost, age) end
  end
end

function ops.release()
  local id = arg()
  local record = record_of(id)
  if record then close(id, record) end
end

function ops.undo()
  local id = arg()
  local record = record_of(id)
  if not record then return end
  for _, account in ipairs(record.accounts) do
    correct(account, record.bucket, -1, -record.tokens)
  end
  unspend(record)
  close(id, record)
end

-- A request that a gateway let in by itself, or whose record was lost. What it cost, if it is known
-- already, is told apart.
function ops.adopt()
  local id, in_windows, age = arg(), arg(), arg()
  local tokens, cost, settled = arg(), arg(), arg()
  local there = record_of(id)
  local record = {bucket = math.floor((now - age) / width), tokens = tokens, cost = cost,
    settled = settled, accounts = {}, budgets = {}}
  for _ = 1, arg() do
    local account, kind, start, counted = arg(), arg(), arg(), arg()
    if counted then table.insert(record.accounts, account) end
    if not there then
      if counted then add(account .. '|c', 1) end
      if counted and in_windows then count_late(account, age, 1, tokens) end
      if kind ~= '' and not settled and spend(account, kind, start, cost) then
        table.insert(record.budgets, {account, kind, start})
      end
    end
  end
  if not there then
    keep_record(id, record)
    lease(id)
  end
end

function ops.count()
  local account, age, requests, tokens = arg(), arg(), arg(), arg()
  count_late(account, age, requests, tokens)
end

function ops.spend()
  local account, kind, start, cost, age = arg(), arg(), arg(), arg(), arg()
  spend(account, kind, start, cost, age)
end

function ops.renew()
  write_leases()
  for _ = 1, arg() do
    local id = arg()
    if redis.call('ZSCORE', leases, id) then
      lease(id)
    else
      missing[#missing + 1] = id
    end
  end
end

local function apply()
  local number_of_batch, before, expected_epoch = arg(), arg(), arg()
  local count = arg()
  -- what the batch builds on is gone: it has to be told from the beginning
  if expected_epoch and epoch() ~= expected_epoch then return {'lost', epoch(), now} end
  local _, last = last_batch()
  if last < before then return {'gap', epoch(), now} end
  if number_of_batch > last then
    for _ = 1, count do ops[arg()]() end
    put('g|' .. me, string.format('%d %d %d', generation, number_of_batch, now_s))
  end
  return {'applied', epoch(), now, unpack(missing)}
end

local function sweep()
  expire()
  for _, name in ipairs(redis.call('HKEYS', hash)) do
    local account = string.match(name, '^(.*)|h$')
    if account then
      local first, last = slide(account)
      if number(account .. '|n') == 0 and number(account .. '|u') == 0 then
        take_buckets(account, first, last)
        for _, suffix in ipairs({'n', 'u', 'h', 'l'}) do remove(account .. '|' .. suffix) end
      end
      if number(account .. '|c') == 0 then remove(account .. '|c') end
    end
    local budget, kind = string.match(name, '^(.*|([dm]))@$')
    if budget and number(name) ~= period_start(kind) then
      for _, suffix in ipairs({'$', '@', '^'}) do remove(budget .. suffix) end
    end
    if string.sub(name, 1, 2) == 'g|' then
      local seen = string.match(get(name), '(%d+)$')
      if tonumber(seen) < now_s - 3600 then remove(name) end
    end
  end
  write()
  changed = {}
  if redis.call('HLEN', hash) > redis.call('HEXISTS', hash, 'e') then return {'kept'} end
  redis.call('DEL', hash, leases)
  return {'gone'}
end

local verbs = {reserve = reserve, apply = apply, sweep = sweep}
if not verbs[verb] then return {'time', '', now} end
local answer = verbs[verb]()
write()
return answer
"""

# by which Redis knows it
SHA = hashlib.sha1(SCRIPT.encode()).hexdigest()


def keys_of(tenant: str) -> tuple[str, str]:
    """The tenant's two keys, in one slot of a cluster."""
    key = f"{PREFIX}{{{tenant}}}"
    return key, key + ":leases"
