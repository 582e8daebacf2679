"""The model runner: plain slices in, sampled tokens out. The only place where weights, KV memory and kernels meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import InvalidRequest
from headrace.sampling import MAX_TOP_LOGPROBS, SamplingParams
from workers.attention.interface import PagedAttention
from workers.attention.transformers_hook import PagedPass
from workers.config import EngineConfig
from workers.kv.moves import Move
from workers.model import memory
from workers.model.host_kv import HostKv
from workers.model.identity import numerics_fingerprint, weight_version
from workers.model.interface import Computed, ModelShape, Sampled, SampleSpec, ScoreSpec, SequenceSlice
from workers.model.invariant import PROBE_TOKENS, differing_layout, filled_up, filled_up_rows
from workers.model.kv_cache import PagedKvCache, blocks_that_fit
from workers.model.rows import Rows, flatten
from workers.model.weights import LoadedModel
from workers.sampling.logprobs import scores
from workers.sampling.sampler import UNUSABLE, Sampler
from workers.scheduler.step_time import Features, pass_of, warm_up_passes

log = logging.getLogger(__name__)


class TorchRunner:
    """A `ModelRunner` over a transformers model. One thread calls it."""

    def __init__(self, config: EngineConfig, model: LoadedModel, attention: PagedAttention) -> None:
        self._model = model
        self._attention = attention
        self._block_size = config.block_size
        self._row_invariant = config.row_invariant
        geometry = model.geometry
        self._shape = ModelShape(
            name=config.model_name,
            vocab_size=geometry.vocab_size,
            max_context=geometry.max_context,
            bytes_per_token_kv=geometry.kv_bytes_per_token(model.dtype.itemsize),
            eos_token_ids=model.eos_token_ids,
            weight_version=weight_version(Path(config.model_path)),
            numerics=numerics_fingerprint(
                model.device, model.dtype, attention.name, row_invariant=config.row_invariant
            ),
        )
        self._sampler = Sampler(geometry.vocab_size, model.device)
        self._cache = self._allocate(config)
        self._host = HostKv.allocate(self._cache, config.host_kv_bytes)
        self._move_block_s = 0.0

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV cache: what was asked for, or what memory holds."""
        return self._cache.num_blocks

    @property
    def scratch_block(self) -> int:
        return self._cache.scratch_block

    @property
    def host_blocks(self) -> int:
        return self._host.slots

    @property
    def move_block_s(self) -> float:
        """As the warm-up has measured it."""
        return self._move_block_s

    def warm_up(self, chunk_tokens: int, watch: Callable[[Features, float], None] = lambda _, __: None) -> float:
        """Runs a single row and then passes from a whole chunk to decodes, so that the first request pays for no lazy
        set-up, and zeroes the KV they wrote. `watch` is told what the later passes consisted of and how many seconds
        they took. Returns the longest of the passes after the first, in seconds: the step to expect.
        """
        rows = min(chunk_tokens, self._shape.max_context, self.num_blocks * self._block_size)
        blocks = tuple(range(-(-rows // self._block_size)))
        greedy = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=0, choice=0, token_index=0)
        seconds = []
        for pieces in (((0, 1),), *warm_up_passes(rows)):
            began_s = time.perf_counter()
            self.forward(tuple(SequenceSlice((0,) * count, start, blocks, greedy) for start, count in pieces))
            seconds.append(time.perf_counter() - began_s)
            if len(seconds) > 2:  # the first row and the first chunk pay for what is set up lazily
                watch(pass_of(pieces), seconds[-1])
        self._move_block_s = self._host.measure(self._cache)
        self._cache.clear(blocks)
        return max(seconds[1:])

    def require_row_invariance(self) -> None:
        """Raises InvalidRequest when this model's rows get other bits in other company, on this machine."""
        most_tokens = min(self._shape.max_context, self.num_blocks * self._block_size)
        way = differing_layout(self._logits, self._shape.vocab_size, most_tokens, self._block_size)
        self._cache.clear(range(-(-min(PROBE_TOKENS, most_tokens) // self._block_size)))
        if way:
            raise InvalidRequest(
                f"a probe computed {way} gave other bits than whole: this model is not row-invariant on this machine "
                f"with {torch.get_num_threads()} threads",
                field="row_invariant",
            )

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice], moves: Sequence[Move] = ()) -> tuple[Computed, ...]:
        """See `ModelRunner.forward`. A slice with an id outside the vocabulary, or whose logits are unusable, gets a
        fault; its neighbours are computed as if it were not there."""
        self._host.carry_out(self._cache, moves)
        return self._computed(slices) if slices else ()

    def _computed(self, slices: Sequence[SequenceSlice]) -> tuple[Computed, ...]:
        illegal = {i for i, s in enumerate(slices) if not _is_legal(s, self._shape.vocab_size)}
        safe = [s if i not in illegal else _with_zeros(s) for i, s in enumerate(slices)] if illegal else slices
        rows, logits = self._kept_logits(safe)
        specs: list[SampleSpec] = [s.sample for s in safe if s.sample is not None]
        tokens = iter(self._sampler.sample(rows.sampled_of(logits), specs))
        unsound = _unsound(rows, logits)
        results = []
        for i, (piece, scored) in enumerate(zip(safe, rows.scored[: len(safe)], strict=True)):
            sampled = None if piece.sample is None else next(tokens)
            told = () if piece.score is None else scores(logits[scored], piece.score)
            if told is None or i in unsound:
                sampled = Sampled(0, UNUSABLE)
            if i in illegal:
                sampled = Sampled(0, f"a token id is outside the vocabulary of {self._shape.vocab_size}")
            results.append(Computed(sampled, told or ()))
        self._scrub_faulty(slices, results)
        return tuple(results)

    def _logits(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Writes KV for all rows; returns logits `[sampling slices, vocabulary]`."""
        rows, logits = self._kept_logits(slices)
        return rows.sampled_of(logits)

    def _kept_logits(self, slices: Sequence[SequenceSlice]) -> tuple[Rows, Tensor]:
        """Writes KV for all rows; returns the logits of those that are needed, `[rows.kept, vocabulary]`."""
        with torch.inference_mode():
            if self._row_invariant:
                slices = filled_up(slices, self.scratch_block, self._block_size)
            rows = flatten(slices, self._block_size, self._model.device, self.scratch_block)
            kept = filled_up_rows(rows.kept) if self._row_invariant else rows.kept
            paged = PagedPass(self._attention.prepare(rows.batch), rows.batch.slots, self._cache)
            output = self._model.module(
                input_ids=rows.input_ids,
                position_ids=rows.positions,
                use_cache=False,
                logits_to_keep=kept,
                paged=paged,
            )
            logits: Tensor = output.logits[0, : len(rows.kept)]
            return rows, logits

    def _scrub_faulty(self, slices: Sequence[SequenceSlice], results: Sequence[Computed]) -> None:
        faults = [r.sampled.fault if r.sampled is not None else "" for r in results]
        faulty = [s.block_ids for s, fault in zip(slices, faults, strict=True) if fault]
        if faulty:
            self._cache.scrub(sorted({block for ids in faulty for block in ids}))

    def _allocate(self, config: EngineConfig) -> PagedKvCache:
        model = self._model
        num_blocks = config.num_blocks
        if num_blocks is None:
            budget = config.kv_bytes if model.device.type == "cpu" else self._measured_budget(config)
            num_blocks = blocks_that_fit(budget, model.geometry, config.block_size, model.dtype)
        return PagedKvCache.allocate(model.geometry, num_blocks, config.block_size, model.device, model.dtype)

    def _measured_budget(self, config: EngineConfig) -> int:
        """What a GPU has left for KV beside weights and the activations of the largest step, in bytes. The largest is a
        whole chunk of a prompt to be scored: the logits of all its rows are there at once.
        """
        device, geometry = self._model.device, self._model.geometry
        rows = min(config.chunk_tokens, geometry.max_context)
        blocks = -(-rows // config.block_size)
        self._cache = PagedKvCache.allocate(geometry, blocks, config.block_size, device, self._model.dtype)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        everything = ScoreSpec((0,) * rows, MAX_TOP_LOGPROBS)
        self._computed((SequenceSlice((0,) * rows, 0, tuple(range(blocks)), None, everything),))
        activations = torch.cuda.max_memory_allocated(device) - before
        logits = config.max_sequences * geometry.vocab_size * _LOGITS_BYTES
        del self._cache
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.memory_fraction) - (total - free) - activations - logits
        log.info("GPU budget for KV: %s of %s", memory.gib(budget), memory.gib(total))
        return budget


_LOGITS_BYTES = 4 * 12
"""Per logit of a full batch: the counts of penalised ids, and at most eleven float32 copies at once."""


def _unsound(rows: Rows, logits: Tensor) -> set[int]:
    """The slices that nothing is sampled from and whose numbers are none: if they were not told now, such a chunk's
    owner could go before it is noticed, and leave NaN to the next owner of its blocks.
    """
    if not rows.watched:
        return set()
    index = torch.tensor(list(rows.watched.values()), device=logits.device)
    sound = torch.isfinite(logits.index_select(0, index).amax(-1)).tolist()
    return {place for place, is_sound in zip(rows.watched, sound, strict=True) if not is_sound}


def _is_legal(piece: SequenceSlice, vocabulary: int) -> bool:
    targets = () if piece.score is None else piece.score.targets
    return all(0 <= min(ids) <= max(ids) < vocabulary for ids in (piece.token_ids, targets) if ids)


def _with_zeros(faulty: SequenceSlice) -> SequenceSlice:
    return SequenceSlice((0,) * len(faulty.token_ids), faulty.start, faulty.block_ids, faulty.sample)
