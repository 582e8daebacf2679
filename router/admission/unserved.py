"""What a call may say and no worker does yet: refused by its name, over every protocol, before anything is computed."""

from __future__ import annotations

from headrace.errors import InvalidRequest
from headrace.sampling import SamplingParams
from router.admission.call import Call

UNSERVED = ("prompt_logprobs",)
"""Sampling parameters that may only have their default."""

_OFF = SamplingParams()


def check_served(call: Call) -> None:
    """Raises InvalidRequest naming the first option that nobody would carry out."""
    for name in UNSERVED:
        if getattr(call.sampling, name) != getattr(_OFF, name):
            raise InvalidRequest(f"{name} is not supported yet", field=name)
