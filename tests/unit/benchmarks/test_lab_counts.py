"""The book's examples as counts, exact on every machine, and the lab's command line."""

from __future__ import annotations

import json

import pytest

from benchmarks.lab.counting_runner import PASS_S, CountingRunner, VirtualClock
from benchmarks.lab.figures import figures_of, medians
from benchmarks.lab.policies import POLICIES, count, main, measure
from benchmarks.lab.replay import replay
from benchmarks.lab.table import short_prompt_factor
from benchmarks.lab.workloads import WORKLOADS, Ask, LabWorkload
from workers.scheduler.policy import policy_names

BATCHED, ITERATIVE = ("static", "dynamic"), ("continuous", "chunked")


def test_every_policy_has_its_column() -> None:
    assert sorted(POLICIES) == sorted(policy_names())


def test_fifty_tokens_beside_four_thousand_are_padded_eighty_times() -> None:
    workload = WORKLOADS["padding"]
    figures = {each.policy: each for each in count(workload)}
    assert [figures[policy].padding for policy in BATCHED] == [3_950, 3_950]
    assert [short_prompt_factor(workload, figures[policy]) for policy in BATCHED] == [80, 80]
    assert [figures[policy].padding for policy in ITERATIVE] == [0, 0]
    assert {each.rows for each in figures.values()} == {4_050}


def test_one_answer_of_two_thousand_tokens_holds_thirty_one_finished_slots() -> None:
    figures = {each.policy: each for each in count(WORKLOADS["slots"])}
    for policy in BATCHED:
        held = figures[policy]
        assert (held.slot_steps, held.wasted) == (64_000, 61_380)
        assert round(held.wasted_share, 3) == 0.959
        assert (held.passes, held.lone_share) == (2_000, 0.99)
        assert held.padding == 61_380, "a held slot is a computed row"
    for policy in ITERATIVE:
        assert (figures[policy].slot_steps, figures[policy].wasted, figures[policy].padding) == (2_620, 0, 0)
    assert {each.rows for each in figures.values()} == {32 * 16 + 31 * 19 + 1_999}


def first_token_passes(workload: LabWorkload, policy: str) -> list[float]:
    clock = VirtualClock()
    done = replay(workload, policy, CountingRunner(clock, 1_000, 4_096), clock)
    return [record.ttft_s / PASS_S for record in done.records if record.ttft_s is not None]


def test_who_comes_late_waits_for_the_batch_under_dynamic_and_for_one_pass_under_continuous() -> None:
    asks = (Ask(0.0, 8, 200), Ask(1.0, 8, 4))
    workload = LabWorkload("late", "", asks, max_sequences=4)
    waited = {policy: first_token_passes(workload, policy)[1] for policy in POLICIES}
    assert max(waited[policy] for policy in ITERATIVE) <= 2
    assert min(waited[policy] for policy in BATCHED) > 200 - 50, "one second is fifty passes"


def test_a_chunked_prompt_takes_several_passes_and_a_whole_one_a_single_pass() -> None:
    workload = LabWorkload("long", "", (Ask(0.0, 100, 1),), chunk_tokens=25)
    passes = {each.policy: each.passes for each in count(workload)}
    assert passes == {"static": 1, "dynamic": 1, "continuous": 1, "chunked": 4}


def test_rounds_are_taken_in_turns_and_answers_are_whole() -> None:
    clock = VirtualClock()
    noted: list[str] = []
    workload = LabWorkload("small", "", (Ask(0.0, 5, 3), Ask(0.1, 9, 2)))
    columns = measure(workload, CountingRunner(clock, 64, 64), clock, 2, noted.append)
    assert [each.policy for each in columns] == list(POLICIES)
    assert [line.rpartition(" ")[2] for line in noted] == list(POLICIES) * 2
    assert all(each.output_tokens_per_s > 0 for each in columns)


def test_the_middle_round_counts_figure_by_figure() -> None:
    clock = VirtualClock()
    workload = LabWorkload("one", "", (Ask(0.0, 5, 1),))
    done = replay(workload, "chunked", CountingRunner(clock, 64, 64), clock)
    first = figures_of(done)
    assert first.itl_p50_s is None
    assert medians([first, first, first]) == first


def test_the_command_prints_the_books_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--counted"]) == 0
    shown = capsys.readouterr().out
    for figure in ("61,380", "95.9%", "99.0%", "static 80x, dynamic 80x, continuous 1x, chunked 1x"):
        assert figure in shown


def test_the_command_prints_json_without_times_for_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--counted", "--json", "--count", "padding"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["short_prompt_padding_factor"]["static"] == 80
    assert [each["policy"] for each in told["counted"]["padding"]] == list(POLICIES)
    assert not [name for name in told["counted"]["padding"][0] if name.endswith("_s")]
    assert told["measured"] == {}


def test_a_model_with_too_short_a_context_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.lab.policies.load", lambda *_: CountingRunner(VirtualClock(), 64, 100))
    assert main(["--count", "late", "--measure", "padding"]) == 2
    assert "padding has requests of 4001 tokens; the model's context is 100" in capsys.readouterr().err
