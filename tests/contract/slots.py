"""One slot of the twin and one of a real server behind the same three calls: `call`, `dump`, `set_clock`."""

from __future__ import annotations

from typing import Any

import msgpack
import redis

from headrace.store.functions import Library, library
from headrace.store.keys import Keys
from headrace.store.keyspace import format_id
from headrace.store.twin import Twin

CLUSTER, MODEL = "contract", "model"

TEST_CLOCK = """\
local function read_clock(prefix)
  return tonumber(redis.call('GET', 'test:' .. prefix .. 'clock'))
end
local function read_run_id(prefix)
  return redis.call('GET', 'test:' .. prefix .. 'run')
end
"""


def plain(value: Any) -> Any:
    """Text as bytes, all the way down: Redis knows no other text."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class TwinSlot:
    def __init__(self) -> None:
        self.now = 0
        self.twin = Twin(CLUSTER, MODEL, lambda: self.now)

    def set_clock(self, now: int, run_id: str) -> None:
        self.now, self.twin.run_id = now, run_id

    def call(self, function: str, *argument: Any) -> Any:
        return plain(self.twin.call(function, list(argument)))

    def dump(self) -> dict[str, Any]:
        ks = self.twin.keyspace
        found: dict[str, Any] = {}
        for key, hashed in ks.hashes.items():
            found[key] = {name.encode(): plain(value) for name, value in hashed.items()}
        for key, scores in ks.zsets.items():
            found[key] = [(member.encode(), float(score)) for member, score in ks.zrange(key)]
            assert scores
        found.update({key: {member.encode() for member in members} for key, members in ks.sets.items()})
        found.update(ks.strings)
        for key, stream in ks.streams.items():
            entries = [
                (format_id(stream_id), {name: plain(value) for name, value in fields.items()})
                for stream_id, fields in stream.entries
            ]
            found[key] = (format_id(stream.last), entries)
        return found


class RealSlot:
    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._keys = Keys(CLUSTER, MODEL)
        self._library: Library = library(TEST_CLOCK)
        client.flushall()
        client.execute_command("FUNCTION", "LOAD", "REPLACE", self._library.source)

    def set_clock(self, now: int, run_id: str) -> None:
        self._client.mset({f"test:{self._keys.prefix}clock": now, f"test:{self._keys.prefix}run": run_id})

    def call(self, function: str, *argument: Any) -> Any:
        packed = msgpack.packb(argument, use_bin_type=False)
        reply = self._client.execute_command("FCALL", self._library.function(function), 1, self._keys.board, packed)
        return msgpack.unpackb(reply, raw=True)

    def dump(self) -> dict[str, Any]:
        keys = sorted(self._client.scan_iter(match=self._keys.prefix + "*", count=1000))
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.type(key)
            kinds = pipe.execute()
            for key, kind in zip(keys, kinds, strict=True):
                self._read(pipe, key, kind)
            values = pipe.execute()
        return {
            key.decode(): self._value(key, kind, value) for key, kind, value in zip(keys, kinds, values, strict=True)
        }

    @staticmethod
    def _read(pipe: Any, key: bytes, kind: bytes) -> None:
        if kind == b"hash":
            pipe.hgetall(key)
        elif kind == b"zset":
            pipe.zrange(key, 0, -1, withscores=True)
        elif kind == b"set":
            pipe.smembers(key)
        elif kind == b"string":
            pipe.get(key)
        else:
            pipe.xrange(key)

    def _value(self, key: bytes, kind: bytes, value: Any) -> Any:
        if kind == b"stream":
            last = self._client.xinfo_stream(key)["last-generated-id"].decode()
            return (
                last,
                [(entry.decode(), {name.decode(): v for name, v in fields.items()}) for entry, fields in value],
            )
        if kind == b"set":
            return set(value)
        return [tuple(pair) for pair in value] if kind == b"zset" else value
