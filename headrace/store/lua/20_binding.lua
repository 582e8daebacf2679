-- Binding, claiming, handing back and ending: the moves of a request between its states. Mirrors twin/binding.py.

local function bind(s, id, worker, was_waiting)
  local record = key_req(s, id)
  local tenant, owner, price, band, choices = hmget(record, 'tenant', 'owner', 'price', 'band', 'n')
  charge(s, band, tenant, tonumber(price))
  if was_waiting then dequeue(s, id) end
  local epoch = call('HINCRBY', record, 'epoch', 1)
  call('HSET', record, 'state', 'bound', 'holder', worker)
  call('HSET', key_held(s, worker), id, epoch .. '::' .. owner)
  tell_worker(s, worker, 'bind', id, price, epoch, owner, num(choices))
end

-- Whether the head, overtaken often enough, waits for this worker: then nobody overtakes it here.
local function reserved_here(s, head, worker, room)
  local reserved, holder = hmget(s.meta, 'reserve_id', 'reserve_worker')
  if reserved ~= head.id or not is_live(s, WORKER .. text(holder)) then
    if head.need > room.pool or head.span > room.context then return false end
    call('HSET', s.meta, 'reserve_id', head.id, 'reserve_worker', worker)
    return true
  end
  return holder == worker
end

-- Index of the one to bind: the best prefix overlap among those that fit, resumed ones first, a bounded number of
-- times past the head.
local function pick(s, worker, room, waiting)
  local head = waiting[1]
  if not head then return nil end
  if head.skips >= SKIP_LIMIT then
    if takes(room, head.price, head.need, head.span, head.choices) then return 1 end
    if reserved_here(s, head, worker, room) then return nil end
  end
  local best, best_overlap = nil, -1
  for at, entry in ipairs(waiting) do
    if best and waiting[best].resumed and not entry.resumed then break end
    if takes(room, entry.price, entry.need, entry.span, entry.choices) then
      local overlap = num(call('HGET', key_req(s, entry.id), 'ov:' .. worker))
      if overlap > best_overlap then best, best_overlap = at, overlap end
    end
  end
  if best and best > 1 then head.skips = call('HINCRBY', key_req(s, head.id), 'skips', 1) end
  return best
end

local function claim(s, worker, room, waiting, most)
  local bound = 0
  while bound < most and room.slots > 0 do
    local at = pick(s, worker, room, waiting)
    if not at then break end
    local entry = table.remove(waiting, at)
    bind(s, entry.id, worker, true)
    room.credit = math.max(0, room.credit - entry.price)
    room.slots = room.slots - entry.choices
    room.empty = false
    bound = bound + 1
  end
  return bound
end

local function claim_for(s, worker)
  if call('ZCARD', s.queue) == 0 or is_quiet(s) then return 0 end
  local room = room_of(s, worker)
  if room.slots < 1 then return 0 end
  return claim(s, worker, room, window(s), CLAIMS)
end

