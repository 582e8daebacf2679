-- Functions that write nothing. Mirrors twin/reading.py.

local SINGLES = {
  board = true, lease = true, fenced = true, lost = true, open = true, queue = true, resume = true, due = true,
  meta = true,
}

local function board(s)
  local rows = {}
  for _, worker in ipairs(sorted(call('HKEYS', s.board))) do
    local row = call('HGET', s.board, worker)
    local h, room = parse_row(row), room_of(s, worker)
    local left = math.max(0, num(call('ZSCORE', s.lease, WORKER .. worker)) - s.now)
    rows[#rows + 1] = {worker, string.sub(row, h.at), h.last, room.slots > 0 and room.credit or 0, left}
  end
  return rows
end

local function status(s, a)
  local id = a[1]
  local record = key_req(s, id)
  local state, tenant, holder, owner, detail, epoch, owner_epoch, n =
    hmget(record, 'state', 'tenant', 'holder', 'owner', 'detail', 'epoch', 'oepoch', 'n')
  if not state then return {} end
  local lengths, finishes = {}, {}
  for choice = 0, num(n) - 1 do
    lengths[choice + 1] = call('STRLEN', key_tok(s, id, choice)) / 4
    finishes[choice + 1] = text(call('HGET', record, 'f' .. choice))
  end
  return {state, tenant, holder, owner, text(detail), num(epoch), num(owner_epoch), lengths, finishes}
end

-- Per (id, epoch), while this worker holds it at this epoch, else nothing: record, owner, journals and whether the
-- prompt's log probabilities are journaled.
local function fetch(s, a)
  local worker, found = a[1], {}
  for at, wanted in ipairs(a[2]) do
    local id = wanted[1]
    local holder, epoch, body, owner, n = hmget(key_req(s, id), 'holder', 'epoch', 'body', 'owner', 'n')
    if holder ~= worker or num(epoch) ~= wanted[2] then
      found[at] = {}
    else
      local journals = {}
      for choice = 0, num(n) - 1 do journals[choice + 1] = text(call('GET', key_tok(s, id, choice))) end
      found[at] = {body, owner, journals, call('EXISTS', key_plp(s, id))}
    end
  end
  return found
end

-- {waiting, waiting tokens, bound, workers, routers}
local function census(s)
  local bound, workers, members = 0, 0, call('ZRANGE', s.lease, 0, -1)
  for _, member in ipairs(members) do
    if string.sub(member, 1, 2) == WORKER then
      workers = workers + 1
      bound = bound + call('HLEN', key_held(s, string.sub(member, 3)))
    end
  end
  for _, member in ipairs(call('SMEMBERS', s.lost)) do
    if string.sub(member, 1, 2) == WORKER then bound = bound + call('HLEN', key_held(s, string.sub(member, 3))) end
  end
  return {call('ZCARD', s.queue), num(call('HGET', s.meta, 'waiting_tokens')), bound, workers, #members - workers}
end

local function is_known(s, member)
  return call('ZSCORE', s.lease, member) or call('SISMEMBER', s.lost, member) == 1
end

local function of_choice(s, rest)
  return call('EXISTS', key_req(s, string.match(rest, '^(.*):[^:]*$') or '')) == 1
end

-- Whether a key, split at its first colon, has what it belongs to.
local BELONGS = {
  req = function(s, id)
    local holder = text(call('HGET', key_req(s, id), 'holder'))
    return call('ZSCORE', s.queue, id) or call('HEXISTS', key_held(s, holder), id) == 1
  end,
  tok = of_choice,
  lp = of_choice,
  plp = function(s, id) return call('EXISTS', key_req(s, id)) == 1 end,
  idem = function(s, rest)
    return call('EXISTS', key_req(s, text(call('GET', s.p .. 'idem:' .. rest)))) == 1
  end,
  wait = function(s, rest)
    local band, tenant = string.match(rest, '^(%d+):(.*)$')
    return call('ZSCORE', key_fair(s, band), tenant)
  end,
  acct = function(s, tenant)
    return num(call('HGET', key_acct(s, tenant), 'n')) > 0
  end,
  held = function(s, worker) return is_known(s, WORKER .. worker) end,
  inbox = function(s, worker) return is_known(s, WORKER .. worker) end,
  own = function(s, router) return is_known(s, ROUTER .. router) end,
  out = function(s, router) return is_known(s, ROUTER .. router) end,
  fair = function() return true end,
}

-- {ended records, stray keys} among the keys named, the prefix taken off.
local function inspect(s, a)
  local ended, stray = 0, 0
  for _, name in ipairs(a[1]) do
    local kind, rest = string.match(name, '^([^:]*):(.*)$')
    if not kind then
      if not SINGLES[name] then stray = stray + 1 end
    elseif kind == 'req' and TERMINAL[text(call('HGET', key_req(s, rest), 'state'))] and call('ZSCORE', s.due, rest) then
      ended = ended + 1
    elseif not BELONGS[kind] or not BELONGS[kind](s, rest) then
      stray = stray + 1
    end
  end
  return {ended, stray}
end
