"""The Lua library as text: every limit reaches it, and two texts never share a name."""

from __future__ import annotations

import re

from headrace.store import limits
from headrace.store.functions import library
from headrace.store.twin import FUNCTIONS


def test_limits_are_declared_with_their_values() -> None:
    source = library().source
    for name, value in limits.table().items():
        assert f"\nlocal {name} = {value}\n" in source
    assert limits.table()["LEASE_MS"] == 3_000


def test_both_sides_have_the_same_functions() -> None:
    registered = re.findall(r"^register\('(\w+)'", library().source, flags=re.MULTILINE)
    assert sorted(registered) == sorted(FUNCTIONS)


def test_only_admit_may_be_refused_when_memory_is_full() -> None:
    flags = dict(re.findall(r"^register\('(\w+)', \w+, (\w+|\{\})\)", library().source, flags=re.MULTILINE))
    assert [name for name, given in flags.items() if given == "{}"] == ["admit"]


def test_another_text_is_another_library() -> None:
    other = library("local function read_clock() return 1 end\nlocal function read_run_id() return '' end\n")
    assert other.name != library().name
    assert other.function("admit") != library().function("admit")
    assert library().function("admit").startswith("hr1_")
