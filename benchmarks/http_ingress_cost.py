"""What a streamed token costs through Serve's HAProxy against a listener of the replica's own (ADR 0003).

    python -m benchmarks.http_ingress_cost

runs own, haproxy, own, haproxy, each in a process of its own, with the same server-sent events at the same pace, and
prints a line for each. CPU is that of every process of Ray, Serve and HAProxy, less what they use when nothing streams.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

STREAMS, TOKENS, PACE_S, PORT, HOST = 32, 100, 0.04, 18431, "127.0.0.1"


async def events() -> AsyncIterator[bytes]:
    due = time.monotonic()
    for i in range(TOKENS):
        yield b'id: r:0:%d\ndata: {"choices":[{"index":0,"text":" token"}]}\n\n' % i
        due += PACE_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))


def app() -> Any:
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def stream(_: Any) -> Any:
        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/stream", stream)])


def deployment(mode: str) -> Any:
    from ray import serve

    from router.ingress.http_server import HttpServer

    @serve.deployment(max_ongoing_requests=1_000, ray_actor_options={"num_cpus": 0})
    class Own:
        async def __init__(self) -> None:  # type: ignore[misc]
            self.server = HttpServer(app(), HOST, PORT)
            await self.server.start()

        async def __del__(self) -> None:
            await self.server.stop(1.0)

    @serve.deployment(max_ongoing_requests=1_000, ray_actor_options={"num_cpus": 0})
    @serve.ingress(app())
    class Behind:
        pass

    return (Own if mode == "own" else Behind).bind()  # type: ignore[union-attr]


def cpu_s() -> float:
    """User and system time of all our descendants."""
    rows: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        rows[int(stat.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    family, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, (parent, _) in rows.items() if parent in family} - family
        family, grew = family | more, bool(more)
    return sum(rows[pid][1] for pid in family - {os.getpid()} if pid in rows) / os.sysconf("SC_CLK_TCK")


async def read_stream() -> list[float]:
    """How late each event came after the one before, beyond the pace, in seconds."""
    reader, writer = await asyncio.open_connection(HOST, PORT)
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: "):
            times.append(time.monotonic())
    writer.close()
    return [b - a - PACE_S for a, b in itertools.pairwise(times)]


async def first_answer() -> None:
    for _ in range(600):
        try:
            if len(await read_stream()) == TOKENS - 1:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("nobody answers")


async def load() -> list[float]:
    return sorted(itertools.chain(*await asyncio.gather(*(read_stream() for _ in range(STREAMS)))))


def measure(mode: str) -> None:
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="hi-", dir="/tmp")
    quiet = {"logging_level": "ERROR", "log_to_driver": False, "include_dashboard": False}
    ray.init("local", num_cpus=2, object_store_memory=100 << 20, _temp_dir=folder, **quiet)  # type: ignore[arg-type]
    began = time.monotonic()
    if mode == "own":
        serve.start(proxy_location="Disabled")
    else:
        serve.start(http_options={"host": HOST, "port": PORT})
    serve.run(deployment(mode), route_prefix="/")
    asyncio.run(first_answer())
    started, duration = time.monotonic(), TOKENS * PACE_S
    before = cpu_s()
    time.sleep(duration)
    idle = cpu_s() - before
    before = cpu_s()
    late = asyncio.run(load())
    busy = cpu_s() - before
    ending = time.monotonic()
    serve.shutdown()
    ended = time.monotonic()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    print(
        json.dumps(
            {
                "mode": mode,
                "start_s": round(started - began - duration, 1),
                "shutdown_s": round(ended - ending, 1),
                "cpu_us_per_token": round((busy - idle) / (STREAMS * TOKENS) * 1e6),
                "late_p50_ms": round(late[len(late) // 2] * 1e3, 2),
                "late_p99_ms": round(late[len(late) * 99 // 100] * 1e3, 2),
            }
        )
    )


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    for mode in ("own", "haproxy") * 2:
        switch = {"RAY_SERVE_ENABLE_HA_PROXY": "1"} if mode == "haproxy" else {}
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **switch}
        subprocess.run([sys.executable, "-m", "benchmarks.http_ingress_cost", mode], env=environment, check=True)


if __name__ == "__main__":
    main()
