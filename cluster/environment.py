"""The only place that reads `HEADRACE_*` variables and the folders of the user's account."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import OperatorError

PREFIX = "HEADRACE_"
_FOLDERS = ("CACHE", "STATE")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where models are kept: $HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if chosen := environment.get(PREFIX + "CACHE"):
        return Path(chosen).expanduser().resolve()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where running clusters leave their state, logs and Redis data, one folder per cluster name:
    $HEADRACE_STATE, else $XDG_STATE_HOME/headrace, else ~/.local/state/headrace."""
    if chosen := environment.get(PREFIX + "STATE"):
        return Path(chosen).expanduser().resolve()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "headrace"


def ray_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """The Ray cluster to join, from Ray's own variable; None: start a private one."""
    return environment.get("RAY_ADDRESS") or None


def settings_from(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The settings `names` as the environment gives them, as text. Raises `OperatorError` for an unknown HEADRACE_*."""
    known = {PREFIX + name.upper(): name for name in names}
    folders = {PREFIX + name for name in _FOLDERS}
    unknown = [v for v in environment if v.startswith(PREFIX) and v not in known and v not in folders]
    if unknown:
        raise OperatorError(f"{sorted(unknown)[0]} is not a setting; known are {', '.join(sorted([*known, *folders]))}")
    return {name: environment[variable] for variable, name in known.items() if environment.get(variable)}
