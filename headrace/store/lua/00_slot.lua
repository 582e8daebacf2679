-- What every function works on: the slot's prefix and one reading of the clock. Mirrors twin/slot.py.
-- A call declares one key, `<prefix>board`; every other key is derived here, with the names of keys.py.

-- Set at every call: a library that is being loaded has no `redis.call` yet.
local call
local WORKER, ROUTER = 'w:', 'r:'
local TERMINAL = {finished = true, failed = true, cancelled = true}

-- Reply values of absent fields are false; absent numbers count as 0.
local function num(value)
  return tonumber(value or 0) or 0
end

local function text(value)
  return value or ''
end

local function key_req(s, id) return s.p .. 'req:' .. id end
local function key_tok(s, id, choice) return s.p .. 'tok:' .. id .. ':' .. choice end
local function key_lp(s, id, choice) return s.p .. 'lp:' .. id .. ':' .. choice end
local function key_plp(s, id) return s.p .. 'plp:' .. id end
local function key_wait(s, band, tenant) return s.p .. 'wait:' .. band .. ':' .. tenant end
local function key_fair(s, band) return s.p .. 'fair:' .. band end
local function key_acct(s, tenant) return s.p .. 'acct:' .. tenant end
local function key_held(s, worker) return s.p .. 'held:' .. worker end
local function key_own(s, router) return s.p .. 'own:' .. router end
local function key_inbox(s, worker) return s.p .. 'inbox:' .. worker end
local function key_out(s, router) return s.p .. 'out:' .. router end
local function key_idem(s, tenant, key) return s.p .. 'idem:' .. #tenant .. ':' .. tenant .. ':' .. key end

local function open_slot(board_key)
  call = redis.call
  local prefix = string.sub(board_key, 1, -6)
  return {
    p = prefix,
    now = read_clock(prefix),
    board = board_key,
    lease = prefix .. 'lease',
    fenced = prefix .. 'fenced',
    lost = prefix .. 'lost',
    open = prefix .. 'open',
    queue = prefix .. 'queue',
    resume = prefix .. 'resume',
    due = prefix .. 'due',
    meta = prefix .. 'meta',
  }
end

local function sorted(list)
  table.sort(list)
  return list
end

-- One value per name, in order.
local function hmget(key, ...)
  return unpack(call('HMGET', key, ...))
end

local function contains(list, value)
  for _, one in ipairs(list) do
    if one == value then return true end
  end
  return false
end

-- Appends at `<now>-<next>`; after the last id when the clock went back.
local function xadd(s, key, bound, ...)
  local id = s.now .. '-*'
  local reply
  if bound then
    reply = redis.pcall('XADD', key, 'MAXLEN', '=', bound, id, ...)
  else
    reply = redis.pcall('XADD', key, id, ...)
  end
  if type(reply) == 'string' then return end
  local info = call('XINFO', 'STREAM', key)
  for at = 1, #info, 2 do
    if info[at] == 'last-generated-id' then id = string.match(info[at + 1], '^(%d+)') .. '-*' end
  end
  call('XADD', key, id, ...)
  if bound then call('XTRIM', key, 'MAXLEN', '=', bound) end
end

-- The row: plain fields that the functions read, then the load report that they only carry.
local HEADER = '^(%d+) (%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)|()'

local function parse_row(row)
  if not row then return nil end
  local seq, last, credit, slots, draining, ordered, total, size, context, at = string.match(row, HEADER)
  return {
    seq = tonumber(seq), last = last, credit = tonumber(credit), slots = tonumber(slots),
    draining = tonumber(draining), ordered = tonumber(ordered), total = tonumber(total), size = tonumber(size),
    context = tonumber(context), at = at,
  }
end

local function has_room(h)
  return h.credit > 0 and h.slots > 0 and h.draining == 0 and h.ordered == 0
end

local function write_board(s, worker, h, load, had_room)
  call('HSET', s.board, worker, string.format('%d %s %d %d %d %d %d %d %d|', h.seq, h.last, h.credit, h.slots,
    h.draining, h.ordered, h.total, h.size, h.context) .. load)
  local room = has_room(h)
  if room and not had_room then
    call('SADD', s.open, worker)
  elseif had_room and not room then
    call('SREM', s.open, worker)
  end
