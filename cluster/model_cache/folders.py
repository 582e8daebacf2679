"""Folders that are made once: locked while in the making, renamed into place when complete, checked when reused."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "headrace-manifest.json"
MANIFEST_FORMAT = 1
_HASH_CHUNK_BYTES = 1 << 20


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`; the kernel frees it if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_intact(folder: Path, recipe: str) -> bool:
    """Whether `folder` was made by this `recipe` and its files are those that were written.

    Sizes are always compared. Contents are hashed only where the modification time is not the recorded one, so a
    usual start costs a few `stat` calls and a copied or touched folder one reading.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != MANIFEST_FORMAT or manifest["recipe"] != recipe:
            return False
        return all(_file_intact(folder / name, entry) for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _file_intact(path: Path, entry: dict[str, Any]) -> bool:
    stat = path.stat()
    if stat.st_size != entry["size_bytes"]:
        return False
    return stat.st_mtime_ns == entry["mtime_ns"] or file_sha256(path) == entry["sha256"]


def make_once(folder: Path, recipe: str, fill: Callable[[Path], None]) -> Path:
    """Returns `folder`, intact; runs `fill(empty folder)` first if it is not there or not intact.

    `recipe` names how it is made (source and converter version): another recipe means another folder content.
    Whatever `fill` raises passes through and leaves nothing behind.
    """
    if is_intact(folder, recipe):
        return folder
    with locked(folder.parent / f".{folder.name}.lock"):
        if is_intact(folder, recipe):  # another process made it while this one waited for the lock
            return folder
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            fill(scratch)
            _write_manifest(scratch, recipe)
            scratch.chmod(0o755)
            _replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_manifest(folder: Path, recipe: str) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        stat = path.stat()
        files[path.name] = {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": file_sha256(path)}
    manifest = {"format": MANIFEST_FORMAT, "recipe": recipe, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _replace(scratch: Path, folder: Path) -> None:
    """A rename cannot replace a folder that is not empty, so a damaged one first steps aside."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(aside / "old")
        shutil.rmtree(aside, ignore_errors=True)
    scratch.rename(folder)
