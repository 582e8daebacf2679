"""The four policies side by side: `count`, `measure`, and the command line around them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.errors import BenchError
from benchmarks.host import host_facts
from benchmarks.lab.counting_runner import CountingRunner, VirtualClock
from benchmarks.lab.figures import PolicyFigures, as_json, figures_of, medians
from benchmarks.lab.replay import Clock, replay
from benchmarks.lab.table import print_counted, print_measured, short_prompt_factor
from benchmarks.lab.workloads import WORKLOADS, LabWorkload
from headrace.errors import HeadraceError
from workers.config import ATTENTIONS, DTYPES, EngineConfig
from workers.model.interface import ModelRunner

POLICIES = ("static", "dynamic", "continuous", "chunked")
"""The order of the columns; ratios are to the first."""
BLOCK_SIZE = 16
COUNTED = ("padding", "slots")
MEASURED = ("mixed",)


class RealClock:
    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def count(workload: LabWorkload) -> list[PolicyFigures]:
    """All policies on a model that computes nothing, with room for everyone: exact."""
    blocks = sum(-(-(ask.prompt_tokens + ask.output_tokens) // BLOCK_SIZE) for ask in workload.asks)
    columns = []
    for policy in POLICIES:
        clock = VirtualClock()
        runner = CountingRunner(clock, blocks * 2, workload.longest)
        columns.append(figures_of(replay(workload, policy, runner, clock, block_size=BLOCK_SIZE)))
    return columns


def measure(
    workload: LabWorkload, runner: ModelRunner, clock: Clock, rounds: int, progress: Callable[[str], None]
) -> list[PolicyFigures]:
    """All policies in turns on one runner, so often; the medians of each. Raises BenchError where the model is too
    small for the workload.
    """
    if workload.longest > runner.shape.max_context:
        raise BenchError(
            f"{workload.name} has requests of {workload.longest} tokens; the model's context is "
            f"{runner.shape.max_context}"
        )
    measured: dict[str, list[PolicyFigures]] = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        for policy in POLICIES:
            progress(f"{workload.name}: round {turn + 1} of {rounds}, {policy}")
            figures = figures_of(replay(workload, policy, runner, clock, block_size=BLOCK_SIZE))
            measured[policy].append(figures)
    return [medians(measured[policy]) for policy in POLICIES]


def load(model_path: Path, options: argparse.Namespace, workloads: Sequence[LabWorkload]) -> ModelRunner:
    """The real model, warmed up."""
    from workers.model.loader import load_runner

    chunk = max(workload.chunk_tokens for workload in workloads)
    runner = load_runner(
        EngineConfig(
            model_path=str(model_path),
            model_name=model_path.name,
            dtype=options.dtype,
            block_size=BLOCK_SIZE,
            chunk_tokens=chunk,
            attention=options.attention,
            threads=options.threads,
        )
    )
    runner.warm_up(chunk)
    return runner


def main(arguments: Sequence[str] | None = None, find_model: Callable[[str], Path] = Path) -> int:
    """The command line. `find_model` turns --model into a folder. Returns 0, or 2 with one line when nothing ran."""
    options = _parser().parse_args(arguments)
    console, notes = Console(), Console(stderr=True)
    try:
        wanted = [] if options.counted else [WORKLOADS[name] for name in options.measure or MEASURED]
        folder = find_model(options.model) if wanted else Path()
        counted = {name: count(WORKLOADS[name]) for name in options.count or COUNTED}
        measured = {}
        if wanted:
            notes.print(f"loading {options.model}", highlight=False)
            runner = load(folder, options, wanted)
            measured = {each.name: measure(each, runner, RealClock(), options.rounds, notes.print) for each in wanted}
    except (BenchError, HeadraceError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_as_json(options, counted, measured)))
        return 0
    for name, columns in counted.items():
        print_counted(console, WORKLOADS[name], columns)
    for name, columns in measured.items():
        print_measured(console, WORKLOADS[name], columns, options.rounds)
    return 0


def _as_json(
    options: argparse.Namespace, counted: dict[str, list[PolicyFigures]], measured: dict[str, list[PolicyFigures]]
) -> dict[str, Any]:
    about = {name: WORKLOADS[name].about for name in (*counted, *measured)}
    report: dict[str, Any] = {
        "workloads": about,
        "counted": {name: [as_json(each, timed=False) for each in columns] for name, columns in counted.items()},
        "measured": {name: [as_json(each, timed=True) for each in columns] for name, columns in measured.items()},
    }
    if "padding" in counted:
        factors = {each.policy: short_prompt_factor(WORKLOADS["padding"], each) for each in counted["padding"]}
        report["short_prompt_padding_factor"] = factors
    if measured:
        report |= {"rounds": options.rounds, "model": options.model, "host": host_facts()}
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace lab policies",
        description="The same load under every batching policy: padding, wasted slots, tokens/s, TTFT and ITL.",
        epilog="Workloads. " + "; ".join(f"{each.name}: {each.about}" for each in WORKLOADS.values()) + ".",
    )
    names = tuple(WORKLOADS)
    what = parser.add_argument_group("what is run")
    kinds = (("--count", "count it exactly", COUNTED), ("--measure", "run it on the model", MEASURED))
    for flag, verb, default in kinds:
        shown = f"{verb}; may be given again (default: {', '.join(default)})"
        what.add_argument(flag, action="append", choices=names, metavar="WORKLOAD", help=shown)
    what.add_argument("--counted", action="store_true", help="measure nothing: no model is loaded")
    what.add_argument("--rounds", type=_positive, default=3, metavar="N", help="measured turns of each policy (3)")
    model = parser.add_argument_group("the model")
    model.add_argument("--model", default="smollm2", help="as for `headrace up` (smollm2)")
    model.add_argument("--dtype", choices=DTYPES, default="auto")
    model.add_argument("--attention", choices=ATTENTIONS, default="auto")
    model.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: all")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
