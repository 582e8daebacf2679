-- `admit`: everything is checked before anything is written. Mirrors twin/admission.py.

local function admit_call(a)
  return {
    router = a[1], id = a[2], body = a[3], tenant = a[4], band = a[5], n = a[6], price = a[7], cost = a[8], span = a[9],
    candidates = a[10], overlaps = a[11], deadline = a[12], grace = a[13], background = a[14], ttl = a[15],
    key = a[16], tenant_cap = a[17], global_cap = a[18],
  }
end

local function known(s, c)
  local id = c.id
  if c.key ~= '' then
    local first = call('GET', key_idem(s, c.tenant, c.key))
    if first then id = first end
  end
  local state, holder, epoch = hmget(key_req(s, id), 'state', 'holder', 'epoch')
  if not state then return nil end
  local position = 0
  if state == 'queued' then position = call('ZRANK', s.queue, id) end
  return {1, id, state, holder, num(epoch), 1, position, 0, s.now}
end

local function over_cap(s, c)
  local caps = {
    {'tenant_cap', c.tenant_cap, num(call('HGET', key_acct(s, c.tenant), 'tokens'))},
    {'global_cap', c.global_cap, num(call('HGET', s.meta, 'tokens'))},
  }
  for _, one in ipairs(caps) do
    local reason, cap, tokens = one[1], one[2], one[3]
    local over = tokens + c.cost - cap
    if cap > 0 and over > 0 then
      local retry = 0
      if c.cost <= cap then
        retry = wait_ms(s, math.floor(over / 16) + 1)
        if retry == 0 then retry = RETRY_MS end
      end
      return {0, reason, cap, tokens + c.cost, retry}
    end
  end
  return nil
end

-- What no worker could ever hold; with none alive the capacity recorded last counts.
local function beyond_capacity(s, c)
  local capacity = call('HGET', s.meta, 'capacity')
  if not capacity then return {0, 'no_capacity_known', 0, c.cost, RETRY_MS} end
  local most_context, most_pool = 0, 0
  for context, pool in string.gmatch(capacity, '(%d+):(%d+)') do
    context, pool = tonumber(context), tonumber(pool)
    if c.span <= context and c.cost <= pool then return nil end
    most_context, most_pool = math.max(most_context, context), math.max(most_pool, pool)
  end
  if c.span > most_context then return {0, 'too_large', most_context, c.span, 0} end
  return {0, 'too_large', most_pool, c.cost, 0}
end

-- Push when there is room: the first candidate, else any open worker, that takes it; never past others.
local function free_worker(s, c)
  if call('ZCARD', s.queue) > 0 or is_quiet(s) then return nil end
  local workers = workers_to_try(s, c.candidates)
  for at = 1, math.min(#workers, WORKERS_TRIED) do
    if takes(room_of(s, workers[at]), c.price, c.cost, c.span, c.n) then return workers[at] end
  end
  return nil
end

local function write_record(s, c)
  if not call('ZSCORE', s.lease, ROUTER .. c.router) then join(s, ROUTER, c.router) end
  -- Ranks rise strictly, so that arrivals within one millisecond keep their order.
  local arrival = math.max(num(call('HGET', s.meta, 'arrival')) + 1, s.now * 1000)
  call('HSET', s.meta, 'arrival', arrival)
  local record = key_req(s, c.id)
  call('HSET', record, 'body', c.body, 'tenant', c.tenant, 'band', c.band, 'n', c.n, 'left', c.n, 'state', 'queued',
    'holder', '', 'epoch', 0, 'owner', c.router, 'oepoch', 1, 'rank', arrival + c.band * BAND_HORIZON_MS * 1000,
    'price', c.price, 'cost', c.cost, 'span', c.span, 'deadline', c.deadline > 0 and s.now + c.deadline or 0,
    'grace', c.grace, 'background', c.background, 'ttl', c.ttl, 'idem', c.key)
  for _, pair in ipairs(c.overlaps) do call('HSET', record, 'ov:' .. pair[1], pair[2]) end
  if c.key ~= '' then call('SET', key_idem(s, c.tenant, c.key), c.id) end
  call('ZADD', key_own(s, c.router), s.now, c.id)
  call('HINCRBY', s.meta, 'tokens', c.cost)
  call('HINCRBY', key_acct(s, c.tenant), 'tokens', c.cost)
  call('HINCRBY', key_acct(s, c.tenant), 'n', 1)
  schedule(s, c.id)
end

local function admit(s, a)
  local c = admit_call(a)
  if is_fenced(s, ROUTER, c.router) then return {2} end
  local reply = known(s, c) or over_cap(s, c) or beyond_capacity(s, c)
  if reply then return reply end
  local target = free_worker(s, c)
  local requests, blocks = 0, 0
  if not target then requests, blocks = estimate(s, c.band, c.tenant) end
  local eta = wait_ms(s, blocks)
  if c.deadline > 0 and c.deadline < eta then return {0, 'deadline', c.deadline, eta, eta - c.deadline} end
  write_record(s, c)
  if target then
    bind(s, c.id, target, false)
  else
    enqueue(s, c.id)
    claim_all(s, c.candidates, '')
  end
  local state, holder, epoch = hmget(key_req(s, c.id), 'state', 'holder', 'epoch')
  if holder ~= '' then requests, eta = 0, 0 end
  return {1, c.id, state, holder, num(epoch), 0, requests, eta, s.now}
end
