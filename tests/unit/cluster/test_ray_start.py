"""Ray's own limit for the start of a node is short and fixed; a slow machine gets a second try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import ray_runtime
from cluster.errors import StartFailed
from cluster.ray_runtime import RayRuntime

SLOW = Exception("The current node timed out during startup. This could happen because …")


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, faults: list[Exception]) -> list[str]:
    """The folders of the attempts made."""
    tried: list[str] = []

    def init(**options: Any) -> None:
        tried.append(options["_temp_dir"])
        if faults:
            raise faults.pop(0)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(RayRuntime, "_start_serve", lambda _: None)
    # Both would reach beyond this test: children of this process are other fixtures' servers, its environment theirs.
    monkeypatch.setattr(RayRuntime, "processes", lambda _: {})
    monkeypatch.setattr(ray_runtime, "_prepare_environment", lambda private, threads: None)
    runtime = RayRuntime(None, folder)
    try:
        runtime.connect(threads=1)
    finally:
        runtime.shut_down()
    return tried


def test_a_slow_start_is_tried_once_more_in_a_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = start(monkeypatch, tmp_path, [SLOW])
    assert len(set(tried)) == 2
    assert not any(Path(folder).exists() for folder in tried)


@pytest.mark.parametrize("faults", [[SLOW, SLOW], [Exception("no space left")]])
def test_what_does_not_help_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faults: list[Exception]
) -> None:
    with pytest.raises(StartFailed, match="Ray did not start: "):
        start(monkeypatch, tmp_path, faults)
    assert faults == []
