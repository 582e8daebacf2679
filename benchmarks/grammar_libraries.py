"""Compares grammar libraries on JSON schemas: coverage, time of a compile and of a mask, memory.

    python -m benchmarks.grammar_libraries --library llguidance --data schemas.jsonl --suite suite.jsonl

`--data` holds one object a line with `id` and `schema`; `--suite` also with `tests`, a list of [instance, is valid].
Every schema is tried in a child process that is killed at `--limit-s`, since a schema may explode. A schema counts as
*exact* when the library compiles it and its masks let through every valid instance, written compactly, and stop every
invalid one; as *refused* when it does not compile; as *unsound* when an invalid instance passes; as *narrow* when only
valid ones are stopped. Masks are timed along the instances and along
random walks of `--walk` tokens. xgrammar needs torch, which this project's routers have not: install it somewhere and
put that on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from benchmarks.percentiles import percentile
from headrace.tokenizer import Tokenizer

SEPARATORS = (",", ":")


class Matcher(Protocol):
    """A position in a compiled grammar."""

    def allowed(self) -> list[int]:
        """The ids that may come next; only the library's own mask call is timed."""
        ...

    def accept(self, token_id: int) -> bool: ...

    def complete(self) -> bool: ...

    mask_s: list[float]


Compile = Callable[[str], Callable[[], Matcher]]
"""Schema text to a maker of matchers. Raises where the library refuses the schema."""


@dataclass
class Trial:
    """What one schema gave."""

    id: str
    verdict: str
    """exact, compiled (no instances to judge by), refused, narrow, unsound, exploded."""
    detail: str = ""
    compile_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    rows = [row for path in (options.data, options.suite) if path for row in _read(path)]
    child = Child(options)
    started_s = time.perf_counter()
    trials = [child.try_schema(row) for row in rows]
    trials_s = time.perf_counter() - started_s
    memory = child.close()
    report = summary(options.library, trials, memory) | {"wall_s": round(trials_s, 1)}
    print(json.dumps(report, indent=2))
    if options.details:
        for trial in trials:
            if trial.verdict not in ("exact", "compiled"):
                print(json.dumps({"id": trial.id, "verdict": trial.verdict, "detail": trial.detail[:200]}))


def summary(library: str, trials: Sequence[Trial], memory: dict[str, float]) -> dict[str, Any]:
    """Figures over all trials; times in milliseconds (compile) and microseconds (mask)."""
    verdicts: dict[str, dict[str, int]] = {}
    for trial in trials:
        group = verdicts.setdefault(trial.id.split("/")[0], {})
        group[trial.verdict] = group.get(trial.verdict, 0) + 1
    compiles = sorted(trial.compile_s * 1e3 for trial in trials if trial.compile_s)
    masks = sorted(second * 1e6 for trial in trials for second in trial.mask_s)
    return {
        "library": library,
        "schemas": len(trials),
        "verdicts": verdicts,
        "compile_ms": _spread(compiles),
        "mask_us": _spread(masks) | {"count": len(masks)},
        "memory_mib": memory,
    }


def _spread(ordered: Sequence[float]) -> dict[str, float]:
    if not ordered:
        return {}
    spread = {name: percentile(ordered, share) for name, share in (("p50", 50.0), ("p99", 99.0))}
    return {name: round(value, 3) for name, value in (*spread.items(), ("max", ordered[-1]))}


