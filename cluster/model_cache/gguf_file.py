"""Reads a GGUF file's metadata and tensors by name, with errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import NoSuchModel

_MISSING = object()


class GgufFile:
    """One GGUF file, memory-mapped. Raises `NoSuchModel` when it is not one."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise NoSuchModel(f"{path} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of metadata `key`, as plain Python. Raises `NoSuchModel` if it is absent without a default."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is _MISSING:
            raise NoSuchModel(f"{self.path} lacks the metadata {key!r}")
        return default

    def real(self, key: str, default: Any = _MISSING) -> float:
        """A float32 in its shortest decimal form: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self.get(key, default))))

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def tensor_names(self) -> Iterator[str]:
        return iter(self._tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Rows first, as in PyTorch; GGUF stores the fastest dimension first."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str, part: int | None = None) -> NDArray[np.float32]:
        """The tensor's values, or those of one `part` along its first dimension, dequantised to float32. Raises
        `NoSuchModel` for a quantisation `gguf` cannot undo."""
        from gguf.quants import dequantize

        stored = self._tensors[name]
        try:
            data = stored.data if part is None else stored.data[part]
            return np.asarray(dequantize(data, stored.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise NoSuchModel(f"{self.path}: cannot dequantise {stored.tensor_type.name} (tensor {name})") from error
