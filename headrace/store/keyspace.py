"""The few Redis data types that the store uses, in memory, with Redis' own rules (empty collections vanish)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Field = str | bytes
StreamId = tuple[int, int]
Fields = dict[str, Field]


def parse_id(text: str) -> StreamId:
    """`ms-seq` as a pair; an empty text or a bare `ms` counts from 0."""
    ms, _, seq = text.partition("-")
    return int(ms or 0), int(seq or 0)


def format_id(stream_id: StreamId) -> str:
    return f"{stream_id[0]}-{stream_id[1]}"


@dataclass
class Stream:
    entries: list[tuple[StreamId, Fields]] = field(default_factory=list)
    last: StreamId = (0, 0)


class Keyspace:
    """One dictionary per type; a key is in at most one of them."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, Field]] = {}
        self.zsets: dict[str, dict[str, int]] = {}
        self.sets: dict[str, set[str]] = {}
        self.strings: dict[str, bytes] = {}
        self.streams: dict[str, Stream] = {}

    def exists(self, key: str) -> bool:
        return any(key in kind for kind in (self.hashes, self.zsets, self.sets, self.strings, self.streams))

    def delete(self, key: str) -> None:
        for kind in (self.hashes, self.zsets, self.sets, self.strings, self.streams):
            kind.pop(key, None)

    def names(self) -> list[str]:
        kinds = (self.hashes, self.zsets, self.sets, self.strings, self.streams)
        return sorted(key for kind in kinds for key in kind)

    # hashes

    def hget(self, key: str, name: str) -> str | None:
        value = self.hashes.get(key, {}).get(name)
        return value.decode() if isinstance(value, bytes) else value

    def hget_bytes(self, key: str, name: str) -> bytes | None:
        value = self.hashes.get(key, {}).get(name)
        return value.encode() if isinstance(value, str) else value

    def hnum(self, key: str, name: str) -> int:
        return int(self.hget(key, name) or 0)

    def hset(self, key: str, values: Mapping[str, Field | int]) -> None:
        target = self.hashes.setdefault(key, {})
        for name, value in values.items():
            target[name] = str(int(value)) if isinstance(value, int) else value

    def hsetnx(self, key: str, name: str, value: str) -> bool:
        if name in self.hashes.get(key, {}):
            return False
        self.hset(key, {name: value})
        return True

    def hincrby(self, key: str, name: str, by: int) -> int:
        value = self.hnum(key, name) + by
        self.hset(key, {name: value})
        return value

    def hdel(self, key: str, name: str) -> bool:
        target = self.hashes.get(key, {})
        found = target.pop(name, None) is not None
        if key in self.hashes and not target:
            del self.hashes[key]
        return found

    def hlen(self, key: str) -> int:
        return len(self.hashes.get(key, {}))

    def hkeys(self, key: str) -> list[str]:
        """Sorted: Redis gives no order, so the functions sort too."""
        return sorted(self.hashes.get(key, {}), key=str.encode)

    # sorted sets

    def zadd(self, key: str, member: str, score: int) -> None:
        self.zsets.setdefault(key, {})[member] = score

    def zrem(self, key: str, member: str) -> bool:
        target = self.zsets.get(key, {})
        found = target.pop(member, None) is not None
        if key in self.zsets and not target:
            del self.zsets[key]
        return found

    def zscore(self, key: str, member: str) -> int | None:
        return self.zsets.get(key, {}).get(member)

    def zcard(self, key: str) -> int:
        return len(self.zsets.get(key, {}))

    def zrange(self, key: str, count: int | None = None) -> list[tuple[str, int]]:
        """The `count` lowest (member, score), ties by member."""
        ordered = sorted(self.zsets.get(key, {}).items(), key=lambda item: (item[1], item[0].encode()))
        return ordered if count is None else ordered[:count]

    def zrank(self, key: str, member: str) -> int:
        return [name for name, _ in self.zrange(key)].index(member)

    def zrange_up_to(self, key: str, highest: int, count: int) -> list[str]:
        return [member for member, score in self.zrange(key) if score <= highest][:count]

    # sets

    def sadd(self, key: str, member: str) -> None:
        self.sets.setdefault(key, set()).add(member)

    def srem(self, key: str, member: str) -> None:
        target = self.sets.get(key, set())
        target.discard(member)
        if key in self.sets and not target:
            del self.sets[key]

    def smembers(self, key: str) -> list[str]:
        return sorted(self.sets.get(key, set()), key=str.encode)

    # strings

    def get(self, key: str) -> bytes:
        return self.strings.get(key, b"")

    def append(self, key: str, value: bytes) -> None:
        self.strings[key] = self.get(key) + value

    def set_range(self, key: str, offset: int, value: bytes) -> None:
        """Overwrites from `offset` on; zeros fill what lies between the end and it."""
        if value:
            old = self.get(key).ljust(offset, b"\0")
            self.strings[key] = old[:offset] + value + old[offset + len(value) :]

    def strlen(self, key: str) -> int:
        return len(self.get(key))

    # streams

    def xadd(self, key: str, now: int, fields: Fields, max_length: int | None = None) -> None:
        """Appends at `<now>-<next>`, or after the last id when the clock went back."""
        stream = self.streams.setdefault(key, Stream())
        last_ms, last_seq = stream.last
        stream.last = (last_ms, last_seq + 1) if now <= last_ms else (now, 0)
        stream.entries.append((stream.last, fields))
        if max_length is not None:
            del stream.entries[: max(0, len(stream.entries) - max_length)]

    def xafter(self, key: str, after: str, count: int | None = None) -> list[tuple[StreamId, Fields]]:
        stream = self.streams.get(key, Stream())
        floor = parse_id(after)
        found = [entry for entry in stream.entries if entry[0] > floor]
        return found if count is None else found[:count]

    def xtrim_through(self, key: str, last_seen: str) -> None:
        stream = self.streams.get(key)
        if stream is not None:
            floor = parse_id(last_seen)
            stream.entries = [entry for entry in stream.entries if entry[0] > floor]
