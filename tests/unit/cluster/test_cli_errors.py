"""What goes wrong is told in one line, with exit status 2 for what the operator can mend, and never as a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import free_port


@pytest.fixture
def run(tmp_path: Path):
    """Runs `headrace` with state and cache in a folder of its own."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_") and k != "RAY_ADDRESS"}
        own = {"HEADRACE_STATE": str(tmp_path / "state"), "HEADRACE_CACHE": str(tmp_path / "cache"), "NO_COLOR": "1"}
        if arguments[:1] == ("up",):  # a cluster on the default ports must not answer for the mistake under test
            own |= {"HEADRACE_GRPC_PORT": str(free_port()), "HEADRACE_HTTP_PORT": str(free_port())}
        return subprocess.run(
            [sys.executable, "-m", "cluster.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
            env=clean | own | environment,
        )

    return call


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str, status: int = 2) -> None:
    assert done.returncode == status, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("headrace: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port"])
def test_a_port_in_use_is_told_with_its_flag(run, flag: str) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        assert_one_line(run("up", "--detach", flag, port), port, flag, "in use")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--model", "no-such-model"), ("no-such-model", "no such model")),
        (("up", "--model", "./none.gguf"), ("none.gguf",)),
        (("up", "--kv-blocks", "0"), ("--kv-blocks",)),
        (("up", "--dtype", "int3"), ("--dtype", "bfloat16")),
        (("up", "--attention", "flush"), ("--attention", "varlen")),
        (("up", "--redis", "http://u:secret@h"), ("--redis",)),
        (("model", "fetch", "no-such-model"), ("no such model",)),
        (("chat", "hello"), ("not up", "headrace up")),
        (("generate", "hello"), ("not up",)),
    ],
)
def test_a_mistake_is_told_in_one_line(run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert_one_line(done, *words)
    assert "secret" not in done.stderr


def test_a_bad_variable_is_told_in_one_line(run) -> None:
    assert_one_line(run("up", HEADRACE_WORKERS="lots"), "HEADRACE_WORKERS")


def test_a_context_beyond_the_model_is_told_before_anything_starts(run, model_path: Path) -> None:
    done = run("up", "--detach", "--model", str(model_path), "--max-context", "999999")
    assert_one_line(done, "--max-context", "8192")


def test_the_version_is_told(run) -> None:
    assert run("--version").stdout.startswith("headrace 0.")


def test_nobody_listening_is_told_in_one_line(run) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert_one_line(run("generate", "hi", "--address", address), status=1)


def test_status_of_nothing_has_its_own_exit_status(run) -> None:
    done = run("status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (1, {"name": "default", "phase": "down"})


def test_the_lab_counts_without_a_model_and_says_in_one_line_that_one_is_missing(run) -> None:
    done = run("lab", "policies", "--counted", "--count", "padding")
    assert done.returncode == 0, done.stderr
    assert "static 80x, dynamic 80x, continuous 1x, chunked 1x" in done.stdout
    assert run("lab", "policies", "--help").stdout.startswith("usage: headrace lab policies")
    assert_one_line(run("lab", "policies", "--model", "/nowhere/at-all"), "/nowhere/at-all")


def test_down_of_nothing_is_no_failure(run) -> None:
    done = run("down", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["was_up"] is False


@pytest.mark.parametrize(
    "command", [(), ("up",), ("down",), ("status",), ("chat",), ("generate",), ("model", "fetch"), ("lab",)]
)
def test_every_command_explains_itself(run, command: tuple[str, ...]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert len(done.stdout.splitlines()) > 8
