"""Every setting of a cluster, with its unit, bounds and a sentence; resolved once, from flags over environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.environment import PREFIX, settings_from
from cluster.errors import OperatorError
from router.config import RouterConfig
from workers.config import ATTENTIONS, EngineConfig


class Settings(BaseModel):
    """What the operator decides. Field `x` is the flag `--x` of `headrace up` and the variable `HEADRACE_X`.

    Nothing here imports torch or Ray, so the CLI can check its flags at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        "default",
        pattern=r"^[a-z0-9][a-z0-9-]{0,31}$",
        description="Name of this cluster: up to 32 of a-z, 0-9 and '-'. Several can run beside each other.",
    )
    model: str = Field(
        "smollm2",
        min_length=1,
        description="The embedded model 'smollm2', a Hugging Face folder, a .gguf file, or a hub id (owner/name).",
    )
    workers: int | None = Field(
        None, ge=1, le=1_024, description="Number of workers; unset: one per GPU, or one on a machine without GPU."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Number format of weights and KV cache: float32, bfloat16, or auto: bfloat16 where it is fast.",
    )
    kv_blocks: int | None = Field(
        None, ge=2, le=1 << 24, description="KV cache of one worker in blocks; unset: as many as memory allows."
    )
    kv_mib: int = Field(
        1_024, ge=1, le=1 << 20, description="KV cache of one worker in MiB on a CPU, where --kv-blocks is unset."
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens in one KV block.")
    max_context: int | None = Field(
        None, ge=2, le=1 << 24, description="Longest prompt + output in tokens; unset: the model's own limit."
    )
    chunk_tokens: int = Field(
        512, ge=16, le=1 << 20, description="Most tokens (prompt chunks + decodes) computed in one iteration."
    )
    max_sequences: int = Field(256, ge=1, le=65_536, description="Most requests in one iteration of one worker.")
    policy: Literal["chunked", "continuous", "dynamic", "static"] = Field(
        "chunked",
        description="How the engine composes iterations: chunked cuts long prompts into pieces, continuous never does; "
        "static and dynamic form padded batches (the baselines of docs/batching.md).",
    )
    capacity: Literal["over-commit", "no-evict"] = Field(
        "over-commit",
        description="Who may hold KV memory: over-commit by estimated output lengths, or no-evict: kept to the end.",
    )
    itl_ms: int | None = Field(
        None,
        ge=1,
        le=600_000,
        description="Inter-token latency in ms that running requests shall keep: prompt chunks shrink to fit; unset: "
        "only --chunk-tokens bounds them.",
    )
    prefix_cache: bool = Field(
        True, description="Keep the KV of prompts and outputs, to be found by requests with the same beginning."
    )
    host_kv_mib: int = Field(
        0, ge=0, le=1 << 24, description="Host memory in MiB of one worker for KV blocks that its cache gives up."
    )
    row_invariant: bool = Field(
        False,
        description="Kernels that give a request the same bits whatever is batched, cached or preempted beside it; "
        "slower (docs/determinism.md); CPU only.",
    )
    step_log: str | None = Field(
        None,
        min_length=1,
        description="Folder in which each worker writes its last plans, with all they depended on, when it ends; "
        "unset: none. For debugging.",
    )
    attention: str = Field(
        "auto",
        min_length=1,
        description=f"Attention kernels: {', '.join(ATTENTIONS[1:])}, or auto: the fastest that runs here.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1_024,
        description="CPU threads of one worker; 0: the cores divided by the workers. Unused on a GPU.",
    )
    gpu_memory: float = Field(0.9, gt=0.0, le=1.0, description="Share of a GPU's memory for weights and KV cache.")
    redis: str | None = Field(
        None,
        description="redis://, rediss:// or unix:// URL of an existing server; unset: one is started and ended here.",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for every interface.")
    grpc_port: int = Field(50_051, ge=1, le=65_535, description="TCP port of the gRPC API.")
    http_port: int = Field(8_000, ge=1, le=65_535, description="TCP port of the OpenAI-compatible HTTP API.")
    tenant_cap_tokens: int = Field(
        0,
        ge=0,
        description="Most tokens (prompt + output) one tenant may have waiting or running; 0: no limit. "
        "All calls are one tenant so far.",
    )
    global_cap_tokens: int = Field(
        0, ge=0, description="Most tokens (prompt + output) waiting or running in all; 0: no limit."
    )
    result_ttl_s: int = Field(60, ge=1, le=86_400, description="Seconds a finished result can still be read.")
    start_timeout_s: int = Field(
        300, ge=5, le=7_200, description="Seconds the start may take once the model is on disk; then it is given up."
    )

    @field_validator("attention")
    @classmethod
    def _known_attention(cls, name: str) -> str:
        if name not in ATTENTIONS:
            raise ValueError(f"known are {', '.join(ATTENTIONS)}")
        return name

    @field_validator("redis")
    @classmethod
    def _redis_url(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must be a redis://, rediss:// or unix:// URL")
        return url

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        if self.grpc_port == self.http_port:
            raise ValueError(f"--grpc-port and --http-port are both {self.grpc_port}; they must differ")
        return self

    @classmethod
    def resolve(cls, flags: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> Settings:
        """Flags that are set (not None), over the environment, over the defaults.

        Raises `OperatorError` naming the first flag or variable that is out of bounds or unknown.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        from_environment = settings_from(environment, tuple(cls.model_fields))
        try:
            return cls.model_validate(from_environment | given)
        except ValidationError as error:
            raise OperatorError(_one_line(error, given)) from error

    def engine_config(self, model_path: str, model_name: str, *, threads: int) -> EngineConfig:
        """What each worker is told. `threads` is already resolved; 0 on a GPU."""
        return EngineConfig(
            model_path=model_path,
            model_name=model_name,
            dtype=self.dtype,
            num_blocks=self.kv_blocks,
            block_size=self.block_size,
            max_context=self.max_context,
            chunk_tokens=self.chunk_tokens,
            max_sequences=self.max_sequences,
            policy=self.policy,
            capacity=self.capacity,
            itl_target_s=None if self.itl_ms is None else self.itl_ms / 1_000,
            prefix_cache=self.prefix_cache,
            host_kv_bytes=self.host_kv_mib << 20,
            row_invariant=self.row_invariant,
            step_log=self.step_log,
            attention=self.attention,
            threads=threads,
            kv_bytes=self.kv_mib << 20,
            memory_fraction=self.gpu_memory,
        )

    def router_config(self, model_path: str, model_name: str, *, cluster_id: str, redis_url: str) -> RouterConfig:
        """What each router is told."""
        return RouterConfig(
            cluster_id=cluster_id,
            redis_url=redis_url,
            model_path=model_path,
            model_name=model_name,
            host=self.host,
            grpc_port=self.grpc_port,
            http_port=self.http_port,
            max_context=self.max_context,
            result_ttl_ms=self.result_ttl_s * 1_000,
            tenant_cap_tokens=self.tenant_cap_tokens,
            global_cap_tokens=self.global_cap_tokens,
        )


def describe(name: str) -> str:
    """The sentence of one field, for the CLI's help."""
    return Settings.model_fields[name].description or ""


def _one_line(error: ValidationError, flags: Mapping[str, object]) -> str:
    first = error.errors()[0]
    why = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return why
    name = str(first["loc"][0])
    source = f"--{name.replace('_', '-')}" if name in flags else PREFIX + name.upper()
    why = why[0].lower() + why[1:]
    return f"{source} {_shown(name, first.get('input'))}: {why}"


def _shown(name: str, value: object) -> str:
    """The offending value, but never a URL: it may hold a password."""
    return "" if name == "redis" else f"is {value!r}"
