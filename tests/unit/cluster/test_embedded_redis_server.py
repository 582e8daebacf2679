"""The embedded server: answers when started, keeps what it answered for, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cluster.embedded_redis import EmbeddedRedis
from cluster.errors import StartFailed
from cluster.processes import Process, wait_gone


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start(timeout_s=20)
    yield server
    server.stop()
    assert not server.processes


def connect(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, socket_timeout=15)


def only_process(server: EmbeddedRedis) -> Process:
    (process,) = server.processes
    return process


def test_it_is_durable_never_evicts_and_listens_on_no_tcp_port(server: EmbeddedRedis) -> None:
    with connect(server) as client:
        wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "port": "0"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted


def test_a_kill_loses_nothing_that_has_reached_the_file(server: EmbeddedRedis) -> None:
    url = server.url
    with connect(server) as client:
        for i in range(500):
            client.rpush("journal", i)
        # Writes wait while an fsync is in flight, so an answer alone does not say that they are in the file.
        assert client.execute_command("WAITAOF", 1, 0, 10_000)[0] == 1
    process = only_process(server)
    process.send(signal.SIGKILL)
    assert wait_gone([process], 10) == ()
    assert not server.is_alive()
    server.start(timeout_s=20)
    assert server.url == url
    with connect(server) as client:
        assert client.llen("journal") == 500


def test_stop_keeps_the_data_and_removes_the_socket(server: EmbeddedRedis, tmp_path: Path) -> None:
    with connect(server) as client:
        client.set("kept", "yes")
    process = only_process(server)
    server.stop()
    assert not process.is_alive()
    assert not (tmp_path / "redis" / "redis.sock").exists()
    server.stop()  # safe to repeat
    server.start(timeout_s=20)
    with connect(server) as client:
        assert client.get("kept") == b"yes"


def test_a_path_too_long_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / ("long" * 30) / "redis")
    socket = Path(server.url.removeprefix("unix://"))
    assert len(os.fsencode(socket)) < 100
    server.start(timeout_s=20)
    try:
        assert server.ping()
    finally:
        server.stop()
    assert not socket.parent.exists()


def test_its_own_reason_is_told_when_it_cannot_start(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("this is no manifest\n")
    server = EmbeddedRedis(folder)
    with pytest.raises(StartFailed, match=r"embedded Redis ended at start: .*(AOF|manifest)"):
        server.start(timeout_s=20)
    assert not server.processes


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from cluster.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1])); server.start(timeout_s=20)\n"
        "print(next(iter(server.processes)).pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "redis")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = Process.of(int(parent.stdout.readline()))
    assert child is not None
    assert child.is_alive()
    parent.kill()
    parent.communicate(timeout=10)
    assert wait_gone([child], 10) == ()
