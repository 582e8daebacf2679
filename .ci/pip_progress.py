"""One moving line instead of pip's pages: packages looked at, then the step it is in; errors in full.

`pip install … 2>&1 | python3 .ci/pip_progress.py TOTAL`, standard library only: it runs before anything is installed.
"""

import sys

total, seen = int(sys.argv[1]), 0


def show(what: str) -> None:
    print(f"\r  {seen:3d} of about {total} packages  {what:<44.44}", end="", flush=True)


for line in iter(sys.stdin.readline, ""):
    first, _, rest = line.strip().partition(" ")
    if first == "Collecting":
        seen += 1
        show(rest)
    elif first == "Downloading":
        show(f"downloading {rest}")
    elif line.startswith("Installing collected"):
        show("unpacking")
    elif first.upper().startswith("ERROR"):
        print(f"\n{line.strip()}", end="")
print()
