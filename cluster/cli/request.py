"""What `headrace chat` and `headrace generate` share before the answer: flags, standard input, whom to ask."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.environment import state_folder
from cluster.errors import OperatorError
from cluster.ports import reachable_host
from cluster.state import StateFolder

if TYPE_CHECKING:
    from headrace.client import Client

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
MinPOption = Annotated[
    float | None, typer.Option("--min-p", help="Least share of the likeliest token's probability.", show_default=False)
]
PresenceOption = Annotated[
    float | None, typer.Option("--presence-penalty", help="-2 to 2; once per token said.", show_default=False)
]
FrequencyOption = Annotated[
    float | None, typer.Option("--frequency-penalty", help="-2 to 2; each time it was said.", show_default=False)
]
RepetitionOption = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1 discourages what prompt or output say.", show_default=False),
]


def given(**parameters: object) -> dict[str, Any]:
    """Only what the user set is sent."""
    return {name: value for name, value in parameters.items() if value is not None}


def text_of(argument: str) -> str:
    if argument != "-":
        return argument
    with utf8_expected():
        # Not `sys.stdin.read()`: what that makes of other bytes depends on the locale.
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")


@contextlib.contextmanager
def utf8_expected() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as fault:
        raise OperatorError(f"standard input is not UTF-8 text: byte {fault.start} is not") from fault


def connect(address: str | None, name: str) -> Client:
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
