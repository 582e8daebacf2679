"""One server per kind for the whole suite, and a pair of stores over the twin or over one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.contract.servers import Server, binaries
from tests.contract.store_pair import StorePair, server_pair, twin_pair


@pytest.fixture(scope="session")
def running() -> Iterator[dict[str, Server]]:
    """Servers that some test asked for, by name."""
    started: dict[str, Server] = {}
    yield started
    for one in started.values():
        one.close()


def _start(running: dict[str, Server], name: str) -> Server:
    if name not in running:
        running[name] = Server(binaries()[name])
    return running[name]


@pytest.fixture(params=sorted(binaries()))
def server(request: pytest.FixtureRequest, running: dict[str, Server]) -> Server:
    return _start(running, request.param)


@pytest_asyncio.fixture(params=["twin", *sorted(binaries())])
async def pair(request: pytest.FixtureRequest, running: dict[str, Server]) -> AsyncIterator[StorePair]:
    is_twin = request.param == "twin"
    pairs = iter([twin_pair()]) if is_twin else server_pair(_start(running, request.param))
    stores = next(pairs)
    stores.wait(0)
    yield stores
    await stores.router.close()
    assert next(pairs, None) is None
