"""Turns whatever `--model` names into a local Hugging Face folder, once, and keeps it.

Owns the `models/` and `wheels/` folders of the cache. Safe for several processes at once: a folder appears by rename,
complete and checksummed, and a file lock lets only one process make it.
"""

from __future__ import annotations

from cluster.model_cache.embedded import EMBEDDED_NAME
from cluster.model_cache.resolve import ResolvedModel, resolve_model
from cluster.progress import Progress, silent

__all__ = ["EMBEDDED_NAME", "Progress", "ResolvedModel", "resolve_model", "silent"]
