"""From logits to tokens, for all rows of a pass at once.

Order of application per row:

1. log probabilities, where asked for: of the model's own distribution, before anything below
2. the grammar's mask
3. `logit_bias`, and bans of EOS and stop ids while below `min_tokens`
4. repetition penalty (ids of prompt and output)
5. frequency and presence penalties (ids of the output)
6. temperature 0: the highest logit, ties to the lowest id; else temperature → top-k → top-p → min-p → draw
   (`workers.sampling.draw`)

Every quantity of a row is computed from that row alone, with sums that are exact (`workers.sampling.weights`), so that
a row's token does not depend on its neighbours. The random numbers are a function of (seed, choice, token index)
(`workers.sampling.noise`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.logprobs import TokenLogprob
from workers.model.interface import Sampled, SampleSpec
from workers.sampling.blocks import peaks
from workers.sampling.draw import draw
from workers.sampling.logprobs import logprobs
from workers.sampling.masks import apply_masks, mask_rows, packed_masks
from workers.sampling.parameters import BatchParameters, Biases, ParametersOfLastBatch, Penalties
from workers.sampling.penalties import TokenCounts, penalise
from workers.sampling.scratch import Scratch

UNUSABLE = "the model's logits are not numbers (NaN or infinite), so no token can be chosen"
FORBIDDEN = "grammar, bans and biases together forbid every token, so none can be chosen"
_FAULTS = (UNUSABLE, FORBIDDEN, "")
"""By verdict."""


class Sampler:
    """One thread calls it. Between calls it keeps only what could be gathered again from the next call's arguments."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._parameters = ParametersOfLastBatch(vocabulary, device)
        self._counts = TokenCounts(vocabulary, device)
        self._scratch = Scratch(device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[Sampled, ...]:
        """One token per row of `logits` `[rows, vocabulary]`, which stays as it is. A row whose logits are NaN, +inf or
        all -inf, or that may choose no id, yields a fault and harms no other row."""
        if not specs:
            return ()
        parameters = self._parameters.of(specs)
        # Before masks, which could hide a NaN: what the model said must be numbers even where it may not be chosen.
        peak, tokens = _best(logits, parameters)
        verdict = _are_numbers(peak).long().mul_(2)
        changed = self._changed(logits, parameters, specs)
        if changed is not logits:
            peak, tokens = _best(changed, parameters)
            verdict.clamp_(max=1 + _are_numbers(peak).long())
        for piece in parameters.drawn:
            tokens[piece.index] = draw(changed, peak, piece, specs, self._scratch)
        ids, verdicts = torch.stack((tokens, verdict)).tolist()
        told = _tell(logits, specs, [row for row in parameters.told if not _FAULTS[verdicts[row]]], ids)
        return tuple(
            Sampled(0 if _FAULTS[verdicts[row]] else token, _FAULTS[verdicts[row]], told.get(row))
            for row, token in enumerate(ids)
        )

    def _changed(self, logits: Tensor, parameters: BatchParameters, specs: Sequence[SampleSpec]) -> Tensor:
        """Logits after steps 2 to 5: the caller's tensor itself where nothing applies, else a float32 copy."""
        masked = mask_rows(specs)
        if not masked and parameters.biases is None and parameters.penalties is None:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if masked:
            packed = packed_masks(specs, masked, logits.shape[1], logits.device)
            _replace(logits, masked, lambda rows: apply_masks(rows, packed))
        if parameters.biases is not None:
            _add(logits, parameters.biases)
        if (penalties := parameters.penalties) is not None:
            self._penalise(logits, penalties, specs)
        return logits

    def _penalise(self, logits: Tensor, penalties: Penalties, specs: Sequence[SampleSpec]) -> None:
        seen = self._counts.of([specs[row] for row in penalties.rows])
        rows = torch.tensor(penalties.rows, device=logits.device)[:, None]
        changed = penalise(
            logits[rows, seen.ids], seen.counts, penalties.repetition, penalties.presence, penalties.frequency
        )
        logits[rows, seen.ids] = changed  # an id that stands there twice gets the same value twice


def _best(logits: Tensor, parameters: BatchParameters) -> tuple[Tensor, Tensor]:
    """Each row's peak, and the id that has it where a row asks for it."""
    if parameters.all_draw:
        return logits.amax(-1), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return peaks(logits)


def _are_numbers(values: Tensor) -> Tensor:
    """Neither NaN nor infinite; a tenth of the time of `isfinite` for a few."""
    return values - values == 0


def _replace(logits: Tensor, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
    """Puts `change` of the given rows in their place."""
    if len(rows) == logits.shape[0]:
        logits.copy_(change(logits))
    else:
        index = torch.tensor(rows, device=logits.device)
        logits.index_copy_(0, index, change(logits.index_select(0, index)))


def _add(logits: Tensor, biases: Biases) -> None:
    places = (biases.row, biases.token)
    logits[places] = logits[places] + biases.value


def _tell(
    logits: Tensor, specs: Sequence[SampleSpec], rows: Sequence[int], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Log probabilities of the tokens of `rows`."""
    if not rows:
        return {}
    if len(rows) < logits.shape[0]:
        logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
    tops = [specs[row].params.logprobs or 0 for row in rows]
    return dict(zip(rows, logprobs(logits, [tokens[row] for row in rows], tops), strict=True))
