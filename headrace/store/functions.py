"""The Lua library: the pieces under `lua/` joined in name order behind a preamble of limits and the clock.

Its name and the names of its functions carry a hash of the whole text, so two releases' libraries stand side by side
and a call can only meet the code it was written for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from headrace.store import limits

SERVER_CLOCK = """\
local function read_clock(prefix)
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function read_run_id(prefix)
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
end
"""


@dataclass(frozen=True)
class Library:
    """`source` is what FUNCTION LOAD takes."""

    name: str
    source: str
    function_prefix: str

    def function(self, name: str) -> str:
        return self.function_prefix + name


@cache
def library(clock: str = SERVER_CLOCK) -> Library:
    """`clock` defines `read_clock(prefix)` in milliseconds and `read_run_id(prefix)`; contract tests have their own."""
    folder = resources.files("headrace.store") / "lua"
    pieces = sorted((piece.name, piece.read_text()) for piece in folder.iterdir() if piece.name.endswith(".lua"))
    constants = "".join(f"local {name} = {value}\n" for name, value in sorted(limits.table().items()))
    body = constants + clock + "".join(text for _, text in pieces)
    digest = hashlib.blake2b(body.encode(), digest_size=5).hexdigest()
    prefix = f"hr1_{digest}_"
    source = f"#!lua name=headrace_{digest}\nlocal PREFIX = '{prefix}'\n{body}"
    return Library(f"headrace_{digest}", source, prefix)
