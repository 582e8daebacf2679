"""Every option of a request reaches the worker as the same sampling parameters, whichever protocol carried it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from headrace.aio import AsyncClient
from headrace.sampling import SamplingParams

COMPLETIONS = "/v1/completions"

OPTIONS: list[tuple[str, Any]] = [
    ("max_tokens", 2),
    ("min_tokens", 1),
    ("temperature", 0.25),
    ("top_p", 0.5),
    ("top_k", 7),
    ("seed", -5),
    ("stop", ["x", "yz"]),
    ("include_stop_str_in_output", True),
    ("stop_token_ids", [299]),
    ("ignore_eos", True),
    ("min_p", 0.125),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 1.25),
    ("logit_bias", {"5": -100, "299": 0.5}),
    ("logprobs", 3),
    ("prompt_logprobs", 0),
]


def as_parameter(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(("name", "value"), OPTIONS)
async def test_an_option_is_one_thing_over_every_protocol(rig: Any, name: str, value: Any) -> None:
    """The official client's own arguments count as well: what it does not know goes into its extra body."""
    asked = {"max_tokens": 2, name: value}
    assert (await rig.post(COMPLETIONS, prompt="ab", **asked)).status_code == 200
    known = {"logit_bias", "logprobs", "presence_penalty", "frequency_penalty", "seed", "stop", "temperature", "top_p",
             "max_tokens"}  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none") as client:
        own = {key: asked[key] for key in asked if key in known}
        extra = {key: asked[key] for key in asked if key not in known}
        await client.completions.create(model="reciter", prompt="ab", **own, extra_body=extra)
    async with AsyncClient(rig.grpc_address) as grpc_client:
        over_grpc = {key: dict(as_parameter(v)) if key == "logit_bias" else v for key, v in asked.items()}
        await grpc_client.generate("ab", **over_grpc).results()
    seen = [request.sampling for request in rig.reciter.requests]
    assert len(seen) == 3
    assert [getattr(sampling, name) for sampling in seen] == [as_parameter(value)] * 3
    others = [field for field in vars(SamplingParams()) if field not in (name, "max_tokens", "seed")]
    default = SamplingParams()
    assert all(getattr(s, field) == getattr(default, field) for s in seen for field in others)


async def test_options_that_are_off_change_nothing(rig: Any) -> None:
    off = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    nulls = dict.fromkeys((*off, "n", "best_of", "priority", "logprobs", "echo", "prompt_logprobs"))
    for body in (off, nulls):
        assert (await rig.post(COMPLETIONS, prompt="ab", max_tokens=1, seed=3, **body)).status_code == 200
    assert [request.sampling for request in rig.reciter.requests] == [SamplingParams(max_tokens=1, seed=3)] * 2


async def test_a_drawn_seed_differs_and_a_given_one_stays(rig: Any) -> None:
    for seed in (None, None, 7, 7):
        await rig.post(COMPLETIONS, prompt="ab", max_tokens=1, seed=seed, n=2)
    seeds = [request.sampling.seed for request in rig.reciter.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [7, 7]
