"""What only a real server can show: lost functions, full memory, passwords, crashes, and the checks at start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.errors import Unavailable
from headrace.frame import Frame, Part
from headrace.store.adapter import MAX_CONNECTIONS, AsyncRedisStore, SyncRedisStore, check_server
from headrace.store.interface import Admitted, Refusal, Refused
from tests.contract.servers import Server, binaries
from tests.contract.slots import CLUSTER, MODEL
from tests.contract.store_pair import LOAD, ROUTER, WORKER, admission, part


@pytest.fixture(params=sorted(binaries()))
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the test's own, with an append-only file, to be killed at will."""
    server = Server(binaries()[request.param], appendonly="yes", appendfsync="everysec")
    yield server
    server.close()


def frame(*parts: Part, seq: int = 1) -> Frame:
    return Frame(replace(LOAD, seq=seq), parts, "")


async def test_functions_are_loaded_when_they_are_missing(own_server: Server) -> None:
    store = AsyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    link = SyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    assert not link.report(WORKER, frame()).fenced
    with own_server.client() as client:
        client.execute_command("FUNCTION", "FLUSH")
    assert [row.worker for row in await store.board()] == [WORKER]
    await store.close()
    link.close()


async def test_a_kill_of_the_server_loses_nothing_acknowledged(own_server: Server) -> None:
    store = AsyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    link = SyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    link.report(WORKER, frame())
    for at in range(20):
        assert isinstance(await store.admit(admission(f"q{at}")), Admitted)
    link.report(WORKER, frame(*(part(f"q{at}", 0, at, 7) for at in range(8)), seq=2))
    own_server.kill()
    with pytest.raises(Unavailable):
        await store.board()
    with pytest.raises(Unavailable):
        link.report(WORKER, frame(seq=3))
    own_server.start()
    assert [await store.journal(f"q{at}", 0, 0) for at in range(8)] == [(at, 7) for at in range(8)]
    assert len(await store.owned(ROUTER)) == 20
    assert (await store.sweep(ROUTER)).quiet is False, "the first sweep of this slot has nothing to compare with"
    census = await store.census()
    assert (census.waiting + census.bound, (await store.audit()).stray_keys) == (20, 0)
    await store.close()
    link.close()


async def test_any_number_of_calls_at_once_share_a_bounded_number_of_connections(own_server: Server) -> None:
    store = AsyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    await store.sweep(ROUTER)
    assert await asyncio.gather(*(store.status(f"q{at}") for at in range(400))) == [None] * 400
    with own_server.client() as client:
        assert len(client.client_list()) <= MAX_CONNECTIONS + 1
    await store.close()


async def test_only_admit_is_refused_when_memory_is_full(own_server: Server) -> None:
    store = AsyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    link = SyncRedisStore.connect(own_server.url, CLUSTER, MODEL)
    link.report(WORKER, frame())
    await store.admit(admission("q1"))
    with own_server.client() as client:
        client.config_set("maxmemory", 1)
    refused = await store.admit(admission("q2", n=3, prompt=20, max_tokens=12))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.asked) == (Refusal.STORE_FULL, 56)
    assert link.report(WORKER, frame(part("q1", 0, 5), seq=2)).dropped == ()
    assert await store.journal("q1", 0, 0) == (5,)
    assert await store.cancel("q1") is not None
    await store.close()
    link.close()


def test_the_check_names_the_version_and_what_is_unsafe(own_server: Server) -> None:
    assert check_server(own_server.url).warnings == ()
    with own_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
    check = check_server(own_server.url)
    assert check.version.split(" ")[0] in ("redis", "valkey")
    assert ["allkeys-lru" in check.warnings[0], "append-only" in check.warnings[1]] == [True, True]


def test_a_password_is_asked_for_in_one_sentence(own_server: Server) -> None:
    with own_server.client() as client:
        client.config_set("requirepass", "secret")
    with pytest.raises(Unavailable, match="asks for a password"):
        check_server(own_server.url)
    with pytest.raises(Unavailable, match="refused the user name or password"):
        check_server(f"unix://:wrong@{own_server.socket}")
    assert check_server(f"unix://:secret@{own_server.socket}").warnings == ()


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1", "http://127.0.0.1"])
def test_an_unreachable_server_is_one_sentence_too(url: str) -> None:
    with pytest.raises(Unavailable) as told:
        check_server(url)
    assert "\n" not in told.value.message
    assert told.value.message.startswith("Redis cannot be reached")
