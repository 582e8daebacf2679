"""What one router is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterConfig:
    """Ports are per node: routers of one node share them through SO_REUSEPORT (DESIGN section 7)."""

    cluster_id: str
    redis_url: str
    model_path: str
    """Folder with tokenizer.json, tokenizer_config.json (chat template) and config.json."""
    model_name: str
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    max_body_bytes: int = 8 << 20
    result_ttl_ms: int = 60_000
    tenant_cap_tokens: int = 0
    global_cap_tokens: int = 0
