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

local function drop(taken, id)
  if not taken.is_dropped[id] then
    taken.is_dropped[id] = true
    taken.dropped[#taken.dropped + 1] = id
  end
end

-- What goes out of a frame. The worker sends its parts already joined; while all of them are usual and of one owner,
-- that blob is the delivery as it stands. At the first that is not, it is cut: `spread` gives the ones before their place.
local function new_outgoing(packed, sizes)
  return {packed = packed, sizes = sizes, only = nil, lists = nil, owners = {}, starts = nil, logprobs = {}}
end

local function list_of(out, owner)
  local list = out.lists[owner]
  if not list then
    list = {}
    out.lists[owner] = list
    out.owners[#out.owners + 1] = owner
  end
  return list
end

local function cut(out, at)
  return string.sub(out.packed, out.starts[at], out.starts[at + 1] - 1)
end

-- `done` parts so far were usual and for `out.only`.
local function spread(out, done)
  if out.lists then return end
  out.lists, out.starts = {}, {1}
  for at = 1, #out.sizes do out.starts[at + 1] = out.starts[at] + out.sizes[at] end
  if done == 0 then return end
  local list = list_of(out, out.only)
  for at = 1, done do list[at] = cut(out, at) end
end

local function send(s, out, worker, seq)
  if not out.lists then
    if out.only then tell_router(s, out.only, worker, seq, {out.packed}, out.logprobs[out.only]) end
    return
  end
  for _, owner in ipairs(out.owners) do tell_router(s, owner, worker, seq, out.lists[owner], out.logprobs[owner]) end
end

-- column → log probabilities as the worker packed them; nil in a frame without any, which pays nothing for them.
local function scores_of(c)
  if #c.scored + #c.prompts == 0 then return nil end
  local scores = {runs = {}, prompts = {}}
  for at, column in ipairs(c.scored) do scores.runs[column + 1] = c.runs[at] end
  for _, prompt in ipairs(c.prompts) do scores.prompts[prompt[1] + 1] = prompt[2] end
  return scores
end

-- The layout of parts.py.
local RUN, RUN_BYTES, RECORD_AT = '<I2I2I4I2I4', 14, 9

-- Journals the log probabilities of the tokens that a part has just added at `index`, and passes them on beside it. A
-- hole before them (tokens of a worker that tells none) is filled with zeros: rank 0 says that there are none.
local function tell_scores(s, out, owner, at, id, choice, first, index, fresh)
  if fresh == '' then return end
  local run, prompt = out.scores.runs[at], out.scores.prompts[at]
  if run then
    local size = struct.unpack('<I2', run, RECORD_AT)
    local records = string.sub(run, RUN_BYTES + #id + (index - first) * size + 1)
    call('SETRANGE', key_lp(s, id, choice), index * size, records)
    if index ~= first then run = struct.pack(RUN, #id, choice, index, size, #records) .. id .. records end
    local told = out.logprobs[owner]
    if told then told[#told + 1] = run else out.logprobs[owner] = {run} end
  end
  if prompt then call('SETNX', key_plp(s, id), prompt) end
end

-- What is not the usual "append these tokens": a finish, a mark, a part that is partly or wholly known, a gap.
-- True when the request ended.
local function take_unusual(s, taken, out, key, holding, part)
  local id, choice, finish = part.id, part.choice, part.finish
  local index, fresh = append_missing(key, part.first, part.tokens)
  if not fresh then
    taken.resend[#taken.resend + 1] = {id, choice, index}
    return false
  end
  if out.scores then tell_scores(s, out, holding.owner, part.at, id, choice, part.first, index, fresh) end
  local newly, ended = false, false
  if finish ~= '' then newly, ended = finish_choice(s, id, choice, finish, part.detail) end
  if fresh ~= '' or newly then
    local list = list_of(out, holding.owner)
    if index ~= part.first or #fresh ~= #part.tokens or newly ~= (finish ~= '') then
      list[#list + 1] = pack_part(id, choice, index, fresh, newly and finish or '', part.detail)
    else
      list[#list + 1] = cut(out, part.at)
    end
  end
  if holding.is_marked and finish == '' then
    -- The cancel was marked before this frame: it has had its one further iteration.
    local list = list_of(out, holding.owner)
    for _, last in ipairs(end_request(s, id, 'cancelled', 'cancelled', '')) do list[#list + 1] = last end
    drop(taken, id)
    ended = true
  end
  return ended
end

-- Whether the tokens landed at the journal's exact end: APPEND's reply, the new length, tells.
local function lands(key, first, tokens)
  local before = call('APPEND', key, tokens) - #tokens
  if before == first * 4 then return true end
  undo_append(key, before)
  return false
end

-- Fencing is one look at `held`: its value must begin with the part's epoch. The usual part costs one APPEND.
local function take_parts(s, worker, c)
  local taken = {resend = {}, dropped = {}, is_dropped = {}}
  local ids, choices, epochs, firsts, tokens = c.ids, c.choices, c.epochs, c.firsts, c.tokens
  local out = new_outgoing(c.packed, c.sizes)
  if #ids == 0 then return taken, out end
  local held, parsed, prefix = held_values(s, worker, ids), setmetatable({}, PARSED), s.p .. 'tok:'
  local finishes = {}
  for _, last in ipairs(c.ends) do finishes[last[1] + 1] = last end
  local scores = scores_of(c)
  out.scores = scores
  for at = 1, #ids do
    local id, choice, fresh, last = ids[at], choices[at], tokens[at], finishes[at]
    local value = held[id]
    local holding = value and parsed[value]
    if not holding or holding.epoch ~= epochs[at] then
      spread(out, at - 1)
      drop(taken, id)
    else
      local key = prefix .. id .. (choice == 0 and ':0' or ':' .. choice)
      if not last and not holding.is_marked and fresh ~= '' and lands(key, firsts[at], fresh) then
        local owner = holding.owner
        if scores then tell_scores(s, out, owner, at, id, choice, firsts[at], firsts[at], fresh) end
        if not out.lists and owner ~= (out.only or owner) then spread(out, at - 1) end
        if out.lists then
          local list = list_of(out, owner)
          list[#list + 1] = cut(out, at)
        else
          out.only = owner
        end
      else
        spread(out, at - 1)
        local ended = take_unusual(s, taken, out, key, holding, {
          at = at, id = id, choice = choice, first = firsts[at], tokens = fresh,
          finish = last and last[2] or '', detail = last and last[3] or '',
        })
        if ended then held[id] = nil end
      end
    end
  end
  return taken, out
end

local function report(s, a)
  local worker, seq = a[1], a[2]
  local fenced, put_back = renew(s, worker)
  if fenced then return {1, {}, {}, 0, s.now} end
  update_board(s, worker, {
    seq = seq, last = a[3], credit = a[4], slots = a[5], draining = a[6], ordered = 0, total = a[7], size = a[8],
    context = a[9],
  }, a[10])
  local taken, out = take_parts(s, worker, {
    ids = a[11], choices = a[12], epochs = a[13], firsts = a[14], tokens = a[15], packed = a[16], sizes = a[17],
    ends = a[18], scored = a[19], runs = a[20], prompts = a[21],
  })
  send(s, out, worker, seq)
  local claimed = claim_for(s, worker)
  if put_back then claim_all(s, {}, worker) end
  return {0, taken.resend, taken.dropped, claimed, s.now}
end

local function has_room_elsewhere(s, id, worker)
  if is_quiet(s) then return false end
  local entry, workers = look(s, id, false), workers_to_try(s, {})
  for at = 1, math.min(#workers, WORKERS_TRIED) do
    if workers[at] ~= worker then
      local room = room_of(s, workers[at])
      if takes(room, entry.price, entry.need, entry.span, entry.choices) then return true end
    end
  end
  return false
end

-- Back to the queue at its rank, for other workers; only its holder of this epoch may. With a[4], only while another
-- worker has room for it, and not for ever: two workers must not play it to each other.
local function release(s, a)
  local worker, id, epoch = a[1], a[2], a[3] .. ':'
  local value = call('HGET', key_held(s, worker), id)
  if not value or string.sub(value, 1, #epoch) ~= epoch then return {0} end
  if a[4] == 1 then
    local backs = num(call('HGET', key_req(s, id), 'backs'))
    if backs >= HAND_BACKS or not has_room_elsewhere(s, id, worker) then return {0} end
    call('HSET', key_req(s, id), 'backs', backs + 1)
  end
  requeue(s, id, worker)
  claim_all(s, {}, worker)
  return {1}
end
