"""Which files hold a model, and what is told of those that are missing, damaged or not the model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import InvalidRequest, UnknownModel
from tests.fixtures.tiny_models import FAMILIES, write_model
from workers.config import EngineConfig
from workers.model.identity import weight_version
from workers.model.packing import can_pack
from workers.model.weight_files import INDEX, SINGLE, tensor_numel, weight_files
from workers.model.weights import LoadedModel, load_model

SHARD = "40KB"


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(EngineConfig(str(folder), "tiny", dtype=dtype, threads=1))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    return write_model("llama", folder)


def sharded(name: str, folder: Path) -> Path:
    """The same weights as `write_model` makes, in several files and an index."""
    from transformers import AutoModelForCausalLM

    whole = folder / "whole"
    whole.mkdir()
    model = AutoModelForCausalLM.from_pretrained(write_model(name, whole), dtype=torch.float32)
    model.save_pretrained(folder / "sharded", max_shard_size=SHARD)
    return folder / "sharded"


@pytest.mark.parametrize("name", ["llama", "llama-mha-tied", "gpt2", "mixtral"])
def test_shards_are_the_whole_model(tmp_path: Path, name: str) -> None:
    folder = sharded(name, tmp_path)
    files = weight_files(folder)
    assert len(files) > 2
    assert {path.name for path in files} == set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    assert sum(map(tensor_numel, files)) == tensor_numel(tmp_path / "whole" / SINGLE)
    ours, wanted = load(folder).module.state_dict(), load(tmp_path / "whole").module.state_dict()
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[key], wanted[key]) for key in wanted)


def test_a_second_copy_of_the_weights_beside_the_shards_does_not_count(tmp_path: Path) -> None:
    folder = sharded("llama", tmp_path)
    before, version = weight_files(folder), weight_version(folder)
    shutil.copy(tmp_path / "whole" / SINGLE, folder / "consolidated.safetensors")
    assert weight_files(folder) == before
    assert weight_version(folder) == version


def test_what_is_counted_is_what_the_model_has(single: Path) -> None:
    counted = tensor_numel(single / SINGLE)
    assert counted == sum(parameter.numel() for parameter in load(single).module.parameters())


def cut(folder: Path) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-1])


def spoil(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not json, though")


def only_pickled(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def other_name(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "weights.safetensors")


def index(names: object) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / SINGLE).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps(names))

    return replace


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, r"model\.safetensors is cut short: \d+ bytes of \d+"),
        (spoil, r"model\.safetensors is not a safetensors file"),
        (only_pickled, r"no \*\.safetensors weights \(pytorch_model\.bin is pickled, which is never loaded\)"),
        (other_name, r"weights\.safetensors is named by no model\.safetensors\.index\.json"),
        (index({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}), r"lacks b\.safetensors, which .*index"),
        (index({"weight_map": {"x": "../a.safetensors"}}), "names files that are not in its folder"),
        (index({"weight_map": {}}), "names files that are not in its folder"),
        (index([]), "is not an index of weights"),
        (index({"weights": {}}), "is not an index of weights"),
    ],
)
def test_files_that_are_missing_or_damaged_are_named(
    single: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(single)
    with pytest.raises(UnknownModel, match=sentence) as raised:
        load(single)
    assert raised.value.field == "model"


def test_a_missing_tensor_is_not_made_up(single: Path) -> None:
    """transformers would initialise it at random, warn, and serve."""
    tensors = load_file(single / SINGLE)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, single / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight and 1 more"):
        load(single)


def test_a_tensor_of_another_shape_is_not_made_up(single: Path) -> None:
    tensors = load_file(single / SINGLE)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, single / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"have other shapes than its config\.json says"):
        load(single)


def mapped(folder: Path) -> bool:
    """Whether a file of `folder` lies in this process's memory map."""
    return str(folder.resolve()) in Path("/proc/self/maps").read_text()


def test_weights_stay_in_their_memory_mapped_file(single: Path) -> None:
    model = load(single)
    assert mapped(single)
    del model
    assert not mapped(single)


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.bfloat16), reason="this CPU does not multiply bfloat16")
def test_packed_weights_let_go_of_the_file(tmp_path: Path) -> None:
    """Else the weights would be in memory twice: as packed, and as mapped."""
    folder = write_model("llama-mha-tied", tmp_path, dtype=torch.bfloat16)
    model = load(folder, "bfloat16")
    assert not mapped(folder)
    assert model.module.model.embed_tokens.weight.shape[0] == FAMILIES["llama"].config().vocab_size  # type: ignore[union-attr]
