"""What reused KV is worth: time to first token of one request whose prompt begins with a text that was computed before,
in turns with one whose beginning is new.

    python -m benchmarks.prefix_cache --model FOLDER --shared 400 --own 16

Each round asks three times, one request at a time on an idle engine: a new beginning (cold), the same with another end
(warm), and, after enough other prompts to evict it, the same again (host: out of host memory). Prints one JSON object:
the median time to first token in ms of each kind over all rounds, its ratio to cold, and how many tokens were found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from random import Random

from headrace.frame import Part
from headrace.request import BoundRequest, Request
from headrace.sampling import SamplingParams
from workers.config import EngineConfig
from workers.engine import Engine
from workers.scheduler.step_time import StepTime

KINDS = ("cold", "warm", "host")
FIRST_ID = 300
"""Below are the special ids of common vocabularies."""


class Asker:
    """One request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked = 0

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from handing the request over to the frame with its first token; the request ends with it."""
        self._asked += 1
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        request = Request(f"r{self._asked}", "m", tuple(prompt), params)
        began_s = time.perf_counter()
        self._engine.add(BoundRequest(request, 1, "", f"{self._asked}-0", ()))
        while not any(part.token_ids for part in self._step_parts()):
            pass
        return time.perf_counter() - began_s

    def _step_parts(self) -> Sequence[Part]:
        frame = self._engine.step()
        if frame is None:
            raise RuntimeError("the engine idles before the first token")
        return frame.parts


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    from workers.model.loader import load_runner

    blocks = 2 * -(-(options.shared + options.own + 1) // 16)
    config = EngineConfig(
        options.model, "m", dtype=options.dtype, num_blocks=blocks, host_kv_bytes=options.host_kv_mib << 20
    )
    runner = load_runner(config)
    step_time = StepTime()
    runner.warm_up(config.chunk_tokens, step_time.measured)
    engine = Engine(runner, config, None, step_time=step_time)
    asker, random = Asker(engine), Random(options.seed)
    times_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        beginning = _ids(random, options.shared)
        times_s["cold"].append(asker.first_token_s([*beginning, *_ids(random, options.own)]))
        times_s["warm"].append(asker.first_token_s([*beginning, *_ids(random, options.own)]))
        for _ in range(3):
            asker.first_token_s(_ids(random, options.shared))
        times_s["host"].append(asker.first_token_s([*beginning, *_ids(random, options.own)]))
    print(json.dumps(_report(times_s, engine, runner.move_block_s)))


def _report(times_s: dict[str, list[float]], engine: Engine, move_block_s: float) -> dict[str, object]:
    load = engine.load()
    medians = {kind: statistics.median(times) * 1e3 for kind, times in times_s.items()}
    return {
        "rounds": len(times_s["cold"]),
        "ttft_ms": {kind: round(median, 2) for kind, median in medians.items()},
        "to_cold": {kind: round(median / medians["cold"], 3) for kind, median in medians.items()},
        "ttft_ms_each": {kind: [round(value * 1e3, 1) for value in times] for kind, times in times_s.items()},
        "hit_tokens": load.prefix_hit_tokens_total,
        "host_hit_tokens": load.host_hit_tokens_total,
        "move_block_ms": round(move_block_s * 1e3, 4),
    }


def _ids(random: Random, count: int) -> list[int]:
    return [random.randrange(FIRST_ID, 49_000) for _ in range(count)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--shared", type=int, default=400, help="tokens of the common beginning")
    parser.add_argument("--own", type=int, default=16, help="tokens of its own that each prompt ends with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--host-kv-mib", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
