"""Writes a safetensors file in bfloat16 tensor by tensor, so that memory holds one tensor at a time.

Layout (https://github.com/huggingface/safetensors): 8 bytes header length, a JSON header with each tensor's dtype,
shape and byte range, then the bytes. NumPy has no bfloat16, which is why the library's own NumPy writer cannot do this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8
_BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be: `load()` gives its float32 values, of `shape`, when its turn has come."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.float32]]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _BFLOAT16_BYTES


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bit patterns of `values` rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    # Rounding up a NaN's mantissa may carry it into the exponent; the quiet NaN stands for all.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def write_safetensors(
    path: Path, tensors: Sequence[LazyTensor], on_written: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Writes `tensors` in order. `on_written(done_bytes, total_bytes)` is called after each one."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.size_bytes
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    done = 0
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(text)
        for tensor in tensors:
            values = tensor.load()
            if values.shape != tensor.shape:
                raise ValueError(f"tensor {tensor.name} has shape {values.shape}, its header says {tensor.shape}")
            handle.write(to_bfloat16(values).tobytes())
            done += tensor.size_bytes
            on_written(done, end)
