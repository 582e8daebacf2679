"""Values of several shapes in OpenAI's bodies, taken apart by hand: a refusal then names one place in them."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from router.admission.call import Prompt, TextPrompt, TokenPrompt

MAX_ID_DIGITS = 10


def prompt_of(prompt: object) -> Prompt:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise InvalidRequest("prompt is a list of several prompts: send one request for each", field="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a string or a list of token ids", field="prompt")
    return TokenPrompt(token_ids_of(prompt, "prompt"))


def token_ids_of(items: list[Any], field: str) -> tuple[int, ...]:
    for i, token in enumerate(items):
        # Python would take a minute, or refuse, to print an integer of a million digits in a message.
        if type(token) is not int or not -(2**63) <= token < 2**63:
            raise InvalidRequest(f"{field}[{i}] must be a token id, a whole number", field=f"{field}[{i}]")
    return tuple(items)


def stops_of(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list):
        return tuple(stop)  # its items are checked with the other sampling parameters
    raise InvalidRequest("stop must be a string or a list of strings", field="stop")


def biases_of(biases: object) -> tuple[tuple[int, float], ...]:
    """OpenAI writes ids as JSON's keys, which are strings. Bounds are checked with the other sampling parameters."""
    if biases is None:
        return ()
    if not isinstance(biases, dict):
        raise InvalidRequest("logit_bias must map token ids to numbers", field="logit_bias")
    return tuple(sorted((_id_of(key), _bias(key, value)) for key, value in biases.items()))


def _id_of(key: str) -> int:
    # One way to write an id, so that none comes twice.
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS and key == str(int(key))):
        raise InvalidRequest(f"logit_bias has the key {key[:32]!r}, which is no token id", field="logit_bias")
    return int(key)


def _bias(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"logit_bias[{key}] must be a number", field="logit_bias")
    return value
