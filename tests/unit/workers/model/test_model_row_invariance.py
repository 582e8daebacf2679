"""Row-invariant mode: what it fills up, what it refuses, and that its start-up probe sees stock kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.errors import InvalidRequest
from tests.fixtures.tiny_models import write_model
from workers.config import EngineConfig
from workers.model.identity import numerics_fingerprint
from workers.model.interface import SequenceSlice
from workers.model.invariant import ROW_TILE, experts_forward, filled_up, filled_up_rows
from workers.model.loader import load_runner
from workers.model.weights import use_threads


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_model("llama", tmp_path_factory.mktemp("tiny"))
    return EngineConfig(str(folder), "tiny", dtype="float32", num_blocks=40, row_invariant=True, threads=1)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_a_pass_is_filled_up_to_whole_tiles(rows: int) -> None:
    piece = SequenceSlice((7,) * rows, 0, tuple(range(10)), None)
    filled = filled_up((piece,), scratch_block=99, block_size=4)
    assert filled[0] is piece
    assert sum(len(s.token_ids) for s in filled) == -(-rows // ROW_TILE) * ROW_TILE
    for added in filled[1:]:
        assert set(added.block_ids) == {99}
        assert added.sample is None
        assert len(added.block_ids) * 4 >= len(added.token_ids)


def test_kept_rows_are_filled_up_by_repeating_the_last() -> None:
    assert filled_up_rows(torch.tensor([3, 8])).tolist() == [3, *[8] * 15]
    assert filled_up_rows(torch.arange(16)).tolist() == list(range(16))
    assert filled_up_rows(torch.empty(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_compute_what_transformers_computes(family: str) -> None:
    from transformers import AutoModelForCausalLM

    from tests.fixtures.tiny_models import FAMILIES

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[family].config(), experts_implementation="eager")
    experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    hidden = torch.randn(21, experts.hidden_dim)
    weights, chosen = torch.randn(21, experts.num_experts).softmax(-1).topk(2)
    with torch.inference_mode():
        wanted = experts(hidden, chosen, weights)
        got = experts_forward(experts, hidden, chosen, weights)
    assert torch.allclose(got, wanted, atol=1e-5)
    assert got.abs().max() > 0.01


def test_the_probe_passes_here_and_refuses_stock_kernels(config: EngineConfig) -> None:
    load_runner(config).require_row_invariance()
    use_threads(1)
    stock = load_runner(replace(config, row_invariant=False))
    with pytest.raises(InvalidRequest, match="not row-invariant") as refusal:
        stock.require_row_invariance()
    assert refusal.value.field == "row_invariant"


def test_another_attention_is_refused_by_name(config: EngineConfig) -> None:
    with pytest.raises(InvalidRequest, match="'cpu'") as refusal:
        load_runner(replace(config, attention="cpu"))
    assert refusal.value.field == "attention"


def test_the_fingerprint_tells_what_breaks_equality() -> None:
    def fingerprint(dtype: torch.dtype, attention: str, *, on: bool, threads: int = 1) -> str:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return numerics_fingerprint(torch.device("cpu"), dtype, attention, row_invariant=on)
        finally:
            torch.set_num_threads(before)

    prints = [
        fingerprint(torch.float32, "invariant", on=True),
        fingerprint(torch.float32, "invariant", on=False),
        fingerprint(torch.bfloat16, "invariant", on=True),
        fingerprint(torch.float32, "cpu", on=False),
        fingerprint(torch.float32, "invariant", on=True, threads=2),
    ]
    assert len(set(prints)) == len(prints)
