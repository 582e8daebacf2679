-- `report`: one frame or beat of one worker; and `release`. Mirrors twin/reporting.py.
-- The hot path is one APPEND per part; everything else is a few commands per frame.

-- Renews the lease, or joins and fences older incarnations of the name: (fenced, requests were put back).
local function renew(s, worker)
  local member = WORKER .. worker
  if call('ZSCORE', s.lease, member) then
    call('ZADD', s.lease, s.now + LEASE_MS, member)
    return false, false
  end
  if is_fenced(s, WORKER, worker) then return true, false end
  join(s, WORKER, worker)
  return false, #move_lost(s) > 0
end

local function update_board(s, worker, h, load)
  local before = parse_row(call('HGET', s.board, worker))
  if not before then
    write_board(s, worker, h, load, false)
    record_capacity(s)
    return
  end
  if h.seq < before.seq then return end
  h.ordered = before.ordered
  write_board(s, worker, h, load, has_room(before))
  if h.last ~= before.last then
    local ms, seq = string.match(h.last, '^(%d+)%-(%d+)$')
    call('XTRIM', key_inbox(s, worker), 'MINID', '=', ms .. '-' .. string.format('%d', tonumber(seq) + 1))
  end
  if h.total ~= before.total or h.size ~= before.size or h.context ~= before.context then record_capacity(s) end
end

-- Takes back an APPEND that did not land where it should: the journal is `length` bytes again.
local function undo_append(key, length)
  if length == 0 then
    call('DEL', key)
  else
    call('SET', key, call('GETRANGE', key, 0, length - 1))
  end
end

-- Appends what the journal lacks: (index, tokens appended), or (its length, nil) when it is shorter than `first`.
local function append_missing(key, first, tokens)
  local length = call('STRLEN', key)
  if first * 4 > length then return length / 4, nil end
  local fresh = string.sub(tokens, length - first * 4 + 1)
  if fresh ~= '' then call('APPEND', key, fresh) end
  return length / 4, fresh
end

-- Records a choice's finish: (newly, request ended).
local function finish_choice(s, id, choice, finish, detail)
  local record = key_req(s, id)
  if call('HSETNX', record, 'f' .. choice, finish) == 0 then return false, false end
  if detail ~= '' then call('HSET', record, 'detail', detail) end
  if call('HINCRBY', record, 'left', -1) > 0 then return true, false end
  local n, told = hmget(record, 'n', 'detail')
  local state = 'finished'
  for at = 0, num(n) - 1 do
    local reason = call('HGET', record, 'f' .. at)
    if reason == 'failed' then
      state = 'failed'
    elseif state ~= 'failed' and (reason == 'cancelled' or reason == 'deadline') then
      state = 'cancelled'
    end
  end
  end_request(s, id, state, finish, text(told))
  return true, true
end

-- id → value in `held`, for every id of the frame. A small hash is a list to Redis and HMGET walks it once per field
-- (256 fields of 256: 320 µs), so all but the shortest frames read it whole.
local HMGET_FIELDS = 8

local function held_values(s, worker, ids)
  local key, held = key_held(s, worker), {}
  if #ids <= HMGET_FIELDS then
    local values = call('HMGET', key, unpack(ids))
    for at = 1, #values do held[ids[at]] = values[at] end
    return held
  end
  local flat = call('HGETALL', key)
  for at = 1, #flat, 2 do held[flat[at]] = flat[at + 1] end
  return held
end

-- `<epoch>:<mark>:<owner>`; a frame's requests share few different values, so each is parsed once.
local PARSED = {
  __index = function(cache, value)
    local epoch, mark, owner = string.match(value, '^(%d+):(.-):(.*)$')
    local parsed = {epoch = tonumber(epoch), is_marked = mark ~= '', owner = owner}
    rawset(cache, value, parsed)
    return parsed
  end,
}

local function new_taken()
  return {resend = {}, dropped = {}, is_dropped = {}, outgoing = {}, owners = {}}
end

