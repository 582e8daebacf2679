"""What `--model` may name: the embedded model, a local folder, a GGUF file, a hub id."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.environment import cache_folder
from cluster.errors import NoSuchModel
from cluster.model_cache.convert import CONVERTER_VERSION, convert_gguf
from cluster.model_cache.embedded import EMBEDDED_NAME, embedded_model
from cluster.model_cache.folders import make_once
from cluster.progress import Progress, silent
from headrace.errors import UnknownModel
from workers.model.weight_files import tensor_numel, weight_files

_EMBEDDED_SPECS = ("", "smollm2", EMBEDDED_NAME.lower())
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]
"""Second copies of the weights, which some publishers add for other programs."""
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ResolvedModel:
    """A local Hugging Face folder and the name clients use for what is in it."""

    path: Path
    name: str


def resolve_model(spec: str | None, cache: Path | None = None, progress: Progress = silent) -> ResolvedModel:
    """The folder for `spec`, downloaded and converted into `cache` (None: the account's cache folder) if need be.

    None or "smollm2" is the embedded model. Raises `NoSuchModel`, in one sentence, for what cannot be had.
    """
    cache = cache_folder() if cache is None else cache
    if spec is None or spec.lower() in _EMBEDDED_SPECS:
        return ResolvedModel(embedded_model(cache, progress), EMBEDDED_NAME)
    path = Path(spec).expanduser()
    if path.is_dir():
        return ResolvedModel(_checked_folder(path.resolve()), path.resolve().name)
    if path.suffix.lower() == ".gguf":
        return _converted(path, cache, progress)
    if path.exists() or spec.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(spec):
        raise NoSuchModel(
            f"no such model: {spec!r} is not a model folder, a .gguf file, a hub id (owner/name) or 'smollm2'"
        )
    return ResolvedModel(_checked_folder(_from_hub(spec, progress)), spec.rpartition("/")[2])


def _checked_folder(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise NoSuchModel(f"{folder} is not a usable model folder: it lacks {', '.join(missing)}")
    try:
        for path in weight_files(folder):
            tensor_numel(path)
    except UnknownModel as error:  # told here, before any worker starts
        raise NoSuchModel(error.message) from error
    return folder


def _converted(gguf: Path, cache: Path, progress: Progress) -> ResolvedModel:
    if not gguf.is_file():
        raise NoSuchModel(f"no such file: {gguf}")
    stat = gguf.stat()
    # The file's identity stands in for its checksum: hashing tens of gigabytes at every start would take minutes.
    identity = f"{gguf.resolve()}/{stat.st_size}/{stat.st_mtime_ns}/{CONVERTER_VERSION}"
    folder_name = f"{gguf.stem}-{hashlib.sha256(str(gguf.resolve()).encode()).hexdigest()[:8]}"
    (cache / "models").mkdir(parents=True, exist_ok=True)
    folder = make_once(cache / "models" / folder_name, identity, lambda made: convert_gguf(gguf, made, progress))
    return ResolvedModel(folder, gguf.stem)


def _from_hub(hub_id: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {hub_id} from the hub", 0, 0)
    try:
        folder = snapshot_download(
            hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED, etag_timeout=_HUB_TIMEOUT_S
        )
    except Exception as error:  # the hub client's errors come from several libraries and share no base class
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NoSuchModel(f"cannot get {hub_id!r} from the hub: {why}") from error
    return Path(folder)
