-- Waiting: fair order over tenants, priority bands, estimated wait. Mirrors twin/queueing.py.

-- Where the tenant stands: its counter while it waits, else what it left with, lifted to the virtual time.
local function virtual_counter(s, band, tenant)
  local waiting = call('ZSCORE', key_fair(s, band), tenant)
  if waiting then return tonumber(waiting) end
  return math.max(num(call('HGET', key_acct(s, tenant), 'vc:' .. band)), num(call('HGET', s.meta, 'v:' .. band)))
end

local function set_counter(s, band, tenant, counter)
  if call('ZSCORE', key_fair(s, band), tenant) then
    call('ZADD', key_fair(s, band), counter, tenant)
  else
    call('HSET', key_acct(s, tenant), 'vc:' .. band, counter)
  end
end

local function charge(s, band, tenant, price)
  local counter = virtual_counter(s, band, tenant)
  if counter > num(call('HGET', s.meta, 'v:' .. band)) then call('HSET', s.meta, 'v:' .. band, counter) end
  set_counter(s, band, tenant, counter + price)
end

local function refund(s, band, tenant, price)
  local waiting = call('ZSCORE', key_fair(s, band), tenant)
  local counter = waiting and tonumber(waiting) or num(call('HGET', key_acct(s, tenant), 'vc:' .. band))
  set_counter(s, band, tenant, counter - price)
end

local function has_tokens(s, id, choices)
  for choice = 0, choices - 1 do
    if call('STRLEN', key_tok(s, id, choice)) > 0 then return true end
  end
  return false
end

local function enqueue(s, id)
  local record = key_req(s, id)
  local band, rank, price, tenant, cost, n = hmget(record, 'band', 'rank', 'price', 'tenant', 'cost', 'n')
  call('HSET', record, 'state', 'queued', 'holder', '')
  call('ZADD', s.queue, rank, id)
  call('HINCRBY', s.meta, 'waiting_tokens', cost)
  if has_tokens(s, id, tonumber(n)) then
    call('ZADD', s.resume, rank, id)
    return
  end
  if not call('ZSCORE', key_fair(s, band), tenant) then
    call('ZADD', key_fair(s, band), virtual_counter(s, band, tenant), tenant)
  end
  call('ZADD', key_wait(s, band, tenant), rank, id)
  call('HINCRBY', key_acct(s, tenant), 'wp:' .. band, price)
end

local function dequeue(s, id)
  local band, price, tenant, cost = hmget(key_req(s, id), 'band', 'price', 'tenant', 'cost')
  call('ZREM', s.queue, id)
  call('HINCRBY', s.meta, 'waiting_tokens', -num(cost))
  if call('ZREM', s.resume, id) == 1 then return end
  call('ZREM', key_wait(s, band, tenant), id)
  call('HINCRBY', key_acct(s, tenant), 'wp:' .. band, -num(price))
  if call('ZCARD', key_wait(s, band, tenant)) == 0 then
    call('HSET', key_acct(s, tenant), 'vc:' .. band, num(call('ZSCORE', key_fair(s, band), tenant)))
    call('ZREM', key_fair(s, band), tenant)
  end
end

local function look(s, id, resumed)
  local price, cost, span, choices, skips = hmget(key_req(s, id), 'price', 'cost', 'span', 'n', 'skips')
  return {
    id = id, price = num(price), need = num(cost), span = num(span), choices = num(choices), skips = num(skips),
    resumed = resumed,
  }
end

local function lanes_of(s)
  local lanes = {}
  for band = 0, BANDS - 1 do
    local tenants = call('ZRANGE', key_fair(s, band), 0, WINDOW - 1, 'WITHSCORES')
    for at = 1, #tenants, 2 do
      lanes[#lanes + 1] = {
        band = band,
        position = tonumber(tenants[at + 1]),
        ids = call('ZRANGE', key_wait(s, band, tenants[at]), 0, WINDOW - 1, 'WITHSCORES'),
        next = 1,
      }
    end
  end
  return lanes
end

-- Within a band the least position goes first; between bands' firsts the least rank.
local function next_lane(lanes)
  local firsts = {}
  for _, lane in ipairs(lanes) do
    local first = firsts[lane.band]
    if lane.next <= #lane.ids and (not first or lane.position < first.position) then firsts[lane.band] = lane end
  end
  local chosen, chosen_rank
  for band = 0, BANDS - 1 do
    local first = firsts[band]
    if first then
      local rank = tonumber(first.ids[first.next + 1])
      if not chosen or rank < chosen_rank then chosen, chosen_rank = first, rank end
    end
  end
  return chosen
end

-- The first waiting requests in fair order, those with delivered tokens in front.
local function window(s)
  local found = {}
  for _, id in ipairs(call('ZRANGE', s.resume, 0, WINDOW - 1)) do found[#found + 1] = look(s, id, true) end
  if #found >= WINDOW then return found end
  local lanes = lanes_of(s)
  while #found < WINDOW do
    local lane = next_lane(lanes)
    if not lane then break end
    local entry = look(s, lane.ids[lane.next], false)
    lane.next = lane.next + 2
    lane.position = lane.position + entry.price
    found[#found + 1] = entry
  end
  return found
end

-- (requests, blocks) before a newcomer, from the tenants' sums instead of a walk.
local function estimate(s, band, tenant)
  local own = num(call('HGET', key_acct(s, tenant), 'wp:' .. band))
  local mine = virtual_counter(s, band, tenant) + own
  local requests = call('ZCARD', s.resume) + call('ZCARD', key_wait(s, band, tenant))
  local blocks = own
  for above = 0, band do
    local tenants = call('ZRANGE', key_fair(s, above), 0, WINDOW - 1, 'WITHSCORES')
    for at = 1, #tenants, 2 do
      local other, counter = tenants[at], tonumber(tenants[at + 1])
      if above ~= band or other ~= tenant then
        local total = math.max(1, num(call('HGET', key_acct(s, other), 'wp:' .. above)))
        local before = total
        if above == band then before = math.min(total, math.max(0, mine - counter)) end
        blocks = blocks + before
        requests = requests + math.floor(call('ZCARD', key_wait(s, above, other)) * before / total)
      end
    end
  end
  return requests, blocks
end

-- Blocks ahead over the measured drain rate; 0 while none is known.
local function wait_ms(s, blocks)
  local rate = num(call('HGET', s.meta, 'rate'))
  if rate <= 0 then return 0 end
  return math.floor(blocks * 1000000 / rate)
end
