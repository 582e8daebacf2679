"""`headrace chat` and `headrace generate`: the Python client with a terminal around it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.output import JsonOption, NameOption, err, out, print_json, report_failure
from cluster.environment import state_folder
from cluster.errors import OperatorError
from cluster.ports import reachable_host
from cluster.state import StateFolder
from headrace.errors import HeadraceError, InvalidRequest

if TYPE_CHECKING:
    from headrace.client import Client, Stream

CHAT_HELP = """
Talk to the model; answers stream as they are made.

With a message it answers once. Without one it is a conversation: Ctrl-C stops an answer, /new starts afresh,
Ctrl-D ends it.

[bold]Examples[/bold]

  headrace chat

  headrace chat "Why does a water wheel turn?" --max-tokens 100

  headrace chat --system "Answer in French." --temperature 0

  headrace chat "Hello" --json
"""
GENERATE_HELP = """
Continue a text.

The model gets the text as it is, without its chat template; for questions use `headrace chat`.

[bold]Examples[/bold]

  headrace generate "Here is the English alphabet: ABC" --max-tokens 16 --temperature 0

  headrace generate "1, 2, 3," --stop 7 --json

  echo "Once upon a time" | headrace generate -
"""

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
"""What has a flag of its name; the rest of a request comes from arguments and standard input."""
_NEW, _EXIT = "/new", ("/exit", "/quit")
_UNPRINTABLE = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters a model might write must not steer the terminal."""

AddressOption = Annotated[
    str | None, typer.Option("--address", help="host:port of a router; unset: the cluster --name on this machine.")
]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Most output tokens.", show_default=False)]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; unset: 1.", show_default=False)
]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Nucleus share, above 0 to 1.", show_default=False)]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Most candidates; 0: no limit.", show_default=False)]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.", show_default=False)]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="Ends the text before it; may be repeated.")]


def chat(
    message: Annotated[str | None, typer.Argument(help="One message; '-' reads it from standard input.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message before the conversation.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    name: NameOption = "default",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    sampling = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop)
    history = [{"role": "system", "content": system}] if system is not None else []
    with _connect(address, name) as client:

        def answer(text: str) -> str:
            turns = [*history, {"role": "user", "content": text}]
            answered = _show(lambda: client.chat(turns, **sampling), as_json=as_json)
            history[:] = [*turns, {"role": "assistant", "content": answered}]
            return answered

        if message is not None:
            answer(_text_of(message))
        else:
            _converse(answer, lambda: history.__delitem__(slice(system is not None, None)), quiet=as_json)


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads it from standard input.")],
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    name: NameOption = "default",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    sampling = _given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
        ignore_eos=ignore_eos or None,
    )  # fmt: skip
    text = _text_of(prompt)
    with _connect(address, name) as client:
        _show(lambda: client.generate(text, **sampling), as_json=as_json)


def _given(**parameters: object) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _text_of(argument: str) -> str:
    if argument != "-":
        return argument
    with _utf8_expected():
        # Not `sys.stdin.read()`: what that makes of other bytes depends on the locale.
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")


@contextlib.contextmanager
def _utf8_expected() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as fault:
        raise OperatorError(f"standard input is not UTF-8 text: byte {fault.start} is not") from fault


def _connect(address: str | None, name: str) -> Client:
    from headrace.client import Client

    if address is None:
        folder = StateFolder(state_folder(), name)
        state = folder.read() if folder.is_up() else None
        if state is None:
            raise OperatorError(f"cluster {name!r} is not up; start it with `headrace up` or give --address host:port")
        if state.phase != "ready":
            raise OperatorError(f"cluster {name!r} is {state.phase}; try again in a moment")
        address = f"{reachable_host(state.host)}:{state.grpc_port}"
    return Client(address)


def _show(start: Callable[[], Stream], *, as_json: bool) -> str:
    """Streams one answer to the terminal, or prints it whole as JSON. Returns its text."""
    try:
        return _print_as_json(start()) if as_json else _print_as_text(start())
    except InvalidRequest as error:
        name = (error.field or "").partition("[")[0]
        flag = f"--{name.replace('_', '-')}: " if name in _SAMPLING else ""
        raise OperatorError(f"{flag}{error.message}") from error


def _print_as_json(stream: Stream) -> str:
    began = time.monotonic()
    first_s: float | None = None
    token_ids: list[int] = []
    with stream:
        for delta in stream:
            first_s = time.monotonic() - began if first_s is None else first_s
            token_ids.extend(delta.token_ids)
        text, finished = stream.text(), stream.finished
    assert finished is not None
    result: dict[str, Any] = {
        "request_id": stream.request_id,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finished.reason.value,
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "ttft_s": round(first_s or 0.0, 4),
        "seconds": round(time.monotonic() - began, 4),
    }
    print_json(result)
    return text


def _print_as_text(stream: Stream) -> str:
    """Ctrl-C ends the answer, at the server too, and keeps what came."""
    console = out()
    began, pieces = time.monotonic(), []
    with stream:
        try:
            for delta in stream:
                pieces.append(delta.text)
                shown = delta.text.translate(_UNPRINTABLE) if console.is_terminal else delta.text
                console.print(shown, style="cyan", end="", markup=False, emoji=False, soft_wrap=True)
                console.file.flush()
        except KeyboardInterrupt:
            console.print(" [dim]… stopped[/dim]", end="")
        console.print()
        finished = stream.finished
    if finished is not None and console.is_terminal:
        seconds = time.monotonic() - began
        rate = f"{finished.completion_tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        err().print(
            f"[dim]{finished.completion_tokens} tokens in {seconds:.1f} s, {rate}, {finished.reason.value}[/dim]"
        )
    return "".join(pieces)


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
        with _utf8_expected():
            return input(prompt)
    except (EOFError, KeyboardInterrupt):
        if prompt:
            print()
        return None