-- `first` in their order, then the others that reported room.
local function workers_to_try(s, first)
  local workers = {}
  for _, worker in ipairs(first) do workers[#workers + 1] = worker end
  for _, worker in ipairs(sorted(call('SMEMBERS', s.open))) do
    if not contains(first, worker) then workers[#workers + 1] = worker end
  end
  return workers
end

local function claim_all(s, first, excluded)
  if call('ZCARD', s.queue) == 0 or is_quiet(s) then return end
  local workers, waiting, left = workers_to_try(s, first), nil, CLAIMS
  for at = 1, math.min(#workers, WORKERS_TRIED) do
    if left < 1 then break end
    local worker = workers[at]
    if worker ~= excluded then
      local room = room_of(s, worker)
      if room.slots > 0 then
        waiting = waiting or window(s)
        left = left - claim(s, worker, room, waiting, left)
      end
    end
  end
end

local function settle(s, tenant, cost)
  call('HINCRBY', s.meta, 'tokens', -cost)
  call('HINCRBY', key_acct(s, tenant), 'tokens', -cost)
  if call('HINCRBY', key_acct(s, tenant), 'n', -1) == 0 then call('DEL', key_acct(s, tenant)) end
end

-- The layout of parts.py.
local function pack_part(id, choice, first, tokens, finish, detail)
  return struct.pack('<I2I2I4I4I1I2', #id, choice, first, #tokens, #finish, #detail) .. id .. tokens .. finish .. detail
end

-- Makes a record terminal from any live state. Returns the last parts of choices that had no finish.
local function end_request(s, id, state, reason, detail)
  local record = key_req(s, id)
  local holder, owner, before, epoch, n, tenant, cost, price, ttl =
    hmget(record, 'holder', 'owner', 'state', 'epoch', 'n', 'tenant', 'cost', 'price', 'ttl')
  if before == 'queued' then
    dequeue(s, id)
  else
    call('HDEL', key_held(s, text(holder)), id)
  end
  local parts = {}
  for choice = 0, num(n) - 1 do
    if call('HSETNX', record, 'f' .. choice, reason) == 1 then
      local length = call('STRLEN', key_tok(s, id, choice)) / 4
      parts[#parts + 1] = pack_part(id, choice, length, '', reason, detail)
    end
  end
  call('ZREM', key_own(s, text(owner)), id)
  settle(s, text(tenant), num(cost))
  if num(epoch) > 0 then call('HINCRBY', s.meta, 'drained', price) end
  call('HSET', record, 'state', state, 'holder', '', 'detail', detail)
  call('ZADD', s.due, s.now + num(ttl), id)
  return parts
end

-- Ends a request outside of a frame: the owner's stream gets the finish, the holder's inbox a cancel.
local function end_and_tell(s, id, state, reason, detail)
  local holder, owner, mark, epoch = hmget(key_req(s, id), 'holder', 'owner', 'mark', 'epoch')
  holder, owner = text(holder), text(owner)
  if holder ~= '' and not mark then tell_worker(s, holder, 'cancel', id, 0, epoch, owner) end
  tell_router(s, owner, holder, 0, end_request(s, id, state, reason, detail))
end

-- Back to the queue at its rank; one marked for cancelling ends instead (false).
local function requeue(s, id, worker)
  local mark, band, tenant, price = hmget(key_req(s, id), 'mark', 'band', 'tenant', 'price')
  if mark then
    end_and_tell(s, id, 'cancelled', 'cancelled', '')
    return false
  end
  call('HDEL', key_held(s, worker), id)
  refund(s, band, tenant, tonumber(price))
  enqueue(s, id)
  return true
end

local function purge(s, id)
  local record = key_req(s, id)
  local tenant, key, n = hmget(record, 'tenant', 'idem', 'n')
  if text(key) ~= '' and call('GET', key_idem(s, tenant, key)) == id then call('DEL', key_idem(s, tenant, key)) end
  for choice = 0, num(n) - 1 do call('DEL', key_tok(s, id, choice), key_lp(s, id, choice)) end
  call('DEL', record, key_plp(s, id))
  call('ZREM', s.due, id)
end

-- Sets the live request's entry in `due` to the first of its deadline, grace and cancel time-out.
local function schedule(s, id)
  local first
  for _, value in ipairs(call('HMGET', key_req(s, id), 'deadline', 'grace_end', 'cancel_end')) do
    local time = num(value)
    if time > 0 and (not first or time < first) then first = time end
  end
  if first then call('ZADD', s.due, first, id) else call('ZREM', s.due, id) end
end

-- Fences one incarnation: it may not come back, and what it holds is moved by `move_lost`.
local function lapse(s, kind, member)
  call('ZREM', s.lease, kind .. member)
  call('ZADD', s.fenced, s.now + FENCED_TTL_MS, kind .. member)
  local remains
  if kind == WORKER then
    call('HDEL', s.board, member)
    call('SREM', s.open, member)
    call('DEL', key_inbox(s, member))
    record_capacity(s)
    remains = call('HLEN', key_held(s, member)) > 0
  else
    call('DEL', key_out(s, member))
    remains = call('ZCARD', key_own(s, member)) > 0
  end
  if remains then call('SADD', s.lost, kind .. member) end
end

-- The owner died: the request runs on, and its grace counts from here.
local function orphan(s, id, router)
  call('ZREM', key_own(s, router), id)
  local background, grace_end, grace = hmget(key_req(s, id), 'background', 'grace_end', 'grace')
  if background ~= '1' and num(grace_end) == 0 then
    call('HSET', key_req(s, id), 'grace_end', s.now + math.max(ROUTER_GRACE_MS, num(grace)))
    schedule(s, id)
  end
end

-- Moves a bounded number of requests away from lost incarnations: (re-queued, ended).
local function move_lost(s)
  local requeued, ended, left = {}, {}, MOVES
  for _, lost in ipairs(sorted(call('SMEMBERS', s.lost))) do
    if left < 1 then break end
    local kind, member = string.sub(lost, 1, 2), string.sub(lost, 3)
    local remains
    if kind == WORKER then
      local ids = sorted(call('HKEYS', key_held(s, member)))
      for at = 1, math.min(#ids, left) do
        local into = requeue(s, ids[at], member) and requeued or ended
        into[#into + 1] = ids[at]
        left = left - 1
      end
      remains = call('HLEN', key_held(s, member)) > 0
    else
      for _, id in ipairs(call('ZRANGE', key_own(s, member), 0, left - 1)) do
        orphan(s, id, member)
        left = left - 1
      end
      remains = call('ZCARD', key_own(s, member)) > 0
    end
    if not remains then call('SREM', s.lost, lost) end
  end
  return requeued, ended
end

-- Takes a new incarnation in and fences the older ones of its name.
local function join(s, kind, member)
  for _, old in ipairs(incarnations(s, kind, name_of(member))) do lapse(s, kind, old) end
  call('ZADD', s.lease, s.now + LEASE_MS, kind .. member)
end

local function is_fenced(s, kind, member)
  return call('ZSCORE', s.fenced, kind .. member)
end
