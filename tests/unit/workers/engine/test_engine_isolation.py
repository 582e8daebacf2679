"""One bad request fails alone, a bad pass fails its requests, and a bad device ends the engine so that its health
shows it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.frame import FinishReason
from tests.fixtures.scripted_runner import (
    VOCAB_SIZE,
    Client,
    ScriptedRunner,
    Ticks,
    bind,
    make_config,
    make_request,
    solo_output,
)
from workers.engine import MAX_DEVICE_FAULTS, Engine
from workers.model.interface import Sampled, SequenceSlice


def engine_with(disturb, **fields: object) -> Engine:
    return Engine(ScriptedRunner(64, 4, disturb=disturb), make_config(**fields), None, Ticks())


def drive(engine: Engine, client: Client) -> None:
    for _ in range(500):
        frame = engine.step()
        if frame is None:
            return
        client.take(frame)
        engine.check()
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (Sampled(1, "the logits are not numbers"), "the logits are not numbers"),
        (Sampled(VOCAB_SIZE), f"the sampler gave token {VOCAB_SIZE}, outside the vocabulary of {VOCAB_SIZE}"),
    ],
)
def test_unusable_logits_end_that_request_alone_with_all_its_choices(bad: Sampled, sentence: str) -> None:
    def disturb(_pass: int, piece: SequenceSlice, sampled: Sampled) -> Sampled:
        spec = piece.sample
        return bad if (spec.params.max_tokens, spec.choice, spec.token_index) == (30, 1, 3) else sampled

    engine, client = engine_with(disturb), Client()
    good = make_request("good", 5, 12)
    engine.add(bind(make_request("bad", 5, 30, n=3, ignore_eos=True)))
    engine.add(bind(good))
    drive(engine, client)
    assert client.answer("good") == solo_output(good)
    assert [client.finishes[("bad", choice)] for choice in range(3)] == [FinishReason.FAILED] * 3
    assert {client.details[("bad", choice)] for choice in range(3)} == {sentence}
    tokens = [len(client.tokens[("bad", choice)]) for choice in range(3)]
    assert tokens == [5, 3, 3], "the first computes the prompt, the others find it one step later"


class BrokenTokenizer:
    """A tokenizer folder that promises more ids than it has text for."""

    eos_token_ids = ()

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        raise KeyError(token_id)


@pytest.mark.parametrize("journal", [(), ((7,),)])
def test_a_token_without_text_fails_the_request_that_needs_its_text_and_no_other(
    journal: tuple[tuple[int, ...], ...],
) -> None:
    engine = Engine(ScriptedRunner(64, 4), make_config(), BrokenTokenizer(), Ticks())
    good = make_request("good", 5, 12)
    engine.add(bind(make_request("bad", 5, 30, stop=("x",)), journal=journal))
    engine.add(bind(good))
    failed, client = [], Client()
    while ("good", 0) not in client.finishes:
        frame = engine.step()
        failed += [part for part in frame.parts if part.request_id == "bad"]
        client.take(replace(frame, parts=tuple(part for part in frame.parts if part.request_id == "good")))
    assert client.answer("good") == solo_output(good)
    assert [(part.finish, part.first_index) for part in failed] == [
        (FinishReason.FAILED, len(journal[0]) if journal else 0)
    ]
    assert "KeyError" in failed[0].detail


def test_a_failed_pass_ends_the_requests_in_it_and_no_other() -> None:
    def disturb(number: int, _piece: SequenceSlice, sampled: Sampled) -> Sampled:
        if number == 3:
            raise RuntimeError("CUDA error: an illegal memory access")
        return sampled

    engine, client = engine_with(disturb, max_sequences=1), Client()
    second = make_request("second", 5, 12)
    engine.add(bind(make_request("first", 5, 12, ignore_eos=True)))
    engine.add(bind(second))
    drive(engine, client)
    assert client.finishes[("first", 0)] is FinishReason.FAILED
    assert client.details[("first", 0)] == "the device failed: RuntimeError: CUDA error: an illegal memory access"
    assert client.answer("second") == solo_output(second)


def test_a_request_that_outgrows_the_whole_pool_fails_with_the_numbers() -> None:
    engine = Engine(ScriptedRunner(3, 4), make_config(), None, Ticks())
    client = Client()
    neighbour = make_request("neighbour", 3, 4)
    engine.add(bind(make_request("huge", 13, 1)))
    engine.add(bind(make_request("grows", 4, 40, ignore_eos=True)))
    engine.add(bind(neighbour))
    drive(engine, client)
    assert client.finishes[("huge", 0)] is FinishReason.FAILED
    assert client.details[("huge", 0)] == "13 tokens need 4 KV blocks of 4; this worker's whole pool has 3"
    assert client.finishes[("grows", 0)] is FinishReason.FAILED
    assert len(client.tokens[("grows", 0)]) == 9, "12 slots hold 4 + 8 tokens; the ninth needed none of its own"
    assert client.answer("neighbour") == solo_output(neighbour)


def test_a_device_that_fails_three_times_in_a_row_ends_the_loop() -> None:
    def disturb(_number: int, _piece: SequenceSlice, _sampled: Sampled) -> Sampled:
        raise RuntimeError("gone")

    engine = engine_with(disturb, max_sequences=1)
    for i in range(MAX_DEVICE_FAULTS + 2):
        engine.add(bind(make_request(f"r{i}", 3, 3)))
    assert not engine.alive
    engine.start()
    failed = []
    while len(failed) < MAX_DEVICE_FAULTS:
        frame = engine.next_frame(10.0)
        assert frame is not None
        failed += [part.request_id for part in frame.parts if part.finish is FinishReason.FAILED]
    assert failed == ["r0", "r1", "r2"]
    assert engine.stop(10.0)
    assert not engine.alive
    assert engine.load().waiting == 2, "the others are left for another worker"


def test_passes_that_fail_now_and_then_do_not_end_it() -> None:
    def disturb(number: int, _piece: SequenceSlice, sampled: Sampled) -> Sampled:
        if number % MAX_DEVICE_FAULTS:
            raise RuntimeError("a hiccup")
        return sampled

    engine = engine_with(disturb, max_sequences=1)
    for i in range(9):
        engine.add(bind(make_request(f"r{i}", 3, 1, ignore_eos=True)))
    engine.start()
    client = Client()
    while len(client.finishes) < 9:
        frame = engine.next_frame(10.0)
        assert frame is not None
        client.take(frame)
    assert [client.finishes[(f"r{i}", 0)] for i in (2, 5, 8)] == [FinishReason.LENGTH] * 3
    assert list(client.finishes.values()).count(FinishReason.FAILED) == 6
    assert engine.alive
    assert engine.stop(10.0)
