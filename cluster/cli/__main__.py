"""`python -m cluster.cli` is `headrace`."""

from __future__ import annotations

from cluster.cli import main

main()
