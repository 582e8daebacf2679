"""Lengths, arrivals, prompts, and how options become calls: deterministic, and of the shape that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.arrivals import poisson_arrivals_s
from benchmarks.errors import BenchError
from benchmarks.lengths import Fixed, LogNormal, Uniform, parse_lengths, rescaled
from benchmarks.options import BenchOptions
from benchmarks.presets import PRESETS
from benchmarks.prompts import HASH_BLOCK_TOKENS, LOWEST_TOKEN_ID, PromptMaker
from benchmarks.workload import build_workload


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 500), st.integers(0, 2**32))
def test_arrivals_rise_at_the_asked_rate_and_repeat(rate_per_s: float, seed: int) -> None:
    arrivals_s = poisson_arrivals_s(rate_per_s, 2_000, Random(seed))
    assert arrivals_s == poisson_arrivals_s(rate_per_s, 2_000, Random(seed))
    assert all(earlier < later for earlier, later in zip((0.0, *arrivals_s), arrivals_s, strict=False))
    # 2,000 exponential gaps have a relative error of 1 / sqrt(2000) = 2.2 %; eight of those never happen.
    assert 2_000 / arrivals_s[-1] == pytest.approx(rate_per_s, rel=0.18)


def test_gaps_are_spread_as_a_poisson_process_is() -> None:
    arrivals_s = poisson_arrivals_s(10.0, 5_000, Random(3))
    gaps = [later - earlier for earlier, later in zip((0.0, *arrivals_s), arrivals_s, strict=False)]
    shorter_than_mean = sum(gap < 0.1 for gap in gaps) / len(gaps)
    assert shorter_than_mean == pytest.approx(0.632, abs=0.03)  # 1 - 1/e; a constant gap would give 0 or 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128", Fixed(128)),
        ("uniform:16:512", Uniform(16, 512)),
        ("lognormal:100:1.5:4:2048", LogNormal(100, 1.5, 4, 2048)),
        ("mixed", LogNormal(128, 1.0, 4, 2048)),
    ],
)
def test_reads_distributions(text: str, expected: object) -> None:
    assert parse_lengths(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "0", "-5", "1.5", "many", "128:1", "uniform:5", "uniform:9:3", "uniform:0:3",
        "lognormal:100:0:1:9", "lognormal:100:nan:1:9", "lognormal:100:1:9:1",
    ],
)  # fmt: skip
def test_refuses_what_is_no_distribution(text: str) -> None:
    with pytest.raises(BenchError, match="no distribution of lengths"):
        parse_lengths(text)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_draws_stay_inside_their_bounds(seed: int) -> None:
    rng = Random(seed)
    assert 16 <= Uniform(16, 512).draw(rng) <= 512
    assert 4 <= LogNormal(128, 3.0, 4, 600).draw(rng) <= 600


def test_mixed_is_heavy_tailed() -> None:
    rng, mixed = Random(1), parse_lengths("mixed")
    drawn = sorted(mixed.draw(rng) for _ in range(4_000))
    assert 115 < drawn[2_000] < 142
    assert sum(drawn) / 4_000 > 1.4 * drawn[2_000]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=80), st.integers(0, 100_000))
def test_rescaling_meets_the_total_and_keeps_the_order(lengths: list[int], more: int) -> None:
    total = len(lengths) + more
    scaled = rescaled(lengths, total)
    assert sum(scaled) == total
    assert min(scaled) >= 1
    for (a, scaled_a), (b, scaled_b) in zip(
        zip(lengths, scaled, strict=True), zip(lengths[1:], scaled[1:], strict=True), strict=False
    ):
        assert (scaled_a - scaled_b) * (a - b) >= 0 or abs(scaled_a - scaled_b) <= 1


def test_prompts_have_the_exact_length_and_repeat() -> None:
    prompt = PromptMaker(7, 32_000).prompt(3, 777)
    assert prompt == PromptMaker(7, 32_000).prompt(3, 777)
    assert len(prompt) == 777
    assert LOWEST_TOKEN_ID <= min(prompt) <= max(prompt) < 32_000
    assert prompt != PromptMaker(8, 32_000).prompt(3, 777)
    assert prompt[:4] != PromptMaker(7, 32_000).prompt(4, 777)[:4]


def test_prompts_share_exactly_the_hashed_blocks() -> None:
    maker = PromptMaker(0, 32_000)
    first, second = maker.prompt(0, 1_100, (5, 6)), maker.prompt(1, 1_500, (5, 9))
    assert (len(first), len(second)) == (1_100, 1_500)
    assert first[:HASH_BLOCK_TOKENS] == second[:HASH_BLOCK_TOKENS]
    assert first[HASH_BLOCK_TOKENS : HASH_BLOCK_TOKENS + 4] != second[HASH_BLOCK_TOKENS : HASH_BLOCK_TOKENS + 4]
    assert len(maker.prompt(2, 700, (5, 6))) == 700  # the last block of a trace is rarely full


def test_mixed64_has_the_totals_that_peers_were_measured_with() -> None:
    workload = build_workload(BenchOptions(preset="mixed64"))
    assert (len(workload.calls), workload.users) == (64, 64)
    assert sum(call.input_tokens for call in workload.calls) == 17_181
    assert sum(call.output_tokens for call in workload.calls) == 5_794
    again = build_workload(BenchOptions(preset="mixed64"))
    assert workload == again


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_built_and_changed(name: str) -> None:
    assert len(build_workload(BenchOptions(preset=name)).calls) == PRESETS[name].requests
    changed = build_workload(BenchOptions(preset=name, requests=3, concurrency=2, output_tokens="5"))
    assert [call.output_tokens for call in changed.calls] == [5, 5, 5]
    assert changed.users == 2


def test_the_rate_opens_the_loop() -> None:
    workload = build_workload(BenchOptions(rate_per_s=5.0, requests=10))
    assert workload.users is None
    assert [call.at_s for call in workload.calls] == sorted({call.at_s for call in workload.calls})


def write_trace(path: Path, rows: list[tuple[float, int, int]]) -> str:
    lines = (json.dumps({"arrival_s": at, "input_tokens": i, "output_tokens": o}) for at, i, o in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_a_trace_gives_scaled_arrivals_and_lengths(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [(10.0, 3, 4), (12.0, 5, 6), (15.0, 900, 200), (16.0, 1, 1)])
    workload = build_workload(BenchOptions(trace=trace, requests=3, time_scale=0.5, max_context_tokens=1_000))
    assert [(call.at_s, call.input_tokens, call.output_tokens) for call in workload.calls] == [(0.0, 3, 4), (1.0, 5, 6)]
    assert (workload.users, workload.left_out) == (None, 1)


def test_a_trace_with_a_clock_per_session_is_no_open_loop(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [(0.0, 3, 4), (9.0, 5, 6), (1.0, 7, 8)])
    with pytest.raises(BenchError, match="line 3: arrival_s goes backwards"):
        build_workload(BenchOptions(trace=trace))
    closed = build_workload(BenchOptions(trace=trace, concurrency=2))
    assert [call.input_tokens for call in closed.calls] == [3, 5, 7]
    assert closed.users == 2


def test_nothing_left_of_a_trace_is_said(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [(0.0, 900, 4)])
    with pytest.raises(BenchError, match=r"no row of .* fits --max-context 100"):
        build_workload(BenchOptions(trace=trace, max_context_tokens=100))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (BenchOptions(api="carrier-pigeon"), "--api"),
        (BenchOptions(preset="huge"), "--preset"),
        (BenchOptions(preset="single", trace="x"), "--preset"),
        (BenchOptions(concurrency=1, rate_per_s=1.0), "--concurrency"),
        (BenchOptions(trace="x", input_tokens="5"), "--trace"),
        (BenchOptions(requests=0), "--requests"),
        (BenchOptions(rate_per_s=float("nan")), "--rate"),
        (BenchOptions(slo_ttft_ms=0.0), "--slo-ttft-ms"),
        (BenchOptions(timeout_s=float("inf")), "--timeout-s"),
        (BenchOptions(vocab_size=100), "--vocab-size"),
    ],
)
def test_options_that_cannot_be_are_named(options: BenchOptions, named: str) -> None:
    with pytest.raises(BenchError, match=named):
        options.validated()
