"""The store's refusals, told as errors."""

from __future__ import annotations

from headrace.errors import HeadraceError, Overloaded, TooLong, Unavailable, UnknownModel
from headrace.store.interface import Refusal, Refused


def error_for(refused: Refused) -> HeadraceError:
    """The error a client gets for a refusal by `admit`; its `retry_after_s` is the store's own estimate."""
    retry_after_s = refused.retry_after_ms / 1000 if refused.retry_after_ms > 0 else None
    asked, limit = refused.asked, refused.limit
    match refused.reason:
        case Refusal.TOO_LARGE:
            return TooLong(f"the request needs {asked} KV tokens and no worker holds {limit}", field="max_tokens")
        case Refusal.WRONG_MODEL:
            return UnknownModel("this cluster does not serve that model", field="model")
        case Refusal.TENANT_CAP:
            message = f"this tenant may have {limit} tokens waiting or running; with this request it would be {asked}"
        case Refusal.GLOBAL_CAP:
            message = f"the cluster accepts {limit} tokens at once; with this request it would be {asked}"
        case Refusal.DEADLINE:
            message = f"the predicted wait of {asked} ms is beyond the deadline of {limit} ms"
        case Refusal.NO_CAPACITY_KNOWN:
            return Unavailable("no worker has reported yet", retry_after_s=retry_after_s)
        case Refusal.STORE_FULL:
            return Unavailable("the request store is full", retry_after_s=retry_after_s)
    return Overloaded(message, retry_after_s=retry_after_s)
