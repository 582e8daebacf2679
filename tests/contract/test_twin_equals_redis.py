"""The same random calls to the twin and to a real server: equal replies, equal keys, and invariants at every step."""

from __future__ import annotations

import copy

import pytest

from tests.contract.invariants import check
from tests.contract.random_calls import RandomCalls
from tests.contract.servers import Server
from tests.contract.slots import RealSlot, TwinSlot

CALLS_PER_SEQUENCE = 60
REPEATABLE = {"admit", "report", "release", "cancel", "end", "drain", "leave", "sweep"}
"""All but `attach`, where every call is a new ownership."""


def run_sequence(server: Server, seed: int, length: int = CALLS_PER_SEQUENCE) -> None:
    client = server.client()
    try:
        twin, real = TwinSlot(), RealSlot(client)
        calls = RandomCalls(seed, twin.twin)
        for step in range(length):
            calls.tick()
            twin.set_clock(calls.now, calls.run_id)
            real.set_clock(calls.now, calls.run_id)
            function, argument = calls.draw()
            expected = twin.call(function, *copy.deepcopy(argument))
            assert real.call(function, *argument) == expected, (seed, step, function, argument)
            if function in REPEATABLE and calls.random.random() < 0.1:
                before = twin.dump()
                twin.call(function, *copy.deepcopy(argument))
                assert twin.dump() == before, (seed, step, function, argument)
                real.call(function, *argument)
            check(twin.twin)
        assert real.dump() == twin.dump(), seed
    finally:
        client.close()


@pytest.mark.parametrize("batch", range(4))
def test_random_sequences(server: Server, batch: int) -> None:
    for seed in range(batch * 42, batch * 42 + 42):
        run_sequence(server, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(10))
def test_a_hundred_thousand_calls(server: Server, batch: int) -> None:
    for seed in range(10_000 + batch * 170, 10_000 + batch * 170 + 170):
        run_sequence(server, seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_short_sequences(server: Server, request: pytest.FixtureRequest) -> None:
    """Full state is compared after each; `--sequences 100000` is the run that ADR 2 records."""
    for seed in range(1_000_000, 1_000_000 + request.config.getoption("--sequences")):
        run_sequence(server, seed, length=4 + seed % 17)
