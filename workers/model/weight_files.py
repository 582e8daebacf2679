"""Which safetensors files hold a model's weights, checked by their headers alone. Never pickle.

A folder may hold the same weights twice (some publishers add one consolidated file beside the shards), so what counts
is what transformers will read: `model.safetensors`, else the files that the index names. Format of a file
(https://github.com/huggingface/safetensors): 8 bytes header length, a JSON header with each tensor's dtype, shape and
byte range after the header, then the bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from headrace.errors import UnknownModel

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LENGTH_BYTES = 8


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Sorted by name. Raises UnknownModel, naming the file, when there are none or one is missing."""
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return tuple(_shard(folder, name) for name in sorted(_indexed(folder / INDEX)))
    pickled = [path.name for pattern in PICKLED for path in sorted(folder.glob(pattern))]
    why = f"{pickled[0]} is pickled, which is never loaded" if pickled else "other formats are not loaded"
    strays = sorted(path.name for path in folder.glob("*.safetensors"))
    if strays:
        why = f"{strays[0]} is named by no {INDEX}"
    raise UnknownModel(f"{folder} has no *.safetensors weights ({why})", field="model")


def tensor_numel(path: Path) -> int:
    """Elements of all tensors in one file. Raises UnknownModel for a file that is damaged or cut short."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        end = LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        numel = sum(math.prod(entry["shape"]) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownModel(f"{path} is not a safetensors file: {error}", field="model") from error
    if end > size:
        raise UnknownModel(f"{path} is cut short: {size} bytes of {end}", field="model")
    return numel


def _indexed(index: Path) -> set[str]:
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownModel(f"{index} is not an index of weights: {error!r}", field="model") from error
    if not named or not all(isinstance(name, str) and name == Path(name).name for name in named):
        raise UnknownModel(f"{index} names files that are not in its folder", field="model")
    return named


def _shard(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise UnknownModel(f"{folder} lacks {name}, which {INDEX} names", field="model")
    return folder / name
