"""Serve's report of a failed replica becomes the one sentence an operator can act on."""

from __future__ import annotations

import pytest

from cluster.ray_runtime import explain

REPORT = """Failed to update the deployments ['worker'].
The deployment failed to start 2 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:a:w.initialize_and_get_metadata()\x1b[39m (pid=8714, ip=192.0.2.2)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "loader.py", line 13, in load
    raise {kind}("{text}")
{kind}: {text}"""


def test_the_innermost_error_is_told_without_its_traceback() -> None:
    report = REPORT.format(kind="headrace.errors.Unavailable", text="the store did not accept worker-1")
    assert explain(report) == "the store did not accept worker-1"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("workers.model.memory.OutOfMemory", "not enough memory on cpu for a KV cache: 20 GiB needed, 3 GiB free"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("MemoryError", "no room"),
    ],
)
def test_lack_of_memory_is_named_with_what_to_lower(kind: str, text: str) -> None:
    told = explain(REPORT.format(kind=kind, text=text))
    assert told.startswith(f"out of memory: {text.rstrip('.')}; lower --kv-blocks")
    assert "\n" not in told


def test_a_report_without_traceback_is_told_by_its_first_line() -> None:
    assert explain("\n  The actor died unexpectedly.\nmore") == "The actor died unexpectedly."
    assert explain("") == "no reason given"
