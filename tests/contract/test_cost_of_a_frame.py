"""Server time of one `report`, against a bare loop of the appends it cannot do without, in turns on the same server.

Times of a shared machine wander by factors; the least of many single calls and its ratio to the bare loop do not.
Run with `-s` to see the figures that the ADR quotes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import redis

from headrace.codec import encode_load, logprob_bytes
from headrace.store.calls import part_columns
from headrace.store.functions import library
from headrace.store.keys import Keys
from tests.contract.servers import Server
from tests.contract.store_pair import LOAD, ROUTER, WORKER

FRAMES = 200
BARE = """#!lua name=bare
redis.register_function{function_name='bare', flags={'allow-oom'}, callback=function(keys, args)
  local argument = cmsgpack.unpack(args[1])
  for at = 1, #argument[1] do redis.call('APPEND', keys[1] .. argument[1][at], argument[2][at]) end
  return 'ok'
end}
redis.register_function{function_name='checked', flags={'allow-oom'}, callback=function(keys, args)
  local argument = cmsgpack.unpack(args[1])
  for at = 1, #argument[1] do
    redis.call('HGET', keys[1] .. argument[1][at] .. ':record', 'epoch')
    redis.call('APPEND', keys[1] .. argument[1][at], argument[2][at])
  end
  return 'ok'
end}
"""


@dataclass
class Times:
    """Microseconds inside the server, per call."""

    report: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    checked: list[float] = field(default_factory=list)


def server_time(client: redis.Redis, call: Callable[[], object]) -> float:
    client.config_resetstat()
    call()
    stats: Any = client.info("commandstats")
    return float(stats["cmdstat_fcall"]["usec_per_call"])


def measure(client: redis.Redis, size: int, records: bytes = b"") -> Times:
    """`records`: the log probabilities of each part's one token."""
    client.flushall()
    client.execute_command("FUNCTION", "LOAD", "REPLACE", BARE)
    client.execute_command("FUNCTION", "LOAD", "REPLACE", library().source)
    board = Keys("cost", "model").board
    load = msgpack.packb(encode_load(LOAD))
    ids = [f"{at:032d}" for at in range(size)]
    tokens = [b"\1\2\3\4"] * size

    def call(function: str, *argument: Any) -> Any:
        packed = msgpack.packb(argument, use_bin_type=False)
        return lambda: client.execute_command("FCALL", function, 1, board, packed)

    def report(seq: int, seen: str, credit: int, rows: list[Any]) -> Any:
        name = library().function("report")
        return call(name, WORKER, seq, seen, credit, credit, 0, 9_999, 16, 8_192, load, *part_columns(rows))

    report(1, "0-0", 9_999, [])()
    for name in ids:
        admission = [ROUTER, name, b"p" * 2_000, "t", 0, 1, 9, 300, 300, [WORKER], [], 0, 0, 0, 60_000, "", 0, 0]
        call(library().function("admit"), *admission)()
    seen = client.xinfo_stream(Keys("cost", "model").inbox(WORKER))["last-generated-id"].decode()
    times = Times()
    for step in range(FRAMES):
        rows = [(name, 0, 1, step, token, "", "", records, b"") for name, token in zip(ids, tokens, strict=True)]
        times.report.append(server_time(client, report(2 + step, seen, 0, rows)))
        times.bare.append(server_time(client, call("bare", ids, tokens)))
        times.checked.append(server_time(client, call("checked", ids, tokens)))
    assert client.strlen(Keys("cost", "model").journal(ids[0], 0)) == 4 * FRAMES
    return times


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tops", "most"), [(32, None, 6), (256, None, 4), (32, 5, 10), (256, 5, 8)])
def test_a_frame_costs_little_more_than_its_appends(server: Server, size: int, tops: int | None, most: int) -> None:
    records = b"" if tops is None else bytes(logprob_bytes(tops))
    with server.client() as client:
        times = measure(client, size, records)
    report, bare, checked = min(times.report), min(times.bare), min(times.checked)
    median = sorted(times.report)[FRAMES // 2]
    what = f"{size} requests, " + ("no log probabilities" if tops is None else f"{tops} likeliest")
    print(f"\n{what}: report {report:.0f} µs (median {median:.0f}), bare {bare:.0f}, checked {checked:.0f}")
    assert report < most * bare
