-- Names the functions. Each takes one declared key and one msgpack argument, and returns one msgpack reply.
-- Only `admit` may be refused when memory is full.

local function register(name, body, flags)
  redis.register_function{
    function_name = PREFIX .. name,
    flags = flags,
    callback = function(keys, args)
      return cmsgpack.pack(body(open_slot(keys[1]), cmsgpack.unpack(args[1])))
    end,
  }
end

local WRITES, READS = {'allow-oom'}, {'no-writes', 'allow-oom'}

register('admit', admit, {})
register('report', report, WRITES)
register('release', release, WRITES)
register('cancel', cancel, WRITES)
register('attach', attach, WRITES)
register('end', end_, WRITES)
register('drain', drain, WRITES)
register('leave', leave, WRITES)
register('sweep', sweep, WRITES)
register('board', board, READS)
register('status', status, READS)
register('fetch', fetch, READS)
register('census', census, READS)
register('inspect', inspect, READS)
