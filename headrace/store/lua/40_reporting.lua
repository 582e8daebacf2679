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

-- APPEND tells the new length, so the usual case is one command. Anything else is put back as it was.
local function append_at(key, first, tokens)
  local added = #tokens
  if added == 0 then
    local length = call('STRLEN', key) / 4
    return length, first <= length and '' or nil
  end
  local length = call('APPEND', key, tokens) - added
  if length == first * 4 then return first, tokens end
  if length == 0 then
    call('DEL', key)
  else
    call('SET', key, call('GETRANGE', key, 0, length - 1))
  end
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

local function held_values(s, worker, parts)
  local ids, held = {}, {}
  for _, part in ipairs(parts) do
    if held[part[1]] == nil then
      held[part[1]] = false
      ids[#ids + 1] = part[1]
    end
  end
  for start = 1, #ids, 1000 do
    local stop = math.min(#ids, start + 999)
    local values = call('HMGET', key_held(s, worker), unpack(ids, start, stop))
    for at, value in ipairs(values) do held[ids[start + at - 1]] = value end
  end
  return held
end

-- Fencing is one look at `held`: its value must begin with the part's epoch.
local function take_parts(s, worker, parts)
  local resend, dropped, outgoing, owners, is_dropped = {}, {}, {}, {}, {}
  if #parts == 0 then return resend, dropped, outgoing, owners end
  local held = held_values(s, worker, parts)
  local function drop(id)
    if not is_dropped[id] then
      is_dropped[id] = true
      dropped[#dropped + 1] = id
    end
  end
  local function outgoing_to(owner)
    if not outgoing[owner] then
      outgoing[owner] = {}
      owners[#owners + 1] = owner
    end
    return outgoing[owner]
  end
  for _, part in ipairs(parts) do
    local id, choice, finish = part[1], part[2], part[6]
    local epoch = part[3] .. ':'
    local value = held[id]
    if not value or string.sub(value, 1, #epoch) ~= epoch then
      drop(id)
    else
      local colon = string.find(value, ':', #epoch + 1, true)
      local mark, owner = colon > #epoch + 1, string.sub(value, colon + 1)
      local at, fresh = append_at(key_tok(s, id, choice), part[4], part[5])
      if not fresh then
        resend[#resend + 1] = {id, choice, at}
      else
        local newly, ended = false, false
        if finish ~= '' then newly, ended = finish_choice(s, id, choice, finish, part[7]) end
        if fresh ~= '' or newly then
          part[4], part[5] = at, fresh
          if not newly then part[6] = '' end
          local to = outgoing_to(owner)
          to[#to + 1] = part
        end
        if mark and finish == '' then
          -- The cancel was marked before this frame: it has had its one further iteration.
          local to = outgoing_to(owner)
          for _, last in ipairs(end_request(s, id, 'cancelled', 'cancelled', '')) do to[#to + 1] = last end
          drop(id)
          ended = true
        end
        if ended then held[id] = false end
      end
    end
  end
  return resend, dropped, outgoing, owners
end

local function report(s, a)
  local worker, seq, load, parts = a[1], a[2], a[10], a[11]
  local fenced, put_back = renew(s, worker)
  if fenced then return {1, {}, {}, 0, s.now} end
  update_board(s, worker, {
    seq = seq, last = a[3], credit = a[4], slots = a[5], draining = a[6], ordered = 0, total = a[7], size = a[8],
    context = a[9],
  }, load)
  local resend, dropped, outgoing, owners = take_parts(s, worker, parts)
  for _, owner in ipairs(owners) do tell_router(s, owner, worker, seq, outgoing[owner]) end
  local claimed = claim_for(s, worker)
  if put_back then claim_all(s, {}, worker) end
  return {0, resend, dropped, claimed, s.now}
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
