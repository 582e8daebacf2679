"""What is found computed, what is not, and what is computed only once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.frame import FinishReason
from headrace.request import Request
from tests.fixtures.scripted_runner import Client, ScriptedRunner, Ticks, bind, make_config, make_request, solo_output
from workers.engine import Engine
from workers.kv.moves import MoveKind
from workers.model.interface import Sampled, SequenceSlice
from workers.scheduler.step_time import Features, StepTime

BLOCK = 4


def make_engine(num_blocks: int = 64, *, host_blocks: int = 0, **config: object) -> tuple[Engine, ScriptedRunner]:
    runner = ScriptedRunner(num_blocks, BLOCK, eos_token_ids=(), host_blocks=host_blocks)
    return Engine(runner, make_config(**config), None, Ticks()), runner


def run(engine: Engine, *requests: Request, client: Client | None = None) -> Client:
    """Runs them to their end; each must have got what it would have got alone."""
    client = client or Client()
    for request in requests:
        engine.add(bind(request))
    drive(engine, client)
    for request in requests:
        for choice in range(request.n):
            assert client.answer(request.id, choice) == solo_output(request, choice), request.id
    return client


def drive(engine: Engine, client: Client) -> None:
    for _ in range(2_000):
        frame = engine.step()
        engine.check()
        client.take(frame)
        if frame is None:
            return
    raise AssertionError("the engine never came to rest")


def same_prompt(request_id: str, prompt: tuple[int, ...], max_tokens: int = 6, **fields: object) -> Request:
    made = make_request(request_id, 1, max_tokens, ignore_eos=True, **fields)
    return replace(made, prompt_token_ids=prompt)


def prompt_of(tokens: int) -> tuple[int, ...]:
    return tuple((5 * i + 1) % 61 for i in range(tokens))


def rows(runner: ScriptedRunner, since: int = 0) -> int:
    return sum(len(piece.token_ids) for slices in runner.passes[since:] for piece in slices)


@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 10 * BLOCK + 3])
def test_the_second_time_only_the_rest_is_computed(tokens: int) -> None:
    engine, runner = make_engine()
    run(engine, same_prompt("cold", prompt_of(tokens)))
    since, before = len(runner.passes), engine.load().prefix_hit_tokens_total
    run(engine, same_prompt("warm", prompt_of(tokens)))
    found = (tokens - 1) // BLOCK * BLOCK
    assert engine.load().prefix_hit_tokens_total - before == found
    assert rows(runner, since) == tokens - found + 5, "the rest of the prompt and five tokens read back"
    assert engine.load().prompt_tokens_total == tokens + tokens - found


def test_a_whole_prompt_that_somebody_holds_is_copied_up_to_its_last_row() -> None:
    engine, runner = make_engine()
    engine.add(bind(same_prompt("first", prompt_of(8), 20)))
    client = Client()
    for _ in range(3):
        client.take(engine.step())
    since = len(runner.passes)
    engine.add(bind(same_prompt("second", prompt_of(8), 4)))
    drive(engine, client)
    assert [piece.start for piece in runner.passes[since][1:]] == [7], "one row, to sample from"
    assert [move.kind for move in runner.moves] == [MoveKind.COPY]
    assert client.answer("second") == solo_output(same_prompt("second", prompt_of(8), 4))
    assert client.answer("first") == solo_output(same_prompt("first", prompt_of(8), 20))


def test_a_finished_answer_is_the_beginning_of_the_next_turn() -> None:
    engine, runner = make_engine()
    first = same_prompt("turn-1", prompt_of(9), 12)
    answer, _ = run(engine, first).answer("turn-1")
    since = len(runner.passes)
    run(engine, same_prompt("turn-2", (*first.prompt_token_ids, *answer, 7, 7), 3))
    assert runner.passes[since][0].start == 20, "all full blocks of the 20 tokens that were read: the last was not"


def test_prompts_that_part_in_the_second_block_share_the_first_only() -> None:
    engine, _ = make_engine()
    run(engine, same_prompt("one", prompt_of(12)))
    other = (*prompt_of(5), 60, *prompt_of(12)[6:])
    before = engine.load().prefix_hit_tokens_total
    run(engine, same_prompt("other", other))
    assert engine.load().prefix_hit_tokens_total - before == BLOCK


def test_tenants_never_share() -> None:
    engine, _ = make_engine()
    run(engine, same_prompt("mine", prompt_of(20)))
    run(engine, replace(same_prompt("theirs", prompt_of(20)), tenant="other"))
    assert engine.load().prefix_hit_tokens_total == 0


def test_without_the_cache_nothing_is_kept_and_choices_still_share() -> None:
    engine, runner = make_engine(prefix_cache=False)
    run(engine, same_prompt("one", prompt_of(10), n=3))
    assert rows(runner) == 10 + 2 + 3 * 5, "one prompt, one row for each other choice, and what they read back"
    run(engine, same_prompt("again", prompt_of(10)))
    assert engine.load().prefix_hit_tokens_total == 2 * 9
    assert engine.load().cached_blocks == 0


def test_twins_compute_their_prefix_once() -> None:
    engine, runner = make_engine()
    twins = [same_prompt(f"twin-{i}", (*prompt_of(20), i), 5) for i in range(4)]
    client = Client()
    for twin in twins:
        engine.add(bind(twin))
    client.take(engine.step())
    assert engine.load().waiting_by_reason == (("prefix", 3),)
    drive(engine, client)
    assert rows(runner) == 21 + 3 * 1 + 4 * 4
    for twin in twins:
        assert client.answer(twin.id) == solo_output(twin)


def test_who_waits_for_a_prefix_is_not_offered_to_other_workers() -> None:
    engine, _ = make_engine(chunk_tokens=4)
    engine.add(bind(same_prompt("first", prompt_of(41))))
    engine.add(bind(same_prompt("twin", (*prompt_of(40), 5))))
    engine.add(bind(same_prompt("stranger", (60, *prompt_of(40)))))
    for _ in range(4):
        engine.step()
    assert [request_id for request_id, _ in engine.unstarted()] == ["stranger"]


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_a_twin_goes_on_by_itself_when_the_first_ends_early(ending: str) -> None:
    def spoil(_: int, piece: SequenceSlice, sampled: Sampled) -> Sampled:
        first = piece.sample is not None and piece.sample.seed == 13
        return replace(sampled, fault="the logits are not numbers") if first and ending == "failed" else sampled

    runner = ScriptedRunner(64, BLOCK, eos_token_ids=(), disturb=spoil)
    engine = Engine(runner, make_config(chunk_tokens=8), None, Ticks())
    first, second = same_prompt("first", prompt_of(20)), same_prompt("second", prompt_of(20))
    engine.add(bind(replace(first, sampling=replace(first.sampling, seed=13))))
    engine.add(bind(second))
    client = Client()
    client.take(engine.step())
    if ending == "cancelled":
        engine.cancel("first", "9-0")
    drive(engine, client)
    assert client.finishes["first", 0] is (FinishReason.CANCELLED if ending == "cancelled" else FinishReason.FAILED)
    assert client.answer("second") == solo_output(second)
    assert engine.load().prefix_hit_tokens_total == 0, "what was never shown to be sound is not found"


def test_what_a_failed_request_has_touched_is_not_found_again() -> None:
    def spoil(_: int, piece: SequenceSlice, sampled: Sampled) -> Sampled:
        late = piece.sample is not None and piece.sample.seed == 13 and piece.sample.token_index == 4
        return replace(sampled, fault="the logits are not numbers") if late else sampled

    runner = ScriptedRunner(64, BLOCK, eos_token_ids=(), disturb=spoil)
    engine = Engine(runner, make_config(), None, Ticks())
    bad = same_prompt("bad", prompt_of(20))
    engine.add(bind(replace(bad, sampling=replace(bad.sampling, seed=13))))
    drive(engine, Client())
    assert (engine.load().cached_blocks, engine.load().free_blocks) == (0, 64)
    run(engine, same_prompt("good", prompt_of(20)))
    assert engine.load().prefix_hit_tokens_total == 0


def test_a_prompt_that_is_to_be_scored_is_computed_whole() -> None:
    engine, runner = make_engine()
    run(engine, same_prompt("first", prompt_of(20)))
    since = len(runner.passes)
    run(engine, same_prompt("scored", prompt_of(20), 1, prompt_logprobs=0))
    assert rows(runner, since) == 20


def test_a_preempted_request_finds_its_blocks_where_nobody_took_them() -> None:
    engine, runner = make_engine(14)
    run(engine, *(same_prompt(f"quick{i}", (i, i + 1), 1, stop_token_ids=(60,)) for i in range(20)))
    before = engine.load().prefix_hit_tokens_total
    run(engine, *(same_prompt(f"r{i}", (30 + i, *prompt_of(8)), 24, stop_token_ids=(60,)) for i in range(3)))
    assert engine.load().preemptions_total > 0
    assert engine.load().prefix_hit_tokens_total > before
    again = [piece for slices in runner.passes for piece in slices if len(piece.token_ids) > 1 and piece.start > 0]
    assert again, "somebody went on in the middle"


def test_evicted_blocks_come_back_from_host_memory() -> None:
    engine, runner = make_engine(12, host_blocks=32)
    run(engine, same_prompt("first", prompt_of(21)))
    run(engine, same_prompt("other", tuple(reversed(prompt_of(40)))))
    since, before = len(runner.passes), engine.load().host_hit_tokens_total
    run(engine, same_prompt("again", prompt_of(21)))
    assert engine.load().host_hit_tokens_total - before == 20
    assert len(runner.passes[since][0].token_ids) == 1
    assert {move.kind for move in runner.moves} == {MoveKind.OUT, MoveKind.BACK}


def test_host_memory_is_left_alone_while_computing_is_cheaper() -> None:
    runner = ScriptedRunner(12, BLOCK, eos_token_ids=(), host_blocks=32)
    runner.move_block_s = 1.0
    model = StepTime.of(Features(passes=1e-3, prefill_tokens=1e-4))
    engine = Engine(runner, make_config(), None, Ticks(), step_time=model)
    run(engine, same_prompt("first", prompt_of(21)))
    run(engine, same_prompt("other", tuple(reversed(prompt_of(40)))))
    run(engine, same_prompt("again", prompt_of(21)))
    assert runner.moves == []


def test_host_memory_may_become_dear_or_cheap_between_two_steps() -> None:
    class Unsteady(StepTime):
        calls = 0

        def recompute_s(self, tokens: int) -> float:
            self.calls += 1
            return 1e-3 if self.calls % 2 else 1e-1

    runner = ScriptedRunner(12, BLOCK, eos_token_ids=(), host_blocks=32)
    runner.move_block_s = 1e-2
    engine = Engine(runner, make_config(), None, Ticks(), step_time=Unsteady())
    for i in range(6):
        run(engine, same_prompt(f"first{i}", prompt_of(21), 3 + i % 2))
        run(engine, same_prompt(f"other{i}", tuple(reversed(prompt_of(40)))))
    assert 0 < engine.load().host_hit_tokens_total < 6 * 2 * 20


def test_a_failed_pass_leaves_nothing_to_be_found() -> None:
    broken: list[int] = []

    def fail(number: int, _: SequenceSlice, sampled: Sampled) -> Sampled:
        if number in broken:
            raise RuntimeError("the device is gone")
        return sampled

    runner = ScriptedRunner(12, BLOCK, eos_token_ids=(), host_blocks=32, disturb=fail)
    engine = Engine(runner, make_config(), None, Ticks())
    run(engine, same_prompt("first", prompt_of(21)))
    run(engine, same_prompt("other", tuple(reversed(prompt_of(40)))))
    broken.append(len(runner.passes) + 1)
    client = Client()
    engine.add(bind(same_prompt("again", prompt_of(21))))
    drive(engine, client)
    assert client.finishes["again", 0] is FinishReason.FAILED
    before = engine.load().prefix_hit_tokens_total
    run(engine, same_prompt("later", prompt_of(21)))
    assert engine.load().prefix_hit_tokens_total == before


def test_sharers_fit_where_their_sum_would_not() -> None:
    """Ten times 40 shared tokens and 6 of their own in a pool of 32 blocks: 12 blocks each if they were alone."""
    engine, _ = make_engine(32)
    run(engine, same_prompt("seed", prompt_of(41), 1))
    for i in range(10):
        engine.add(bind(same_prompt(f"r{i}", (*prompt_of(40), i), 6)))
    client = Client()
    most = 0
    for _ in range(200):
        frame = engine.step()
        engine.check()
        client.take(frame)
        if frame is None:
            break
        most = max(most, frame.load.running)
    assert most >= 9
    assert engine.load().preemptions_total == 0
