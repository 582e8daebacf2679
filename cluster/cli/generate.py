"""`headrace generate`: the Python client's `generate` with a terminal around it."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.answer import show
from cluster.cli.output import JsonOption, NameOption
from cluster.cli.request import (
    AddressOption,
    FrequencyOption,
    MaxTokensOption,
    MinPOption,
    PresenceOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    connect,
    given,
    text_of,
)

HELP = """
Continue a text.

The model gets the text as it is, without its chat template; for questions use `headrace chat`.

[bold]Examples[/bold]

  headrace generate "Here is the English alphabet: ABC" --max-tokens 16 --temperature 0

  headrace generate "1, 2, 3," --stop 7 --json

  headrace generate "Write one word:" --n 4 --seed 7

  echo "Once upon a time" | headrace generate -
"""


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads it from standard input.")],
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    presence_penalty: PresenceOption = None,
    frequency_penalty: FrequencyOption = None,
    repetition_penalty: RepetitionOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    n: Annotated[int, typer.Option("--n", help="Choices to write.")] = 1,
    best_of: Annotated[
        int | None, typer.Option("--best-of", help="Write so many, show the --n likeliest.", show_default=False)
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="With --json: tell so many likeliest tokens.", show_default=False)
    ] = None,
    name: NameOption = "default",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    sampling = given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, repetition_penalty=repetition_penalty,
        seed=seed, stop=stop, ignore_eos=ignore_eos or None, logprobs=logprobs,
    )  # fmt: skip
    text = text_of(prompt)
    with connect(address, name) as client:
        show(lambda: client.generate(text, n=n, best_of=best_of, **sampling), as_json=as_json, choices=n)
