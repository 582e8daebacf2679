"""A supervisor that cannot even begin is told in one sentence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cluster.cli.start_display import StartDisplay
from cluster.errors import StartFailed
from cluster.launch import supervisor
from cluster.launch_order import Launch
from cluster.state import StateFolder


def test_a_supervisor_that_dies_before_it_reads_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\necho 'the interpreter is broken' >&2\nexit 3\n")
    dies.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(dies))
    # More than a pipe holds, so that the writer is still writing when the reader is gone.
    launch = Launch({"padding": "x" * 300_000}, "/m", "m", str(tmp_path), None, attached=False)
    folder = StateFolder(tmp_path / "state", "default")
    with pytest.raises(StartFailed, match="the interpreter is broken"), supervisor(launch, folder) as running:
        StartDisplay(Console(file=io.StringIO())).follow(running.events, folder.log)
    assert running.process.wait(5) == 3
