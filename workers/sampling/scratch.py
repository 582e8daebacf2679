"""Memory for what lives within one call. Taken anew for each it would be new pages of the operating system every time,
and on the CPU those cost more than the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """As large as the largest it was ever asked for; one thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}

    def like(self, rows: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised, of the shape of `rows`; valid until the same name is asked for again."""
        held = self._held.get(name)
        if held is None or held.numel() < rows.numel():
            held = self._held[name] = torch.empty(rows.numel(), dtype=dtype, device=self._device)
        return held[: rows.numel()].view(rows.shape)
