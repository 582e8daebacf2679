"""How much memory there is, and the one sentence for when it is not enough."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.errors import HeadraceError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class OutOfMemory(HeadraceError):
    """The model or its KV cache does not fit; the message has the numbers."""


def free_bytes(device: torch.device) -> int | None:
    """Memory this process could still take, or None where the platform does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    candidates = [n for n in (_meminfo_available(), _cgroup_available()) if n is not None]
    return min(candidates, default=None)


def require(what: str, needed_bytes: int, device: torch.device) -> None:
    """Raises OutOfMemory when `device` cannot hold `needed_bytes` more."""
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise OutOfMemory(f"not enough memory on {device} for {what}: {gib(needed_bytes)} needed, {gib(free)} free")


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _meminfo_available() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """What the container's limit leaves; file cache counts as free, as the kernel gives it back."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
