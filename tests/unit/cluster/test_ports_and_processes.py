"""Ports are proven free in a way that SO_REUSEPORT cannot fool; processes are told apart by more than their pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from cluster.errors import OperatorError, PortInUse
from cluster.ports import answers, reachable_host, require_free
from cluster.processes import Process, descendants, end_all, wait_gone


def listener(*, shared: bool) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC and uvicorn do
    if shared:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@pytest.mark.parametrize("shared", [False, True])
def test_a_listener_is_found_even_if_it_shares_its_port(shared: bool) -> None:
    with listener(shared=shared) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} .*--grpc-port"):
            require_free("127.0.0.1", port, "--grpc-port")
        with pytest.raises(PortInUse):
            require_free("0.0.0.0", port, "--grpc-port")
        assert answers("127.0.0.1", port, 1.0)
    require_free("127.0.0.1", port, "--grpc-port")
    assert not answers("127.0.0.1", port, 0.1)


def test_connections_in_time_wait_do_not_count() -> None:
    with listener(shared=False) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps TIME_WAIT
            assert client.recv(1) == b""
    require_free("127.0.0.1", port, "--grpc-port")


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_the_operators_mistake(host: str) -> None:
    with pytest.raises(OperatorError) as caught:
        require_free(host, 50_051, "--grpc-port")
    assert not isinstance(caught.value, PortInUse)
    assert host in str(caught.value)


def test_every_interface_is_reached_on_loopback() -> None:
    assert [reachable_host(host) for host in ("0.0.0.0", "::", "10.1.2.3")] == ["127.0.0.1", "::1", "10.1.2.3"]


def sleeper(code: str = "") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; {code}\nprint('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_another_start_time_is_another_process() -> None:
    me = Process.of(os.getpid())
    assert me is not None
    assert me.is_alive()
    assert not replace(me, start_ticks=me.start_ticks + 1).is_alive()


def test_end_all_ends_the_polite_and_the_stubborn_and_spares_a_reused_pid() -> None:
    polite, stubborn, spared = (
        sleeper(),
        sleeper("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        sleeper(),
    )
    processes = [Process.of(child.pid) for child in (polite, stubborn)]
    bystander = Process.of(spared.pid)
    assert bystander is not None
    assert all(process is not None for process in processes)
    try:
        end_all([p for p in processes if p] + [replace(bystander, start_ticks=1)], grace_s=1.0)
        assert polite.wait(5) == -signal.SIGTERM
        assert stubborn.wait(5) == -signal.SIGKILL
        assert bystander.is_alive()
    finally:
        for child in (polite, stubborn, spared):
            child.kill()
            child.wait(5)
            child.stdout and child.stdout.close()
    assert wait_gone([bystander], 5) == ()


def test_descendants_are_found_through_the_generations() -> None:
    code = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    child = sleeper(code)
    try:
        found = descendants(os.getpid())
        assert child.pid in {process.pid for process in found}
        assert len(descendants(child.pid)) == 1
        assert set(descendants(child.pid)) <= set(found)
    finally:
        end_all([*descendants(child.pid)], 2.0)
        child.kill()
        child.wait(5)
        child.stdout and child.stdout.close()


def test_an_orphan_is_adopted_and_so_found() -> None:
    code = """
import os, subprocess, sys
from cluster.processes import adopt_orphans, descendants, end_all
adopt_orphans()
child = '''
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(sleeper, stdout=subprocess.DEVNULL).pid)
'''
pid = int(subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, check=True).stdout)
found = descendants(os.getpid())
assert pid in {p.pid for p in found}, (pid, found)
end_all(found, 2.0)
assert not any(p.is_alive() for p in found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