class Child:
    """A process that judges one schema after the other; killed and replaced where one takes too long or crashes it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._memory: dict[str, float] = {}
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, vars(self._options)), daemon=True)
        self._process.start()
        theirs.close()
        self._memory["ready"] = self._pipe.recv()

    def try_schema(self, row: dict[str, Any]) -> Trial:
        self._pipe.send(row)
        fault = f"not done within {self._options.limit_s} s"
        try:
            if self._pipe.poll(self._options.limit_s):
                trial, memory = self._pipe.recv()
                self._memory["after"] = memory
                return Trial(**trial)
        except EOFError:
            fault = "the process died"
        self._process.kill()
        self._process.join()
        self._start()
        return Trial(row["id"], "exploded", fault)

    def close(self) -> dict[str, float]:
        self._pipe.send(None)
        self._process.join()
        return self._memory


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(options["model"])
    compile_schema = LIBRARIES[options["library"]](tokenizer)
    pipe.send(_peak_mib())
    while (row := pipe.recv()) is not None:
        trial = judge(compile_schema, tokenizer, row, options["walk"])
        pipe.send((vars(trial), _peak_mib()))


def _peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def judge(compile_schema: Compile, tokenizer: Tokenizer, row: dict[str, Any], walk: int) -> Trial:
    """Compiles one schema and tries its instances and a random walk."""
    began_s = time.perf_counter()
    try:
        begin = compile_schema(json.dumps(row["schema"], ensure_ascii=False))
    except Exception as refusal:
        return Trial(row["id"], "refused", str(refusal))
    trial = Trial(row["id"], "exact" if row.get("tests") else "compiled", "", time.perf_counter() - began_s)
    for instance, valid in row.get("tests", ()):
        matcher = begin()
        text = json.dumps(instance, ensure_ascii=False, separators=SEPARATORS)
        if _takes(matcher, tokenizer.encode(text, add_special=False)) != valid and trial.verdict != "unsound":
            trial.verdict = "narrow" if valid else "unsound"
            trial.detail = f"{text} is {'valid' if valid else 'invalid'}"
        trial.mask_s.extend(matcher.mask_s)
    matcher = begin()
    _wander(matcher, random.Random(row["id"]), walk, tokenizer.eos_token_ids)
    trial.mask_s.extend(matcher.mask_s)
    return trial


def _takes(matcher: Matcher, token_ids: Sequence[int]) -> bool:
    for token_id in token_ids:
        matcher.allowed()
        if not matcher.accept(token_id):
            return False
    return matcher.complete()


def _wander(matcher: Matcher, chance: random.Random, steps: int, eos_token_ids: Sequence[int]) -> None:
    for _ in range(steps):
        choices = [token for token in matcher.allowed() if token not in eos_token_ids]
        if not choices or not matcher.accept(chance.choice(choices)):
            return


def _llguidance(tokenizer: Tokenizer) -> Compile:
    import numpy
    from llguidance import LLMatcher

    from headrace.grammar import library_tokenizer

    vocabulary = library_tokenizer(tokenizer)

    class LLGuidanceMatcher:
        def __init__(self, matcher: Any) -> None:
            self.mask_s: list[float] = []
            self._matcher = matcher

        def allowed(self) -> list[int]:
            began_s = time.perf_counter()
            mask = self._matcher.compute_bitmask()
            self.mask_s.append(time.perf_counter() - began_s)
            bits = numpy.unpackbits(numpy.frombuffer(mask, numpy.uint8), bitorder="little")
            return numpy.flatnonzero(bits).tolist()

        def accept(self, token_id: int) -> bool:
            return bool(self._matcher.consume_token(token_id))

        def complete(self) -> bool:
            return bool(self._matcher.is_accepting())

    def compile_schema(text: str) -> Callable[[], Matcher]:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(text))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: LLGuidanceMatcher(matcher.deep_copy())

    return compile_schema


def _xgrammar(tokenizer: Tokenizer) -> Compile:
    import importlib

    import numpy
    import torch

    torch.set_num_threads(1)
    xgrammar: Any = importlib.import_module("xgrammar")
    vocabulary = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, stop_token_ids=list(tokenizer.eos_token_ids), add_prefix_space=False
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class XGrammarMatcher:
        def __init__(self, matcher: Any) -> None:
            self.mask_s: list[float] = []
            self._matcher = matcher
            self._mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

        def allowed(self) -> list[int]:
            if self._matcher.is_terminated():
                return []
            began_s = time.perf_counter()
            self._matcher.fill_next_token_bitmask(self._mask)
            self.mask_s.append(time.perf_counter() - began_s)
            bits = numpy.unpackbits(self._mask.numpy().view(numpy.uint8), bitorder="little")
            return numpy.flatnonzero(bits).tolist()

        def accept(self, token_id: int) -> bool:
            return bool(self._matcher.accept_token(token_id))

        def complete(self) -> bool:
            return bool(self._matcher.is_terminated() or self._matcher.is_completed())

    def compile_schema(text: str) -> Callable[[], Matcher]:
        compiled = compiler.compile_json_schema(text, any_whitespace=True)
        return lambda: XGrammarMatcher(xgrammar.GrammarMatcher(compiled))

    return compile_schema


LIBRARIES: dict[str, Callable[[Tokenizer], Compile]] = {"llguidance": _llguidance, "xgrammar": _xgrammar}


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if not row.get("format_assertion"):
                yield {"id": row["id"], "schema": row["schema"], "tests": row.get("tests", [])}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=sorted(LIBRARIES), required=True)
    parser.add_argument("--model", required=True, help="folder with tokenizer.json and config.json")
    parser.add_argument("--data", type=Path, help="schemas, one JSON object a line")
    parser.add_argument("--suite", type=Path, help="schemas with instances, one JSON object a line")
    parser.add_argument("--limit-s", type=float, default=10.0, help="seconds before a schema counts as exploded")
    parser.add_argument("--walk", type=int, default=64, help="tokens of the random walk of each schema")
    parser.add_argument("--details", action="store_true", help="also print what was refused or wrong, a line each")
    options = parser.parse_args(arguments)
    if not (options.data or options.suite):
        parser.error("give --data, --suite or both")
    return options


if __name__ == "__main__":
    main()
