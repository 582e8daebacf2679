"""What one worker is told; everything else it measures at warm-up."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16")

ATTENTIONS = ("auto", "flash", "varlen", "cpu", "invariant", "reference")


@dataclass(frozen=True)
class EngineConfig:
    """`num_blocks` None: what memory holds (GPU: measured; CPU: `kv_bytes`). `max_context` None: the model's own."""

    model_path: str
    """A local Hugging Face folder: config.json, *.safetensors, tokenizer.json."""
    model_name: str
    """The name clients use."""
    dtype: str = "auto"
    num_blocks: int | None = None
    block_size: int = 16
    max_context: int | None = None
    chunk_tokens: int = 512
    """Most tokens (prefill chunks + decodes) in one iteration."""
    max_sequences: int = 256
    """Most requests in one iteration."""
    policy: str = "chunked"
    capacity: str = "over-commit"
    itl_target_s: float | None = None
    """Inter-token latency that running requests shall keep; None: only `chunk_tokens` bounds a step."""
    step_log: str | None = None
    """Folder in which the last plans, with all they depended on, are written when the engine ends."""
    attention: str = "auto"
    row_invariant: bool = False
    """A row gets the same bits alone, in any batch, at any chunk border. CPU only."""
    threads: int = 0
    """CPU threads of this worker; 0 = all it can see."""
    kv_bytes: int = 1 << 30
    """KV memory on the CPU when `num_blocks` is None."""
    host_kv_bytes: int = 0
    """Host memory for KV blocks that the prefix cache has to give up."""
    prefix_cache: bool = True
    """Whether KV outlives its request, to be found by others of the same tenant with the same beginning."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory for weights + KV."""