local function drop(taken, id)
  if not taken.is_dropped[id] then
    taken.is_dropped[id] = true
    taken.dropped[#taken.dropped + 1] = id
  end
end

local function outgoing_to(taken, owner)
  local to = taken.outgoing[owner]
  if not to then
    to = {}
    taken.outgoing[owner] = to
    taken.owners[#taken.owners + 1] = owner
  end
  return to
end

-- What is not the usual "append these tokens": a finish, a mark, a part that is partly or wholly known, a gap.
-- True when the request ended.
local function take_unusual(s, taken, key, holding, part)
  local id, choice, finish = part.id, part.choice, part.finish
  local at, fresh = append_missing(key, part.first, part.tokens)
  if not fresh then
    taken.resend[#taken.resend + 1] = {id, choice, at}
    return false
  end
  local newly, ended = false, false
  if finish ~= '' then newly, ended = finish_choice(s, id, choice, finish, part.detail) end
  local to = outgoing_to(taken, holding.owner)
  if fresh ~= '' or newly then
    local told = part.packed
    if at ~= part.first or #fresh ~= #part.tokens or newly ~= (finish ~= '') then
      told = pack_part(id, choice, at, fresh, newly and finish or '', part.detail)
    end
    to[#to + 1] = told
  end
  if holding.is_marked and finish == '' then
    -- The cancel was marked before this frame: it has had its one further iteration.
    for _, last in ipairs(end_request(s, id, 'cancelled', 'cancelled', '')) do to[#to + 1] = last end
    drop(taken, id)
    ended = true
  end
  return ended
end

-- Fencing is one look at `held`: its value must begin with the part's epoch. The usual part costs one APPEND, whose
-- reply, the new length, tells whether it landed at the journal's exact end.
local function take_parts(s, worker, ids, choices, epochs, firsts, tokens, packed, ends)
  local taken = new_taken()
  if #ids == 0 then return taken end
  local held, parsed, prefix, call = held_values(s, worker, ids), setmetatable({}, PARSED), s.p .. 'tok:', call
  local finishes = {}
  for _, last in ipairs(ends) do finishes[last[1] + 1] = last end
  for at = 1, #ids do
    local id, choice, value = ids[at], choices[at], held[ids[at]]
    local holding = value and parsed[value]
    if not holding or holding.epoch ~= epochs[at] then
      drop(taken, id)
    else
      local key = prefix .. id .. (choice == 0 and ':0' or ':' .. choice)
      local fresh, last, landed = tokens[at], finishes[at], false
      if not last and not holding.is_marked and fresh ~= '' then
        local before = call('APPEND', key, fresh) - #fresh
        landed = before == firsts[at] * 4
        if not landed then undo_append(key, before) end
      end
      if landed then
        local to = holding.to or outgoing_to(taken, holding.owner)
        holding.to = to
        to[#to + 1] = packed[at]
      else
        local ended = take_unusual(s, taken, key, holding, {
          id = id, choice = choice, first = firsts[at], tokens = fresh, packed = packed[at],
          finish = last and last[2] or '', detail = last and last[3] or '',
        })
        if ended then held[id] = nil end
      end
    end
  end
  return taken
end

local function report(s, a)
  local worker, seq = a[1], a[2]
  local fenced, put_back = renew(s, worker)
  if fenced then return {1, {}, {}, 0, s.now} end
  update_board(s, worker, {
    seq = seq, last = a[3], credit = a[4], slots = a[5], draining = a[6], ordered = 0, total = a[7], size = a[8],
    context = a[9],
  }, a[10])
  local taken = take_parts(s, worker, a[11], a[12], a[13], a[14], a[15], a[16], a[17])
  for _, owner in ipairs(taken.owners) do tell_router(s, owner, worker, seq, taken.outgoing[owner]) end
  local claimed = claim_for(s, worker)
  if put_back then claim_all(s, {}, worker) end
  return {0, taken.resend, taken.dropped, claimed, s.now}
end

-- Back to the queue at its rank, for other workers; only its holder of this epoch may.
local function release(s, a)
  local worker, id, epoch = a[1], a[2], a[3] .. ':'
  local value = call('HGET', key_held(s, worker), id)
  if not value or string.sub(value, 1, #epoch) ~= epoch then return {0} end
  requeue(s, id, worker)
  claim_all(s, {}, worker)
  return {1}
end
