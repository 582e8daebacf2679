"""Grammars in the engine: compiled beside the loop, followed by every choice, replayed from tokens, and a fault ends
one request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.frame import FinishReason
from headrace.grammar import _LIMITS, GrammarCompiler
from headrace.request import Request
from headrace.sampling import Grammar, GrammarKind, SamplingParams
from headrace.tokenizer import Tokenizer
from tests.fixtures.random_logits_runner import RandomLogitsRunner
from tests.fixtures.scripted_runner import Client, Ticks, bind, make_config
from workers.engine import Engine
from workers.lobby import MAX_WAIT_S, OVERDUE
from workers.model.interface import Sampled, SequenceSlice

SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "ages": {"type": "array", "items": {"type": "integer", "maximum": 150, "minimum": 0}, "maxItems": 3},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }),
)  # fmt: skip
AB = Grammar(GrammarKind.REGEX, "(ab)+")
ABC = Grammar(GrammarKind.CHOICE, '["abc"]')


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.load(model_path)


def ask(request_id: str, grammar: Grammar | None, max_tokens: int = 200, *, n: int = 1, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar, **{"seed": 3, "temperature": 0.0, **fields})  # type: ignore[arg-type]
    return Request(request_id, "scripted", tuple(range(40, 60)), sampling, n=n)


class Bench:
    """An engine stepped by the test, with what its clients have received."""

    def __init__(self, tokenizer: Tokenizer, runner: RandomLogitsRunner | None = None, **config: object) -> None:
        self.tokenizer = tokenizer
        self.clock = Ticks()
        self.engine = Engine(
            runner or RandomLogitsRunner(tokenizer), make_config(block_size=16, **config), tokenizer, self.clock
        )
        self.client = Client()

    def run(self, *requests: Request) -> Client:
        for request in requests:
            self.engine.add(bind(request))
        ended = sum(request.n for request in requests) + len(self.client.finishes)
        while len(self.client.finishes) < ended:
            self.step()
        return self.client

    def step(self) -> None:
        """One iteration; where there is nothing to do, the grammars' thread has something to say before long."""
        frame = self.engine.step()
        self.client.take(frame)
        self.engine.check()
        if frame is None:
            assert self.engine._mailbox.wait_for_command(20)

    def text(self, request_id: str, choice: int = 0) -> str:
        tokens = self.client.tokens[(request_id, choice)]
        shown = (self.tokenizer.token_bytes(i) for i in tokens if not self.tokenizer.is_special(i))
        return b"".join(shown).decode()

    def finish(self, request_id: str, choice: int = 0) -> FinishReason | None:
        return self.client.finishes.get((request_id, choice))


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def test_every_choice_follows_the_grammar_on_its_own(bench: Bench) -> None:
    bench.run(ask("a", SCHEMA, n=4, temperature=1.0), ask("b", AB, n=2))
    texts = {bench.text("a", choice) for choice in range(4)}
    assert len(texts) == 4
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"name", "ages"}
        assert len(value["name"]) <= 12
    assert {bench.text("b", c).replace("ab", "") for c in range(2)} == {""}
    assert {bench.finish("a", c) for c in range(4)} == {FinishReason.STOP}


def test_what_cannot_go_on_ends_without_an_eos_token(bench: Bench, tokenizer: Tokenizer) -> None:
    bench.run(ask("a", ABC))
    tokens = bench.client.tokens[("a", 0)]
    assert b"".join(map(tokenizer.token_bytes, tokens)) == b"abc"
    assert bench.finish("a") is FinishReason.STOP


def test_a_limit_cuts_a_text_short(bench: Bench) -> None:
    bench.run(ask("a", Grammar(GrammarKind.REGEX, "x{500}"), 3))
    assert bench.finish("a") is FinishReason.LENGTH
    assert set(bench.text("a")) == {"x"}


def test_min_tokens_holds_back_the_end_unless_nothing_else_could_come(bench: Bench) -> None:
    bench.run(ask("long", AB, 60, min_tokens=30), ask("short", ABC, 60, min_tokens=30))
    assert len(bench.client.tokens[("long", 0)]) >= 30
    assert bench.text("short") == "abc"
    assert bench.finish("short") is FinishReason.STOP


