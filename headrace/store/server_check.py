"""Judges a Redis server by its own INFO: which settings would break "accepted means kept", and what an error means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import Unavailable

OLDEST = (7, 0)
"""Functions came with Redis 7.0."""


@dataclass(frozen=True)
class ServerCheck:
    version: str
    """As the server names itself, such as "valkey 9.1.2" or "redis 7.0.15"."""
    warnings: tuple[str, ...]
    """One sentence each; empty when requests are as safe as they can be."""


def judge(facts: Mapping[str, object]) -> ServerCheck:
    """`facts` are INFO's server, memory and persistence fields. Raises Unavailable for a server without functions."""
    spoken = str(facts.get("redis_version", "0.0"))
    version = f"valkey {facts['valkey_version']}" if "valkey_version" in facts else f"redis {spoken}"
    if _numbers(spoken) < OLDEST:
        raise Unavailable(f"Redis is too old ({version}): headrace needs 7.0 or later, or Valkey")
    warnings = []
    policy = str(facts.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        warnings.append(f"Redis may evict accepted requests (maxmemory-policy is {policy}): set it to noeviction.")
    if str(facts.get("aof_enabled", "1")) == "0":
        warnings.append("Redis keeps no append-only file: accepted requests are lost when it ends. Set appendonly yes.")
    elif facts.get("aof_last_write_status", "ok") != "ok":
        warnings.append("Redis could not write its append-only file: look at its disk.")
    return ServerCheck(version, tuple(warnings))


def _numbers(version: str) -> tuple[int, int]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major) if major.isdigit() else 0, int(minor) if minor.isdigit() else 0)


UNREACHABLE = "Redis cannot be reached or refuses"
TLS_FAILED = "TLS with Redis failed"
ADDRESSED = (UNREACHABLE, TLS_FAILED)
"""Sentences that go on with what the library says, which holds hosts, ports and paths."""


def why_away(fault: BaseException) -> str:
    """One sentence for clients, who must not learn where the store is; `why_unavailable` tells the operator."""
    told = why_unavailable(fault)
    return "the request store cannot be reached" if told.startswith(ADDRESSED) else told


def why_unavailable(fault: BaseException) -> str:
    """One sentence for what redis raised."""
    told = str(fault).strip().rstrip(".")
    upper = told.upper()
    if "NOAUTH" in upper or "AUTHENTICATION REQUIRED" in upper:
        return "Redis asks for a password and the URL has none"
    if "WRONGPASS" in upper or "INVALID PASSWORD" in upper or "INVALID USERNAME-PASSWORD" in upper:
        return "Redis refused the user name or password"
    if "WITHOUT ANY PASSWORD CONFIGURED" in upper:
        return "the URL has a password but Redis has none"
    if "NOPERM" in upper or "NO PERMISSIONS" in upper:
        return f"the Redis user may not do this: {told}"
    if "LOADING" in upper:
        return "Redis is still loading its data"
    if "TIMEOUT" in type(fault).__name__.upper() or upper.startswith("TIMEOUT"):
        return "Redis did not answer in time"
    if "SSL" in upper or "CERTIFICATE" in upper:
        return f"{TLS_FAILED}: {told}"
    return f"{UNREACHABLE}: {told or type(fault).__name__}"
