-- Beside frames: cancel, attach, end; and of incarnations: drain, leave, sweep. Mirrors twin/lifecycle.py.

-- Marks a bound request and tells its holder, once.
local function mark_cancelled(s, id)
  local record = key_req(s, id)
  local mark, holder, owner, epoch = hmget(record, 'mark', 'holder', 'owner', 'epoch')
  if mark then return end
  call('HSET', record, 'mark', 'cancel', 'cancel_end', s.now + CANCEL_TIMEOUT_MS)
  call('HSET', key_held(s, holder), id, epoch .. ':c:' .. owner)
  schedule(s, id)
  tell_worker(s, holder, 'cancel', id, 0, epoch, owner)
end

-- Owner epoch -1: an explicit cancel; else a disconnect of that owner epoch, which may have a grace.
local function cancel(s, a)
  local id, owner_epoch = a[1], a[2]
  local record = key_req(s, id)
  local state, current, background, grace, grace_end =
    hmget(record, 'state', 'oepoch', 'background', 'grace', 'grace_end')
  if not state then return {} end
  if TERMINAL[state] then return {state} end
  if owner_epoch >= 0 then
    if owner_epoch ~= num(current) or background == '1' then return {state} end
    if num(grace) > 0 then
      if num(grace_end) == 0 then
        call('HSET', record, 'grace_end', s.now + num(grace))
        schedule(s, id)
      end
      return {state}
    end
  end
  if state == 'queued' then
    end_and_tell(s, id, 'cancelled', 'cancelled', '')
    return {'cancelled'}
  end
  mark_cancelled(s, id)
  return {state}
end

-- Each attach is a new ownership, also by the same router: the stream it replaces must end as moved.
local function attach(s, a)
  local id, router, tenant = a[1], a[2], a[3]
  if is_fenced(s, ROUTER, router) then return {2} end
  local record = key_req(s, id)
  local state, its_tenant, epoch, owner_epoch, owner, holder, mark =
    hmget(record, 'state', 'tenant', 'epoch', 'oepoch', 'owner', 'holder', 'mark')
  if not state or its_tenant ~= tenant then return {} end
  if TERMINAL[state] then return {id, state, '', num(epoch), num(owner_epoch), s.now} end
  if not call('ZSCORE', s.lease, ROUTER .. router) then join(s, ROUTER, router) end
  call('ZREM', key_own(s, owner), id)
  call('ZADD', key_own(s, router), s.now, id)
  owner_epoch = call('HINCRBY', record, 'oepoch', 1)
  call('HSET', record, 'owner', router, 'grace_end', 0)
  schedule(s, id)
  if holder ~= '' then
    call('HSET', key_held(s, holder), id, epoch .. ':' .. (mark and 'c' or '') .. ':' .. router)
    tell_worker(s, holder, 'owner', id, 0, epoch, router)
  end
  return {id, state, holder, num(epoch), owner_epoch, s.now}
end

local function end_(s, a)
  local state = call('HGET', key_req(s, a[1]), 'state')
  if not state or TERMINAL[state] then return {0} end
  end_and_tell(s, a[1], a[2], a[3], a[4])
  return {1}
end

-- Marks the worker on the board, once.
local function order_drain(s, worker)
  local row = call('HGET', s.board, worker)
  local h = parse_row(row)
  if not h or h.ordered == 1 then return end
  local had_room = has_room(h)
  h.ordered = 1
  write_board(s, worker, h, string.sub(row, h.at), had_room)
  tell_worker(s, worker, 'drain', '', 0, 0, '')
end

local function drain(s, a)
  local members = incarnations(s, WORKER, a[1])
  for _, worker in ipairs(members) do order_drain(s, worker) end
  return {#members > 0 and 1 or 0}
end

local function leave(s, a)
  local kind, member = a[1], a[2]
  if not call('ZSCORE', s.lease, kind .. member) then return {0} end
  lapse(s, kind, member)
  move_lost(s)
  claim_all(s, {}, '')
  return {1}
end

-- A gap since the last sweep, or another life of the server: nobody lapses and nothing is claimed for one lease.
-- After a gap in which nobody became late (all had left, or only routers were missing) there is nobody to protect.
local function watch_absence(s)
  local last, run = hmget(s.meta, 'swept', 'run')
  local run_now = read_run_id(s.p)
  local was_away = run ~= run_now
  if s.now - num(last) > LEASE_MS then was_away = call('ZCOUNT', s.lease, '-inf', s.now) > 0 end
  if run and was_away then call('HSET', s.meta, 'quiet_until', s.now + LEASE_MS) end
  call('HSET', s.meta, 'swept', s.now, 'run', run_now)
end

local function end_due(s, ended)
  for _, id in ipairs(call('ZRANGEBYSCORE', s.due, '-inf', s.now, 'LIMIT', 0, DUES)) do
    local state, deadline = hmget(key_req(s, id), 'state', 'deadline')
    if not state or TERMINAL[state] then
      purge(s, id)
    else
      if num(deadline) > 0 and num(deadline) <= s.now then
        end_and_tell(s, id, 'cancelled', 'deadline', 'the deadline passed')
      else
        end_and_tell(s, id, 'cancelled', 'cancelled', '')
      end
      ended[#ended + 1] = id
    end
  end
end

-- Smoothed rate at which ended work gives blocks back, in blocks per 1,000 s, while somebody waits.
local function measure_drain(s)
  local since, drained, seen, rate = hmget(s.meta, 'rate_at', 'drained', 'rate_drained', 'rate')
  since, drained, seen, rate = num(since), num(drained), num(seen), num(rate)
  local elapsed = s.now - since
  if elapsed < RATE_WINDOW_MS then return end
  local gone = drained - seen
  if since > 0 and gone > 0 and call('ZCARD', s.queue) > 0 then
    local measured = math.floor(gone * 1000000 / elapsed)
    call('HSET', s.meta, 'rate', rate == 0 and measured or math.floor((3 * rate + measured) / 4))
  end
  call('HSET', s.meta, 'rate_at', s.now, 'rate_drained', drained)
end

local function sweep(s, a)
  local router = a[1]
  if is_fenced(s, ROUTER, router) then return {1, {}, {}, {}, {}, 0, s.now} end
  watch_absence(s)
  if not call('ZSCORE', s.lease, ROUTER .. router) then join(s, ROUTER, router) end
  call('ZADD', s.lease, s.now + LEASE_MS, ROUTER .. router)
  local quiet, workers, routers = is_quiet(s), {}, {}
  if not quiet then
    for _, member in ipairs(call('ZRANGEBYSCORE', s.lease, '-inf', s.now, 'LIMIT', 0, LAPSES)) do
      local kind, name = string.sub(member, 1, 2), string.sub(member, 3)
      lapse(s, kind, name)
      local into = kind == WORKER and workers or routers
      into[#into + 1] = name
    end
  end
  local requeued, ended = move_lost(s)
  end_due(s, ended)
  measure_drain(s)
  for _, member in ipairs(call('ZRANGEBYSCORE', s.fenced, '-inf', s.now, 'LIMIT', 0, LAPSES)) do
    call('ZREM', s.fenced, member)
  end
  claim_all(s, {}, '')
  return {0, workers, routers, requeued, ended, quiet and 1 or 0, s.now}
end
