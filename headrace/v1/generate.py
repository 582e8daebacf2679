"""Makes the committed stubs from inference.proto: `python headrace/v1/generate.py [--check]`.

The stubs are written by an *old* compiler on purpose: code from grpcio-tools 1.62.3 runs on protobuf 4.25 and
everything after it, newer compilers shut older runtimes out. It lives in a virtual environment of its own, under the
user's cache folder, because it would hold protobuf back here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TOOLS = "grpcio-tools==1.62.3"
# grpcio-tools 1.62 imports pkg_resources, which setuptools 81 dropped.
NEEDS = (TOOLS, "setuptools<81")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROTO = "headrace/v1/inference.proto"
OUTPUTS = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")
INSTALL_TIMEOUT_S = 300.0
COMPILE_TIMEOUT_S = 60.0


def compiler() -> Path:
    """The Python that has the tools; its environment is made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "headrace" / f"protoc-{TOOLS.partition('==')[2]}-py{sys.version_info[0]}{sys.version_info[1]}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.is_file():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *NEEDS],
            check=True,
            timeout=INSTALL_TIMEOUT_S,
        )
        ready.touch()
    return python


def generate(into: Path) -> None:
    """Writes the stubs under `into`, at their import path."""
    arguments = [f"-I{ROOT}", f"--python_out={into}", f"--pyi_out={into}", f"--grpc_python_out={into}", PROTO]
    subprocess.run(
        [str(compiler()), "-W", "ignore", "-m", "grpc_tools.protoc", *arguments],
        check=True,
        cwd=ROOT,
        timeout=COMPILE_TIMEOUT_S,
    )


def stale() -> list[str]:
    """Names of committed stubs that regenerating would change."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "headrace" / "v1"
        return [n for n in OUTPUTS if not (HERE / n).is_file() or (HERE / n).read_bytes() != (fresh / n).read_bytes()]


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        changed = stale()
        if changed:
            print(
                f"stubs do not match {PROTO}: {', '.join(changed)}; run python headrace/v1/generate.py", file=sys.stderr
            )
        return 1 if changed else 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
