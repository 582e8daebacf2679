"""A local Hugging Face folder becomes a causal language model whose attention is ours.

Safetensors only, never pickle; code that comes with a model is never run.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.errors import InvalidRequest, UnknownModel
from workers.attention import transformers_hook
from workers.config import DTYPES, EngineConfig
from workers.model import memory
from workers.model.geometry import Geometry, read_geometry
from workers.model.identity import has_amx, has_bf16
from workers.model.invariant import EXPERTS_NAME, register_experts
from workers.model.packing import can_pack, leave_file, pack_linears
from workers.model.probe import measured
from workers.model.weight_files import tensor_numel, weight_files


@dataclass(frozen=True)
class LoadedModel:
    module: nn.Module
    geometry: Geometry
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises UnknownModel when the folder is not a model, InvalidRequest when we cannot run it as asked,
    OutOfMemory.
    """
    folder = _checked_folder(config.model_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = resolve_dtype(config.dtype, device)
    hf_config = _read_config(folder)
    geometry = read_geometry(hf_config, config.max_context)
    # Once they are in `dtype`, whatever they are stored in.
    needed = dtype.itemsize * sum(tensor_numel(path) for path in weight_files(folder))
    memory.require(f"the weights of {config.model_name}", needed, device)
    module = _load_module(folder, hf_config, dtype, device, EXPERTS_NAME if config.row_invariant else None)
    geometry = measured(geometry, module, device)
    if can_pack(device, dtype):
        pack_linears(module)
        leave_file(module)
    return LoadedModel(module, geometry, device, dtype, _eos_token_ids(folder))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32."""
    if name not in DTYPES:
        raise InvalidRequest(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}", field="dtype")
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else has_amx() or has_bf16()
        name = "bfloat16" if fast else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def use_threads(threads: int) -> None:
    """Sets torch's CPU threads; 0 = every core this process may run on. (Ray sets OMP_NUM_THREADS to 1 inside
    actors.)
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def _checked_folder(path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UnknownModel(f"no model folder at {path}", field="model")
    if not (folder / "config.json").is_file():
        raise UnknownModel(f"{path} is not a model folder: it has no config.json", field="model")
    return folder


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        kind = _json(folder / "config.json").get("model_type")
        raise InvalidRequest(f"model type {kind!r} is not one transformers can load", field="model") from error


def _load_module(
    folder: Path, hf_config: Any, dtype: torch.dtype, device: torch.device, experts: str | None
) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_hook.register()
    register_experts()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=transformers_hook.IMPLEMENTATION_NAME,
            experts_implementation=experts,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            device_map=None if device.type == "cpu" else {"": device},
        )
    except torch.cuda.OutOfMemoryError as error:
        raise memory.OutOfMemory(f"the weights do not fit on {device}: {str(error).splitlines()[0]}") from error
    except (ValueError, KeyError) as error:
        kind = getattr(hf_config, "model_type", "unknown")
        raise InvalidRequest(f"model type {kind!r} is not a causal language model we can run", field="model") from error
    except RuntimeError as error:  # its text speaks of arguments of transformers
        raise InvalidRequest(
            f"the weights in {folder} have other shapes than its config.json says; the log names them", field="model"
        ) from error
    module, report = loaded
    _require_complete(folder, report["missing_keys"])
    _require_hooks(module, hf_config)
    return module.eval().requires_grad_(False)


def _require_complete(folder: Path, missing: Collection[str]) -> None:
    """transformers gives parameters that no file holds random values, and goes on."""
    if missing:
        first, *others = sorted(missing)
        more = f" and {len(others)} more" if others else ""
        raise InvalidRequest(f"the weights in {folder} lack {first}{more}", field="model")


def _require_hooks(module: nn.Module, hf_config: Any) -> None:
    """Only models that go through transformers' attention interface and can restrict logits to chosen rows."""
    forward = inspect.signature(module.forward).parameters
    if not getattr(module, "_supports_attention_backend", False) or "logits_to_keep" not in forward:
        raise InvalidRequest(
            f"model type {hf_config.model_type!r} does not support transformers' attention interface", field="model"
        )


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    found: dict[int, None] = {}
    config = _json(folder / "config.json")
    text = config.get("text_config")  # of a model that also sees
    for source in (_json(folder / "generation_config.json"), config, text if isinstance(text, dict) else {}):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
