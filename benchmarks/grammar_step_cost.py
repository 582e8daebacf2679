"""What grammars add to an iteration: the engine's decode steps with and without one on every row, in turns.

    python -m benchmarks.grammar_step_cost --model FOLDER --batch 16

Each round decodes `--batch` requests for `--steps` steps without a grammar and then with a JSON schema whose
instances are long enough; rounds alternate, so that what else the machine does falls on both alike. Compiling happens
before the steps that are timed. Prints one JSON object: the median step of each kind over all rounds, in ms of wall
time and of processor time (set OMP_NUM_THREADS=1, or threads that spin count too), and what a grammar adds to either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from headrace.request import BoundRequest, Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams
from headrace.tokenizer import Tokenizer
from workers.config import EngineConfig
from workers.engine import Engine

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 24},
            "kind": {"enum": ["river", "weir", "mill", "race"]},
            "flow": {"type": "number", "minimum": 0},
            "built": {"type": "string", "format": "date"},
        },
        "required": ["name", "kind", "flow", "built"],
        "additionalProperties": False,
    },
}
WARM_STEPS = 4
"""Of each round, not timed: prefill, and the first masks."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    config = EngineConfig(
        model_path=options.model,
        model_name="m",
        dtype=options.dtype,
        num_blocks=options.batch * 32,
        max_sequences=options.batch,
        prefix_cache=False,
    )
    tokenizer = Tokenizer.load(options.model)
    from workers.model.loader import load_runner

    engine = Engine(load_runner(config), config, tokenizer)
    prompt = tuple(tokenizer.encode("Water works of the valley as JSON:\n", add_special=False))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    steps: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for constrained in (False, True):
            params = SamplingParams(
                max_tokens=options.steps + WARM_STEPS + 1,
                ignore_eos=True,
                temperature=options.temperature,
                seed=number,
                grammar=grammar if constrained else None,
            )
            steps[constrained] += steps_s(engine, prompt, params, options.batch, f"{number}-{constrained}")
    report: dict[str, float] = {"batch": options.batch, "steps": len(steps[True])}
    for index, clock in enumerate(("wall", "cpu")):
        free, bound = (statistics.median(step[index] for step in steps[kind]) * 1e3 for kind in (False, True))
        report |= {f"{clock}_free_ms": free, f"{clock}_grammar_ms": bound, f"{clock}_added": bound / free - 1}
    print(json.dumps({name: round(value, 4) for name, value in report.items()}))


def steps_s(
    engine: Engine, prompt: tuple[int, ...], params: SamplingParams, batch: int, name: str
) -> list[tuple[float, float]]:
    """Decodes one batch to its end; seconds (wall, processor) of each step in which all rows were decoded."""
    for row in range(batch):
        engine.add(BoundRequest(Request(f"{name}-{row}", "m", prompt, params), 1, "", "1-0", ()))
    while engine.load().running < batch:
        engine.step()
        if engine.load().waiting:
            time.sleep(0.01)  # its grammar is being compiled
    times = []
    while engine.load().running == batch:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        engine.step()
        times.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
    while engine.load().running or engine.load().waiting:
        engine.step()
    return times[WARM_STEPS:-1]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a round that are timed")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
