"""Names for what must be equal before one worker may continue another's stream: the weights, and the arithmetic."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import torch

from workers.model.weight_files import weight_files

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096


def weight_version(folder: Path) -> str:
    """A short hash of config.json and of every file of weights: name, size, header and evenly spaced samples of the
    data.

    Reading everything would cost a minute for a large model, a header alone would not tell two fine-tunes apart; 64
    samples of 4 KiB do, as training moves every weight.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"\n{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            header = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            digest.update(file.read(min(header, size)))
            start = file.tell()
            for i in range(SAMPLES_PER_FILE):
                file.seek(start + (size - start) * i // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def numerics_fingerprint(
    device: torch.device, dtype: torch.dtype, attention: str, *, row_invariant: bool = False
) -> str:
    """Kernels, instruction set, threads and number format; workers with equal ones compute equal bits from equal
    batches, and row-invariant ones from any.
    """
    kind = str(dtype).removeprefix("torch.") + ("/row-invariant" if row_invariant else "")
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device).replace(" ", "-")
        return f"torch-{torch.__version__}/{chip}/{kind}/{attention}"
    extra = "+amx" if has_amx() else "+bf16" if has_bf16() else ""
    isa = torch.backends.cpu.get_cpu_capability().lower() + extra
    return f"torch-{torch.__version__}/cpu-{isa}/{torch.get_num_threads()}-threads/{kind}/{attention}"


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


def has_bf16() -> bool:
    """Whether this CPU has AVX-512 instructions for bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported())
