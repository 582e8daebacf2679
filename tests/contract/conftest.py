"""One server per kind for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.servers import Server, binaries


@pytest.fixture(scope="session", params=sorted(binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    running = Server(binaries()[request.param])
    try:
        yield running
    finally:
        running.close()
