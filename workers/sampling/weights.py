"""Weights of ids, exact in their sums.

A weight is exp of a logit under the row's peak: the peak's is 1. It is rounded to a multiple of a power of two so small
that a whole vocabulary of such weights still adds up within float64's 53 bits. Every sum is then exact, so it does not
depend on the order of adding, on how many rows share a pass, or on the device; only `exp` itself does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.sampling.blocks import in_blocks
from workers.sampling.scratch import Scratch

FLOAT32_FRACTION_BITS = 23
FLOAT64_BITS = 53
FINEST_BITS = 35
"""Weights are multiples of 2**-35, about 3e-11 of the likeliest id's, in vocabularies up to 2**18 ids."""
NOTHING_LEFT = -40.0
"""exp of this is 0 on the grid. Further down `exp` takes ten times as long, for numbers that no float32 holds."""


def weigh(distances: Tensor) -> Tensor:
    """`exp(distances)` of float32 `[rows, vocabulary]` at most 0, rounded to the grid; overwrites its argument. (`exp2`
    would be faster, but PyTorch's gives the last few elements of a range other bits than those before, on the CPU.)
    """
    bits = min(FINEST_BITS, FLOAT64_BITS - math.ceil(math.log2(distances.shape[1])))
    # Adding pushes the bits finer than the grid out of float32, and taking away again changes nothing more.
    coarse = 2.0 ** (FLOAT32_FRACTION_BITS - bits)
    return distances.clamp_(min=NOTHING_LEFT).exp_().add_(coarse).sub_(coarse)


def block_sums(weights: Tensor, scratch: Scratch) -> Tensor:
    """float64 `[rows, blocks]`, exact."""
    return in_blocks(scratch.like(weights, "wide", torch.float64).copy_(weights), 0.0).sum(-1)


def pick(weights: Tensor, sums: Tensor, noise: Tensor) -> Tensor:
    """Inverts each row's cumulative distribution, in the order of ids, at `noise` × its total: int64 ids `[rows]`.
    `noise` is float64 `[rows, 1]` in [0, 1). Summing by ids, not by likelihood, means that two nearly equal logits that
    swap places between kernels do not move the other tokens. A row without any weight, or with NaN, gives any id.
    """
    up_to = sums.cumsum(-1)
    target = _below(noise * up_to[:, -1:], up_to[:, -1:])
    block = torch.searchsorted(up_to, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = up_to.gather(1, block) - sums.gather(1, block)
    blocks = in_blocks(weights, 0.0)
    chosen = blocks.gather(1, block[..., None].expand(-1, -1, blocks.shape[2]))[:, 0]
    within = chosen.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(within, _below(target - before, within[:, -1:]), right=True)
    ids = block * blocks.shape[2] + found
    return ids[:, 0].clamp_(max=weights.shape[1] - 1)


def _below(value: Tensor, limit: Tensor) -> Tensor:
    """Rounding may lift a value to the limit itself, past the last id with any weight."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))
