"""`headrace up`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from cluster.cli.output import JsonOption, err, out, print_json
from cluster.cli.progress import model_progress
from cluster.cli.start_display import StartDisplay
from cluster.environment import ray_address, state_folder
from cluster.errors import AlreadyUp, OperatorError, StartFailed
from cluster.launch import RunningSupervisor, supervisor
from cluster.launch_order import Launch
from cluster.ports import reachable_host, require_free
from cluster.settings import Settings, describe
from cluster.state import StateFolder

HELP = """
Start a cluster: Redis, Ray, workers and a router, and wait until every worker has run a real forward pass.

Without --detach it stays in the foreground and Ctrl-C ends the cluster.

[bold]Examples[/bold]

  headrace up                                        the embedded model, here, until Ctrl-C

  headrace up --detach --workers 2                   in the background; `headrace down` ends it

  headrace up --model ./my-model --dtype bfloat16    a Hugging Face folder (or model.gguf, or owner/name)

  headrace up --redis rediss://user:secret@redis.example:6380/0

  headrace up --name second --grpc-port 50052 --http-port 8001

With RAY_ADDRESS set, it joins that Ray cluster instead of starting one of its own.
"""


def _option(name: str) -> Any:
    default = Settings.model_fields[name].default
    shown = "" if default is None else f" Default: {default}."
    return typer.Option(f"--{name.replace('_', '-')}", help=describe(name) + shown, show_default=False)


def _switch(name: str) -> Any:
    flag = name.replace("_", "-")
    shown = "on" if Settings.model_fields[name].default else "off"
    return typer.Option(f"--{flag}/--no-{flag}", help=f"{describe(name)} Default: {shown}.", show_default=False)


def up(
    model: Annotated[str | None, _option("model")] = None,
    workers: Annotated[int | None, _option("workers")] = None,
    dtype: Annotated[str | None, _option("dtype")] = None,
    kv_blocks: Annotated[int | None, _option("kv_blocks")] = None,
    kv_mib: Annotated[int | None, _option("kv_mib")] = None,
    block_size: Annotated[int | None, _option("block_size")] = None,
    max_context: Annotated[int | None, _option("max_context")] = None,
    chunk_tokens: Annotated[int | None, _option("chunk_tokens")] = None,
    max_sequences: Annotated[int | None, _option("max_sequences")] = None,
    policy: Annotated[str | None, _option("policy")] = None,
    capacity: Annotated[str | None, _option("capacity")] = None,
    itl_ms: Annotated[int | None, _option("itl_ms")] = None,
    prefix_cache: Annotated[bool | None, _switch("prefix_cache")] = None,
    host_kv_mib: Annotated[int | None, _option("host_kv_mib")] = None,
    row_invariant: Annotated[bool | None, _switch("row_invariant")] = None,
    step_log: Annotated[str | None, _option("step_log")] = None,
    attention: Annotated[str | None, _option("attention")] = None,
    threads: Annotated[int | None, _option("threads")] = None,
    gpu_memory: Annotated[float | None, _option("gpu_memory")] = None,
    redis: Annotated[str | None, _option("redis")] = None,
    host: Annotated[str | None, _option("host")] = None,
    grpc_port: Annotated[int | None, _option("grpc_port")] = None,
    http_port: Annotated[int | None, _option("http_port")] = None,
    tenant_cap_tokens: Annotated[int | None, _option("tenant_cap_tokens")] = None,
    global_cap_tokens: Annotated[int | None, _option("global_cap_tokens")] = None,
    result_ttl_s: Annotated[int | None, _option("result_ttl_s")] = None,
    start_timeout_s: Annotated[int | None, _option("start_timeout_s")] = None,
    name: Annotated[str | None, _option("name")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when the cluster is ready; it stays up.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    flags = {flag: value for flag, value in locals().items() if flag not in ("detach", "as_json")}
    settings = Settings.resolve(flags)
    folder = StateFolder(state_folder(), settings.name)
    if folder.is_up():
        raise AlreadyUp(folder.already_up())
    # Told now rather than after a long download; the supervisor proves it again.
    require_free(settings.host, settings.grpc_port, "--grpc-port")
    require_free(settings.host, settings.http_port, "--http-port")
    launch = _launch(settings, attached=not detach)
    with _interrupts_as_one(), supervisor(launch, folder) as running:
        try:
            state = StartDisplay(err()).follow(running.events, folder.log)
        except BaseException:
            running.end()
            raise
        print_json(state) if as_json else _tell(state, detached=detach)
        if not detach:
            _stay(running)


def _launch(settings: Settings, *, attached: bool) -> Launch:
    from cluster.model_cache import resolve_model

    with model_progress(err()) as progress:
        model = resolve_model(settings.model, progress=progress)
    _check_context(settings, model.path)
    return Launch(
        settings=settings.model_dump(),
        model_path=str(model.path),
        model_name=model.name,
        state_root=str(state_folder()),
        ray_address=ray_address(),
        attached=attached,
    )


def _check_context(settings: Settings, model_path: Path) -> None:
    """Told now rather than by every worker after it has loaded its weights."""
    from headrace.tokenizer import Tokenizer

    if settings.max_context is not None and settings.max_context > (most := Tokenizer.load(model_path).max_context):
        raise OperatorError(f"--max-context is {settings.max_context}, more than the model's own {most} tokens")


def _tell(state: dict[str, Any], *, detached: bool) -> None:
    host, name = reachable_host(state["host"]), state["name"]
    which = "" if name == "default" else f" --name {name}"
    lines = [
        f"[bold green]{state['model']} is up[/bold green] on {state['workers']} worker{'s' * (state['workers'] > 1)}",
        f"  gRPC   {host}:{state['grpc_port']}",
        f"  HTTP   http://{host}:{state['http_port']}/v1",
        f"  try    headrace chat{which}",
        f"  end    {f'headrace down{which}' if detached else 'Ctrl-C'}",
    ]
    for line in lines:
        out().print(line)


def _stay(running: RunningSupervisor) -> None:
    """Until Ctrl-C, or until the cluster ends by itself, which is a failure unless `headrace down` did it."""
    try:
        for event in running.events:
            if event.kind == "failed":
                raise StartFailed(event.text)
            err().print(f"[yellow]{event.text}[/yellow]")
    except KeyboardInterrupt:
        err().print("ending the cluster …")
    finally:
        running.end()


@contextmanager
def _interrupts_as_one() -> Iterator[None]:
    """A closed terminal or a SIGTERM ends a foreground cluster in order, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
