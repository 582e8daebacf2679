"""`headrace down`."""

from __future__ import annotations

import time

from cluster.cli.output import JsonOption, NameOption, out, print_json
from cluster.environment import state_folder
from cluster.errors import StartFailed
from cluster.launch import end_cluster
from cluster.state import StateFolder

HELP = """
End a cluster: everything `headrace up` has started, and nothing else.

Workers hand their work back first, so an external Redis keeps what was accepted. Does nothing if the cluster is not up.
"""


def down(name: NameOption = "default", as_json: JsonOption = False) -> None:
    folder = StateFolder(state_folder(), name)
    began = time.monotonic()
    state = end_cluster(folder)
    if folder.is_up():
        raise StartFailed(f"cluster {name!r} did not end; see {folder.log}")
    seconds = time.monotonic() - began
    if as_json:
        print_json({"name": name, "was_up": state is not None, "seconds": round(seconds, 2)})
    elif state is None:
        out().print(f"cluster {name!r} is not up")
    else:
        out().print(f"cluster {name!r} has ended ({seconds:.1f} s)")
