"""How `headrace chat` and `headrace generate` show an answer: as it streams, choice by choice, or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.cli.output import err, out, print_json
from cluster.errors import OperatorError
from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.answer import Output
    from headrace.client import Stream
    from headrace.events import Finished
    from headrace.logprobs import TokenLogprob

_FLAGS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "n", "best_of", "logprobs",
)  # fmt: skip
"""What has a flag of its name; the rest of a request comes from arguments and standard input."""
_UNPRINTABLE = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters a model might write must not steer the terminal."""


def show(start: Callable[[], Stream], *, as_json: bool, choices: int = 1) -> str:
    """Streams one answer to the terminal, or prints it whole as JSON. Returns the text of its first choice."""
    try:
        if as_json:
            return _print_as_json(start())
        return _print_as_text(start()) if choices == 1 else _print_choices(start())
    except InvalidRequest as error:
        name = (error.field or "").partition("[")[0]
        flag = f"--{name.replace('_', '-')}: " if name in _FLAGS else ""
        raise OperatorError(f"{flag}{error.message}") from error


def _print_as_json(stream: Stream) -> str:
    """One choice: its fields stand in the object itself; several: in a list."""
    began = time.monotonic()
    first_s: float | None = None
    with stream:
        for _ in stream:
            first_s = time.monotonic() - began if first_s is None else first_s
        outputs = stream.results()
    told = [_as_json(output) for output in outputs]
    result: dict[str, Any] = {
        "request_id": stream.request_id,
        **(told[0] if len(told) == 1 else {"choices": told}),
        "prompt_tokens": stream.accepted.prompt_tokens,
        "ttft_s": round(first_s or 0.0, 4),
        "seconds": round(time.monotonic() - began, 4),
    }
    print_json(result)
    return outputs[0].text


def _as_json(output: Output) -> dict[str, Any]:
    finished = _ended(output)
    told: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": finished.reason.value,
        "completion_tokens": finished.completion_tokens,
    }
    if output.logprobs:
        told["logprobs"] = [_logprob_as_json(one) for one in output.logprobs]
    return told


def _logprob_as_json(one: TokenLogprob) -> dict[str, Any]:
    """A token of which none is known has null: JSON has no NaN."""
    return {"logprob": one.logprob if one.rank else None, "rank": one.rank, "top": one.top}


def _ended(output: Output) -> Finished:
    assert output.finished is not None, "a stream read to its end has an end for every choice"
    return output.finished


def _print_as_text(stream: Stream) -> str:
    """Ctrl-C ends the answer, at the server too, and keeps what came."""
    console = out()
    began, pieces = time.monotonic(), []
    with stream:
        try:
            for delta in stream:
                pieces.append(delta.text)
                _print(console, delta.text, end="")
        except KeyboardInterrupt:
            console.print(" [dim]… stopped[/dim]", end="")
        console.print()
        finished = stream.finished
    if finished is not None and console.is_terminal:
        _print_counts(finished.completion_tokens, time.monotonic() - began, finished.reason.value)
    return "".join(pieces)


def _print_choices(stream: Stream) -> str:
    """Whole, one after the other: they are written at the same time, and mixed they could not be read."""
    console = out()
    began = time.monotonic()
    with stream:
        outputs = stream.results()
    for output in outputs:
        console.print(f"[dim]{output.choice}, {_ended(output).reason.value}:[/dim]")
        _print(console, output.text, end="\n")
    if console.is_terminal:
        tokens = sum(_ended(output).completion_tokens for output in outputs)
        _print_counts(tokens, time.monotonic() - began, f"{len(outputs)} choices")
    return outputs[0].text


def _print(console: Console, text: str, *, end: str) -> None:
    shown = text.translate(_UNPRINTABLE) if console.is_terminal else text
    console.print(shown, style="cyan", end=end, markup=False, emoji=False, soft_wrap=True)
    console.file.flush()


def _print_counts(tokens: int, seconds: float, how: str) -> None:
    rate = f"{tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
    err().print(f"[dim]{tokens} tokens in {seconds:.1f} s, {rate}, {how}[/dim]")
