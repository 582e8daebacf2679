"""What the CLI hands to a supervisor. Apart from both, so that the CLI need not import what the supervisor does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One cluster to be. `attached`: end when the CLI that started it goes away."""

    settings: dict[str, Any]
    model_path: str
    model_name: str
    state_root: str
    ray_address: str | None
    attached: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Launch:
        return cls(**json.loads(text))
