"""Bounds and durations of the store's functions: the one source for the twin and for the Lua library's preamble."""

from __future__ import annotations

from headrace.store.interface import LEASE_MS

ROUTER_GRACE_MS = 15_000
"""Least grace of a request whose owner router died."""
CANCEL_TIMEOUT_MS = 5_000
"""How long a holder may take to end what it was told to cancel before a sweep does."""
FENCED_TTL_MS = 3_600_000
"""How long a fenced incarnation is remembered. Its parts stay refused afterwards too: it holds nothing."""
BANDS = 8
"""Priority bands, 0 to 7: a request of another is refused before it gets here."""
BAND_HORIZON_MS = 60_000
"""A request of band b waits as if it had come b horizons later, so low bands age into their turn."""
WINDOW = 32
"""Waiting requests that a claim looks at."""
CLAIMS = 32
"""Most binds of one call."""
SKIP_LIMIT = 16
"""How often the head of the fair order may be overtaken before a worker is reserved for it."""
WORKERS_TRIED = 32
HAND_BACKS = 3
"""How often a request that could not start may be handed on to a worker with room; then it stays where it is."""
MOVES = 256
"""Most requests of lost incarnations that one call moves."""
DUES = 128
LAPSES = 8
OUT_LENGTH = 2_048
"""Entries kept in a router's delivery stream; what falls out is read from the journal."""
RATE_WINDOW_MS = 1_000
RETRY_MS = 1_000
"""Retry advice while no drain rate is known."""


def table() -> dict[str, int]:
    """Name → value of every limit, as the Lua preamble declares them."""
    own = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
    return {**own, "LEASE_MS": LEASE_MS}
