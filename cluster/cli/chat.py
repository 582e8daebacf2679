"""`headrace chat`: the Python client's `chat` with a terminal around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from cluster.cli.answer import show
from cluster.cli.output import JsonOption, NameOption, err, report_failure
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
    utf8_expected,
)
from cluster.errors import OperatorError
from headrace.errors import HeadraceError

HELP = """
Talk to the model; answers stream as they are made.

With a message it answers once. Without one it is a conversation: Ctrl-C stops an answer, /new starts afresh,
Ctrl-D ends it.

[bold]Examples[/bold]

  headrace chat

  headrace chat "Why does a water wheel turn?" --max-tokens 100

  headrace chat --system "Answer in French." --temperature 0

  headrace chat "Hello" --json
"""

_NEW, _EXIT = "/new", ("/exit", "/quit")


def chat(
    message: Annotated[str | None, typer.Argument(help="One message; '-' reads it from standard input.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message before the conversation.")] = None,
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
    name: NameOption = "default",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    sampling = given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, repetition_penalty=repetition_penalty,
        seed=seed, stop=stop,
    )  # fmt: skip
    history = [{"role": "system", "content": system}] if system is not None else []
    with connect(address, name) as client:

        def answer(text: str) -> str:
            turns = [*history, {"role": "user", "content": text}]
            answered = show(lambda: client.chat(turns, **sampling), as_json=as_json)
            history[:] = [*turns, {"role": "assistant", "content": answered}]
            return answered

        if message is not None:
            answer(text_of(message))
        else:
            _converse(answer, lambda: history.__delitem__(slice(system is not None, None)), quiet=as_json)


def _converse(answer: Callable[[str], str], forget: Callable[[], None], *, quiet: bool) -> None:
    """Reads messages until the end of input. A failed answer is told and the conversation goes on."""
    interactive = sys.stdin.isatty() and not quiet
    if interactive:
        err().print("[dim]Ctrl-C stops an answer, /new starts afresh, Ctrl-D ends the conversation.[/dim]")
    while (line := _read_line("› " if interactive else "")) is not None:
        text = line.strip()
        if text in _EXIT:
            return
        if text == _NEW:
            forget()
        elif text:
            try:
                answer(text)
            except (OperatorError, HeadraceError) as error:
                status = report_failure(error)
                if not interactive:
                    raise typer.Exit(status) from error


def _read_line(prompt: str) -> str | None:
    """One line; None at the end of input. Ctrl-C at the prompt ends the conversation too."""
    try:
        with utf8_expected():
            return input(prompt)
    except (EOFError, KeyboardInterrupt):
        if prompt:
            print()
        return None