end

local function is_live(s, member)
  local expiry = call('ZSCORE', s.lease, member)
  return expiry and tonumber(expiry) > s.now
end

local function is_quiet(s)
  return num(call('HGET', s.meta, 'quiet_until')) > s.now
end

local NO_ROOM = {credit = 0, slots = 0, empty = false, pool = 0, context = 0}

-- Credit, derived: the report's, less the price of the binds that it has not counted.
local function room_of(s, worker)
  local h = parse_row(call('HGET', s.board, worker))
  if not h or not has_room(h) or not is_live(s, WORKER .. worker) then return NO_ROOM end
  local credit, slots = h.credit, h.slots
  for _, entry in ipairs(call('XRANGE', key_inbox(s, worker), '(' .. h.last, '+')) do
    local f = entry[2] -- k <kind> i <id> p <price> e <epoch> o <owner> [n <choices>]
    if f[2] == 'bind' then
      credit, slots = credit - tonumber(f[6]), slots - (tonumber(f[12]) or 1)
    end
  end
  return {
    credit = math.max(0, credit),
    slots = math.max(0, slots),
    empty = call('HLEN', key_held(s, worker)) == 0,
    pool = h.total * h.size,
    context = h.context,
  }
end

-- Whatever fits the pool may start on an empty worker, so that neither a price estimate nor more choices than it has
-- slots can wedge the queue.
local function takes(room, price, need, span, choices)
  if room.slots < 1 or need > room.pool or span > room.context then return false end
  return room.empty or (choices <= room.slots and room.credit > 0 and price <= room.credit)
end

-- Keeps the distinct (context, pool) pairs of the board, in tokens; with nobody on it the last ones stay.
local function record_capacity(s)
  local seen, pairs_found = {}, {}
  for _, row in ipairs(call('HVALS', s.board)) do
    local h = parse_row(row)
    local pair = string.format('%d:%d', h.context, h.total * h.size)
    if not seen[pair] then
      seen[pair] = true
      pairs_found[#pairs_found + 1] = {h.context, h.total * h.size, pair}
    end
  end
  if #pairs_found == 0 then return end
  table.sort(pairs_found, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  local texts = {}
  for at, pair in ipairs(pairs_found) do texts[at] = pair[3] end
  call('HSET', s.meta, 'capacity', table.concat(texts, ','))
end

-- A worker without a lease has no inbox, a router without one no stream. Several choices are told: each takes a slot.
local function tell_worker(s, worker, kind, id, price, epoch, owner, choices)
  if not call('ZSCORE', s.lease, WORKER .. worker) then return end
  local inbox = key_inbox(s, worker)
  if (choices or 1) > 1 then
    xadd(s, inbox, nil, 'k', kind, 'i', id, 'p', price, 'e', epoch, 'o', owner, 'n', choices)
  else
    xadd(s, inbox, nil, 'k', kind, 'i', id, 'p', price, 'e', epoch, 'o', owner)
  end
end

local function tell_router(s, router, worker, seq, parts, logprobs)
  if #parts < 1 or not call('ZSCORE', s.lease, ROUTER .. router) then return end
  local stream, joined = key_out(s, router), table.concat(parts)
  if logprobs then
    xadd(s, stream, OUT_LENGTH, 'w', worker, 's', seq, 'p', joined, 'l', table.concat(logprobs))
  else
    xadd(s, stream, OUT_LENGTH, 'w', worker, 's', seq, 'p', joined)
  end
end

local function name_of(member)
  return string.match(member, '^(.*)~[^~]*$') or member
end

local function incarnations(s, kind, name)
  local found = {}
  for _, member in ipairs(call('ZRANGE', s.lease, 0, -1)) do
    if string.sub(member, 1, 2) == kind and name_of(string.sub(member, 3)) == name then
      found[#found + 1] = string.sub(member, 3)
    end
  end
  return found
end