def test_under_ignore_eos_only_the_grammar_or_the_limit_ends_it(bench: Bench, tokenizer: Tokenizer) -> None:
    bench.run(ask("endless", AB, 40, ignore_eos=True), ask("bounded", ABC, 40, ignore_eos=True))
    assert bench.finish("endless") is FinishReason.LENGTH
    assert not any(map(tokenizer.is_special, bench.client.tokens[("endless", 0)]))
    assert (bench.text("bounded"), bench.finish("bounded")) == ("abc", FinishReason.STOP)


def test_stops_of_the_client_end_it_inside_the_grammar(bench: Bench) -> None:
    bench.run(ask("a", Grammar(GrammarKind.REGEX, "x{20}y{20}"), stop=("yy",)))
    assert bench.text("a").startswith("x" * 20 + "yy")
    assert bench.finish("a") is FinishReason.STOP
    assert len(bench.text("a")) < 40


def test_preemption_and_failover_lose_nothing_of_the_state(tokenizer: Tokenizer) -> None:
    requests = [ask(f"r{i}", SCHEMA if i % 2 else None, 60, n=2, seed=i) for i in range(4)]
    alone = Bench(tokenizer)
    alone.run(*requests)
    pushed = Bench(tokenizer)
    for request in requests:
        pushed.engine.add(bind(request))
    preemptions = 0
    while len(pushed.client.finishes) < 8:
        pushed.step()
        roster = pushed.engine._roster
        for sequence in roster.state.running[::3]:
            roster._preempt(roster[sequence.key], pushed.clock())
            preemptions += 1
    assert preemptions > 8
    assert pushed.client.tokens == alone.client.tokens
    assert pushed.client.finishes == alone.client.finishes

    other = Bench(tokenizer)
    whole = [tuple(alone.client.tokens[("r1", choice)]) for choice in range(2)]
    journal = (whole[0][: len(whole[0]) // 2], whole[1][:-1])
    other.engine.add(bind(requests[1], epoch=2, journal=journal))
    other.client.tokens = {("r1", choice): list(part) for choice, part in enumerate(journal)}
    while len(other.client.finishes) < 2:
        other.step()
    assert [tuple(other.client.tokens[("r1", choice)]) for choice in range(2)] == whole
    assert {other.finish("r1", c) for c in range(2)} == {FinishReason.STOP}


def test_a_journal_that_already_completes_the_grammar_only_needs_its_end(bench: Bench, tokenizer: Tokenizer) -> None:
    journal = (tuple(tokenizer.encode("abc", add_special=False)),)
    bench.engine.add(bind(ask("a", ABC), epoch=2, journal=journal))
    bench.client.tokens[("a", 0)] = list(journal[0])
    while bench.finish("a") is None:
        bench.step()
    assert (bench.finish("a"), bench.text("a")) == (FinishReason.STOP, "abc")
    assert bench.engine.load().iterations == 0


def test_a_token_outside_the_grammar_ends_that_request_alone(tokenizer: Tokenizer) -> None:
    stray = tokenizer.encode("zebra", add_special=False)[0]

    def disturb(_pass: int, piece: SequenceSlice, sampled: Sampled) -> Sampled:
        spec = piece.sample
        return Sampled(stray) if spec.params.grammar == AB and spec.token_index == 2 else sampled

    bench = Bench(tokenizer, RandomLogitsRunner(tokenizer, disturb=disturb))
    bench.run(ask("bad", AB, min_tokens=10), ask("good", SCHEMA), ask("free", None, 20))
    assert bench.finish("bad") is FinishReason.FAILED
    assert "the grammar cannot go on" in bench.client.details[("bad", 0)]
    assert json.loads(bench.text("good"))
    assert bench.finish("free") in (FinishReason.STOP, FinishReason.LENGTH)


class Panicking:
    """A matcher whose library panics; what it raises is, like a panic of pyo3, no Exception."""

    class Panic(BaseException):
        pass

    def deep_copy(self) -> Panicking:
        return self

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        raise self.Panic("index out of bounds")


def test_a_panic_of_the_library_ends_that_request_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_well = GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, g: Panicking() if g == ABC else compile_well(self, g))
    bench.run(ask("bad", ABC), ask("good", SCHEMA))
    assert bench.finish("bad") is FinishReason.FAILED
    assert bench.client.details[("bad", 0)] == "the grammar cannot go on: Panic: index out of bounds"
    assert json.loads(bench.text("good"))


def test_a_request_that_exhausts_the_library_harms_no_other_of_the_same_grammar(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_LIMITS, "max_lexer_states", 1_500)
    greedy = Grammar(GrammarKind.REGEX, "(.{1,1000}x){1000}")
    bench.run(ask("greedy", greedy, 400), ask("modest", greedy, 4))
    assert (bench.finish("greedy"), bench.finish("modest")) == (FinishReason.FAILED, FinishReason.LENGTH)
    assert "too many states" in bench.client.details[("greedy", 0)]
    bench.run(ask("later", greedy, 4))
    assert bench.finish("later") is FinishReason.LENGTH


def test_a_grammar_that_does_not_compile_here_is_told(bench: Bench) -> None:
    bench.run(ask("a", Grammar(GrammarKind.REGEX, "("), n=2), ask("b", None, 5))
    assert {bench.finish("a", c) for c in range(2)} == {FinishReason.FAILED}
    assert "unclosed group" in bench.client.details[("a", 0)]


@pytest.fixture
def slow_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling waits for the event."""
    go = threading.Event()
    compile_well = GrammarCompiler.compile

    def wait_and_compile(self: GrammarCompiler, grammar: Grammar) -> object:
        assert go.wait(60)
        return compile_well(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", wait_and_compile)
    yield go
    go.set()


def test_while_a_grammar_is_compiled_others_run_on_and_the_wait_is_told(
    bench: Bench, slow_compile: threading.Event
) -> None:
    bench.engine.add(bind(ask("waits", AB, n=3)))
    bench.run(ask("free", None, 5))
    load = bench.engine.load()
    assert (load.waiting, dict(load.waiting_by_reason)["grammar"]) == (3, 3)
    assert bench.engine.unstarted() == ()
    assert not any(request_id == "waits" for request_id, _ in bench.client.tokens)
    slow_compile.set()
    while bench.finish("waits", 2) is None or bench.finish("waits", 0) is None or bench.finish("waits", 1) is None:
        bench.step()
    load = bench.engine.load()
    assert (load.waiting, dict(load.waiting_by_reason).get("grammar")) == (0, None)
    assert dict(load.waited_s_by_reason)["grammar"] > 0


def test_a_request_that_waits_for_its_grammar_can_be_cancelled_forgotten_and_replaced(
    bench: Bench, slow_compile: threading.Event
) -> None:
    for name in ("cancelled", "forgotten", "replaced"):
        bench.engine.add(bind(ask(name, AB)))
    bench.engine.add(bind(ask("replaced", AB), epoch=2))
    bench.engine.add(bind(ask("replaced", AB), epoch=1))
    bench.engine.cancel("cancelled", "9-0")
    bench.engine.forget("forgotten", 1)
    bench.client.take(bench.engine.step())
    assert bench.client.finishes == {("cancelled", 0): FinishReason.CANCELLED}
    assert bench.engine.load().waiting == 1
    slow_compile.set()
    epochs = set()
    while bench.finish("replaced") is None:
        frame = bench.engine.step()
        epochs |= {part.epoch for part in frame.parts} if frame else set()
        bench.client.take(frame)
        if frame is None:
            assert bench.engine._mailbox.wait_for_command(20)
    assert epochs == {2}
    assert ("forgotten", 0) not in bench.client.finishes


def test_a_wait_without_end_fails_that_request(bench: Bench, slow_compile: threading.Event) -> None:
    bench.engine.add(bind(ask("waits", AB)))
    bench.step()
    bench.clock.now += MAX_WAIT_S
    bench.run(ask("free", None, 3))
    assert (bench.finish("waits"), bench.client.details[("waits", 0)]) == (FinishReason.FAILED, OVERDUE)


def test_a_reset_empties_the_lobby(bench: Bench, slow_compile: threading.Event) -> None:
    bench.engine.add(bind(ask("waits", AB)))
    bench.step()
    bench.engine.reset()
    bench.step()
    assert bench.engine.load().waiting == 0
    slow_compile.set()
    bench.run(ask("free", None, 3))
    assert ("waits", 0) not in bench.client.finishes


def test_a_worker_without_a_tokenizer_says_so() -> None:
    from tests.fixtures.scripted_runner import ScriptedRunner, make_request

    engine, client = Engine(ScriptedRunner(64, 4), make_config(), None, Ticks()), Client()
    plain = make_request("a", 5, 5)
    engine.add(bind(replace(plain, sampling=replace(plain.sampling, grammar=AB))))
    client.take(engine.step())
    assert client.details[("a", 0)] == "a grammar needs a tokenizer, and this worker has none"
