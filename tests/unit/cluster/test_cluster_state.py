"""State on disk: written by the lock's holder, private, and never mistaken for a living cluster."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import AlreadyUp
from cluster.launch import end_cluster
from cluster.processes import Process
from cluster.state import ClusterState, StateFolder, masked

STATE = ClusterState(
    name="default",
    phase="ready",
    pid=1234,
    cluster_id="default-1",
    model="tiny",
    model_path="/m",
    workers=2,
    host="127.0.0.1",
    grpc_port=50051,
    http_port=8000,
    redis="unix:///r",
    started_s=1.5,
    log="/l",
    processes=(Process(7, 8),),
)


def test_state_comes_back_as_it_was_and_is_private(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "default")
    with folder.locked():
        folder.write(STATE)
        folder.write_redis_url("redis://:secret@host")
    assert folder.read() == STATE
    assert folder.read_redis_url() == "redis://:secret@host"
    for path in (folder.path / "state.json", folder.path / "redis-url"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" not in (folder.path / "state.json").read_text()
    folder.clear()
    assert folder.read() is None
    assert folder.read_redis_url() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}', "null"])
def test_an_unreadable_state_counts_as_none(tmp_path: Path, text: str) -> None:
    folder = StateFolder(tmp_path, "default")
    folder.path.mkdir()
    (folder.path / "state.json").write_text(text)
    assert folder.read() is None


def test_only_one_holds_the_lock_and_a_killed_holder_frees_it(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "default")
    assert not folder.is_up()
    code = (
        "import sys, pathlib; from cluster.state import StateFolder\n"
        "with StateFolder(pathlib.Path(sys.argv[1]), 'default').locked(): print('up', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    assert folder.is_up()
    with pytest.raises(AlreadyUp, match="headrace down"), folder.locked():
        pytest.fail("two hold the lock")
    holder.kill()
    holder.communicate(timeout=10)
    assert not folder.is_up()


def test_the_cluster_id_stays_and_differs_between_names_and_folders(tmp_path: Path) -> None:
    ids = {StateFolder(tmp_path / root, name).cluster_id() for root in "ab" for name in ("one", "two")}
    assert len(ids) == 4
    assert StateFolder(tmp_path / "a", "one").cluster_id() in ids


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("rediss://:p%40ss@host", "rediss://:***@host"),
        ("redis://host", "redis://host"),
        ("unix:///a/b.sock", "unix:///a/b.sock"),
        ("", ""),
    ],
)
def test_a_password_is_masked(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_ending_what_is_not_up_does_nothing(tmp_path: Path) -> None:
    assert end_cluster(StateFolder(tmp_path, "default")) is None


def test_ending_after_a_killed_supervisor_ends_its_processes_but_not_a_reused_pid(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "default")
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    mine, reused = (Process.of(child.pid) for child in children)
    assert mine is not None
    assert reused is not None
    try:
        with folder.locked():
            stale = replace(reused, start_ticks=reused.start_ticks + 1)
            folder.write(replace(STATE, pid=children[1].pid, processes=(mine, stale)))
        ended = end_cluster(folder)
        assert ended is not None
        assert not mine.is_alive()
        assert reused.is_alive()
        assert folder.read() is None
        assert end_cluster(folder) is None
    finally:
        for child in children:
            child.kill()
            child.communicate(timeout=5)
