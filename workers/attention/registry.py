"""Attention implementations by name, imported only when asked for."""

from __future__ import annotations

import importlib
import logging

from headrace.errors import InvalidRequest
from workers.attention.interface import AttentionSpec, AttentionUnavailable, PagedAttention
from workers.attention.self_test import TOLERANCE, largest_difference

log = logging.getLogger(__name__)

IMPLEMENTATIONS = {
    "flash": "workers.attention.flash:FlashAttention",
    "varlen": "workers.attention.varlen:VarlenAttention",
    "cpu": "workers.attention.cpu:CpuAttention",
    "invariant": "workers.attention.invariant:InvariantAttention",
    "reference": "workers.attention.reference:ReferenceAttention",
}
"""In order of speed: `auto` takes the first that runs here and agrees with the reference."""


def resolve_attention(name: str, spec: AttentionSpec) -> PagedAttention:
    """The implementation called `name`, tested. Raises InvalidRequest for an unknown name (listing the known ones) and
    for one that cannot run here (saying why)."""
    if name == "auto":
        return _fastest(spec)
    if name not in IMPLEMENTATIONS:
        raise InvalidRequest(
            f"unknown attention {name!r}; known: auto, {', '.join(IMPLEMENTATIONS)}", field="attention"
        )
    try:
        return _build(name, spec)
    except AttentionUnavailable as reason:
        raise InvalidRequest(f"attention {name!r} cannot run here: {reason}", field="attention") from reason


def _fastest(spec: AttentionSpec) -> PagedAttention:
    for name in IMPLEMENTATIONS:
        try:
            return _build(name, spec)
        except AttentionUnavailable as reason:
            log.info("attention %s passed over: %s", name, reason)
    raise InvalidRequest(f"no attention implementation runs on {spec.device} in {spec.dtype}", field="attention")


def _build(name: str, spec: AttentionSpec) -> PagedAttention:
    module, _, kind = IMPLEMENTATIONS[name].partition(":")
    attention: PagedAttention = getattr(importlib.import_module(module), kind)(spec)
    try:
        difference = largest_difference(attention, spec)
    except RuntimeError as error:  # What kernels raise for shapes, devices or page sizes they do not take.
        raise AttentionUnavailable(f"its self-test raised {str(error).splitlines()[0]}") from error
    if difference > TOLERANCE[spec.dtype]:
        raise AttentionUnavailable(f"its self-test is {difference:.2g} away from the reference")
    return attention
