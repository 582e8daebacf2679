"""Every option of a request reaches the worker as the same sampling parameters, whichever protocol carried it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from headrace.aio import AsyncClient
from headrace.errors import InvalidRequest
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


async def test_an_option_is_one_thing_over_every_protocol(rig: Any) -> None:
    """The official client's own arguments count as well: what it does not know goes into its extra body."""
    known = {"logit_bias", "logprobs", "presence_penalty", "frequency_penalty", "seed", "stop", "temperature", "top_p",
             "max_tokens"}  # fmt: skip
    default = SamplingParams()
    async with (
        openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none") as official,
        AsyncClient(rig.grpc_address) as client,
    ):
        for name, value in OPTIONS:
            rig.reciter.requests.clear()
            asked = {"max_tokens": 2, name: value}
            assert (await rig.post(COMPLETIONS, prompt="ab", **asked)).status_code == 200, name
            own = {key: asked[key] for key in asked if key in known}
            extra = {key: asked[key] for key in asked if key not in known}
            await official.completions.create(model="reciter", prompt="ab", **own, extra_body=extra)
            over_grpc = {key: dict(as_parameter(v)) if key == "logit_bias" else v for key, v in asked.items()}
            await client.generate("ab", **over_grpc).results()
            seen = [request.sampling for request in rig.reciter.requests]
            assert [getattr(sampling, name) for sampling in seen] == [as_parameter(value)] * 3, name
            others = [field for field in vars(default) if field not in (name, "max_tokens", "seed")]
            assert all(getattr(s, field) == getattr(default, field) for s in seen for field in others), name


OUT_OF_BOUNDS: list[tuple[str, Any, str]] = [
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 513, "max_tokens"),
    ("max_tokens", 2**40, "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 3, "min_tokens"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 101, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -2, "top_k"),
    ("stop", [""], "stop[0]"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", ["ok", "x" * 257], "stop[1]"),
    ("stop_token_ids", [5, 300], "stop_token_ids[1]"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [1] * 65, "stop_token_ids"),
    ("min_p", -0.5, "min_p"),
    ("min_p", 1.5, "min_p"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("presence_penalty", -2.5, "presence_penalty"),
    ("frequency_penalty", 2.5, "frequency_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 10.5, "repetition_penalty"),
    ("logit_bias", {300: 1.0}, "logit_bias"),
    ("logit_bias", {5: 100.5}, "logit_bias"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", -1, "logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("n", 0, "n"),
    ("n", -3, "n"),
    ("n", 129, "n"),
    ("best_of", 129, "best_of"),
    ("best_of", 0, "best_of"),
    ("priority", -1, "priority"),
    ("priority", 8, "priority"),
]


async def test_a_value_out_of_bounds_is_named_the_same_over_both_protocols(rig: Any) -> None:
    """Nothing is clamped, nothing reaches the store, and no stream begins."""
    async with AsyncClient(rig.grpc_address) as client:
        for name, value, field in OUT_OF_BOUNDS:
            asked = {"max_tokens": 2, name: value}
            as_json = {str(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
            for stream in (False, name not in ("best_of", "prompt_logprobs")):
                response = await rig.post(COMPLETIONS, prompt="ab", stream=stream, **{**asked, name: as_json})
                assert (response.status_code, response.json()["error"]["param"]) == (400, field), (name, value)
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("ab", **asked).results()
            assert caught.value.field == field, (name, value)
    assert rig.reciter.requests == []


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
