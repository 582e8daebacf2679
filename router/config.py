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
    max_context: int | None = None
    """Tokens of prompt and output together; None: the model's own."""
    max_body_bytes: int = 8 << 20
    result_ttl_ms: int = 60_000
    tenant_cap_tokens: int = 0
    global_cap_tokens: int = 0
    max_open_streams: int = 4096
    """Requests one router delivers at once; more are refused with a time to come back."""
    tokenizer_threads: int = 2
    """Threads that render and tokenise beside the event loop."""
    grammar_limit_s: float = 2.0
    """What one grammar may take to compile before its request is refused as too complex."""
    stall_limit_s: float = 120.0
    """A client that takes nothing of what waits for it for this long counts as gone."""
    drain_s: float = 5.0
    """How long a stopping router lets open streams run on."""
