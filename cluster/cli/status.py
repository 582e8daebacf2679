"""`headrace status`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from cluster.cli.output import FAILED, JsonOption, NameOption, out, print_json
from cluster.environment import state_folder
from cluster.state import ClusterState, StateFolder

if TYPE_CHECKING:
    from cluster.board import Board
    from headrace.frame import LoadReport
    from headrace.store.interface import BoardRow

HELP = """
Show a cluster: its workers, their free KV cache, running and waiting requests, as the last iteration reported them.

Exit status 1 if it is not up.
"""


def status(name: NameOption = "default", as_json: JsonOption = False) -> None:
    folder = StateFolder(state_folder(), name)
    state = folder.read() if folder.is_up() else None
    url = folder.read_redis_url()
    if state is None or url is None:
        phase = state.phase if state is not None else "down"
        print_json({"name": name, "phase": phase}) if as_json else out().print(f"cluster {name!r} is {phase}")
        raise typer.Exit(FAILED)
    from cluster.board import read_board

    board = read_board(url, state.cluster_id, state.model)
    if as_json:
        print_json(_as_json(state, board))
    else:
        _show(state, board)


def _as_json(state: ClusterState, board: Board) -> dict[str, Any]:
    described = {key: value for key, value in state.to_json().items() if key not in ("processes", "workers")}
    census = board.census
    return {
        **described,
        "uptime_s": round(time.time() - state.started_s, 1),
        "waiting": census.waiting,
        "waiting_tokens": census.waiting_tokens,
        "running": census.bound,
        "results_kept": board.audit.ended,
        "routers": census.routers,
        "stray_keys": board.audit.stray_keys,
        "workers_wanted": state.workers,
        "workers": [_worker(row) for row in board.workers],
    }


def _worker(row: BoardRow) -> dict[str, Any]:
    load = row.load
    return {
        "worker": row.worker,
        "running": load.running,
        "waiting": load.waiting,
        "free_blocks": load.free_blocks,
        "cached_blocks": load.cached_blocks,
        "held_blocks": load.held_blocks,
        "total_blocks": load.total_blocks,
        "block_size": load.block_size,
        "credit_blocks": row.credit_blocks,
        "step_s": load.step_s,
        "output_tokens_per_s": load.drain_tokens_per_s,
        "iterations": load.iterations,
        "prompt_tokens_total": load.prompt_tokens_total,
        "output_tokens_total": load.output_tokens_total,
        "preemptions_total": load.preemptions_total,
        "prefix_tokens_total": load.prefix_tokens_total,
        "prefix_hit_tokens_total": load.prefix_hit_tokens_total,
        "host_hit_tokens_total": load.host_hit_tokens_total,
        "slot_steps_total": load.slot_steps_total,
        "slot_steps_wasted_total": load.slot_steps_wasted_total,
        "rows_total": load.rows_total,
        "padding_rows_total": load.padding_rows_total,
        "draining": load.draining,
        "numerics": load.numerics,
        "lease_left_ms": row.lease_left_ms,
    }


def _show(state: ClusterState, board: Board) -> None:
    from rich.table import Table

    console, census = out(), board.census
    console.print(
        f"[bold]{state.model}[/bold] {state.phase}, up {_duration(time.time() - state.started_s)}, "
        f"gRPC port {state.grpc_port}, HTTP port {state.http_port}"
    )
    console.print(
        f"{census.bound} running, {census.waiting} waiting requests; "
        f"{len(board.workers)} of {state.workers} workers, {census.routers} routers"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worker", no_wrap=True)
    for title in ("run", "wait", "KV free", "cached", "held", "credit", "step ms", "tok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in board.workers:
        load = row.load
        free = f"{load.free_blocks}/{load.total_blocks}"
        cells = [load.running, load.waiting, free, load.cached_blocks, load.held_blocks, row.credit_blocks]
        measured = [f"{load.step_s * 1e3:.1f}", f"{load.drain_tokens_per_s:.0f}"]
        label = row.worker.partition("~")[0] + (" [yellow]draining[/yellow]" if load.draining else "")
        table.add_row(label, *map(str, cells), *measured)
    console.print(table)
    if line := batching_line([row.load for row in board.workers]):
        console.print(line)


def batching_line(loads: list[LoadReport]) -> str:
    """How much of what all workers computed since their start was anybody's; "" before the first pass."""
    steps, wasted = sum(load.slot_steps_total for load in loads), sum(load.slot_steps_wasted_total for load in loads)
    rows, padding = sum(load.rows_total for load in loads), sum(load.padding_rows_total for load in loads)
    if not steps or not rows:
        return ""
    return (
        f"batches: {wasted:,} of {steps:,} slot-steps wasted ({wasted / steps:.1%}), "
        f"{padding:,} padding rows beside {rows:,} (utilisation {rows / (rows + padding):.1%})"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
