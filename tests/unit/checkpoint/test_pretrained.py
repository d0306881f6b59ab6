"""Which tensor of a folder is which of the model's, and what is wrong with a folder."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from composer_fsdp2.checkpoint.pretrained import (
    PretrainedWeights,
    StoredTensor,
    find_keys,
    read_folder,
)
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.plan.module_tree import ModuleTree
from tests.support.models import TinyLM


def folder_of(
    *keys: str, shape: tuple[int, ...] = (2,), dtype: str = "F32"
) -> dict[str, StoredTensor]:
    return dict.fromkeys(keys, StoredTensor(Path("model.safetensors"), shape, dtype))


def model_of(*names: str, tied: bool = False, **facts: Any) -> nn.Module:
    """A model with parameters of these names; `tied` makes the last two one parameter."""
    model = nn.Module()
    param = nn.Parameter(torch.zeros(2))
    for number, name in enumerate(names):
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        if not (tied and number == len(names) - 1):
            param = nn.Parameter(torch.zeros(2))
        module.register_parameter(last, param)
    for name, value in facts.items():
        setattr(model, name, value)
    return model


def keys_of(folder: dict[str, StoredTensor], model: nn.Module) -> dict[str, str]:
    return find_keys("/folder", folder, ModuleTree.read(model))[0]


def error_of(call: Any, *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*args)
    return str(caught.value)


# --- Names. ---

LM = ("model.layers.0.w", "model.norm.w", "lm_head.w")
BASE = ("layers.0.w", "norm.w")


def wrapped(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"model.{name}" for name in names)


@pytest.mark.parametrize("wrap", [tuple, wrapped])
def test_the_same_names_in_a_wrapper_or_not(wrap):
    names = wrap(LM)
    tree = ModuleTree.read(model_of(*names, base_model_prefix="model"))
    keys, skipped = find_keys("/folder", folder_of(*LM), tree)
    assert keys == dict(zip(names, LM, strict=True))
    assert skipped == []


@pytest.mark.parametrize("wrap", [tuple, wrapped])
def test_a_model_with_a_head_from_a_base_models_folder(wrap):
    names = wrap(LM)
    model = model_of(*names, base_model_prefix="model", tied=True)
    assert keys_of(folder_of(*BASE), model) == dict(zip(names, (*BASE, "norm.w"), strict=True))


@pytest.mark.parametrize("wrap", [tuple, wrapped])
def test_a_base_model_from_a_folder_with_a_head(wrap):
    names = wrap(BASE)
    tree = ModuleTree.read(model_of(*names, base_model_prefix="model"))
    keys, skipped = find_keys("/folder", folder_of(*LM), tree)
    assert keys == dict(zip(names, LM[:2], strict=True))
    assert skipped == ["lm_head.w"]


def test_without_a_prefix_of_its_own_nothing_is_left_out():
    folder, model = folder_of(*BASE, "lm_head.w"), model_of(*BASE)
    assert "the model has no place for 'lm_head.w'" in error_of(keys_of, folder, model)


@pytest.mark.parametrize("there", [("a.w",), ("b.w",), ("a.w", "b.w")])
def test_one_name_of_a_tie_is_enough(there):
    keys = keys_of(folder_of(*there), model_of("a.w", "b.w", tied=True))
    assert keys == {"a.w": there[0], "b.w": there[0]}


def test_a_tie_without_any_name_is_missing_once():
    model = model_of("c.w", "a.w", "b.w", tied=True)
    assert "it lacks 'a.w'." in error_of(keys_of, folder_of("c.w"), model)


def test_what_old_folders_hold_besides_is_passed_over():
    model = model_of(
        "a.w", base_model_prefix="m", _keys_to_ignore_on_load_unexpected=[r"\.masked_bias$"]
    )
    inner: Any = model.a
    inner.register_buffer("mask", torch.zeros(2), persistent=False)
    assert keys_of(folder_of("a.w", "a.mask", "a.masked_bias"), model) == {"a.w": "a.w"}


def test_what_a_model_wants():
    """Buffers that are saved too, and each name of a tie."""
    model = TinyLM("two modules")
    model.norm.register_buffer("kept", torch.zeros(3, dtype=torch.long))
    model.norm.register_buffer("hidden", torch.zeros(3), persistent=False)
    model.norm.register_buffer("absent", None)
    stored = {
        name: StoredTensor(Path("x"), tuple(value.shape), "F32")
        for name, value in model.state_dict().items()
    }
    stored["norm.kept"] = StoredTensor(Path("x"), (3,), "I64")
    expected = {name: name for name in model.state_dict()}
    assert keys_of(stored, model) == {**expected, "head.weight": "embed.weight"}


# --- What does not fit: everything at once, lists bounded. ---


def test_everything_that_does_not_fit_is_in_one_error():
    folder = folder_of("x.w", "b.w", shape=(3,))
    message = error_of(keys_of, folder, model_of("a.w", "b.w"))
    assert "it lacks 'a.w'; the model has no place for 'x.w'; other shapes" in message
    assert "b.w: [3] F32 in the folder, [2] torch.float32 in the model" in message


def test_long_lists_are_cut():
    names = [f"w{number}" for number in range(30)]
    message = error_of(keys_of, folder_of("x"), model_of(*names))
    assert "it lacks 30 ('w0', " in message
    assert "'w19' and 10 more)" in message
    assert "w20" not in message


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_floats_are_cast(dtype):
    assert keys_of(folder_of("a", dtype=dtype), model_of("a"))


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "F8_E4M3"])
def test_other_kinds_of_number_are_not(dtype):
    assert f"a: [2] {dtype}" in error_of(keys_of, folder_of("a", dtype=dtype), model_of("a"))


# --- Folders. ---


def indexed(folder: Path, weight_map: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_headers_say_it_all(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    save_file(
        {"b": torch.zeros((), dtype=torch.bfloat16), "extra": torch.zeros(1)},
        tmp_path / "2.safetensors",
    )
    found = read_folder(indexed(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}))
    assert {key: (t.file.name, t.shape, t.dtype) for key, t in found.items()} == {
        "a": ("1.safetensors", (2, 3), "F32"),
        "b": ("2.safetensors", (), "BF16"),
    }


def test_one_file_comes_before_an_index(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert set(read_folder(indexed(tmp_path, {"b": "gone"}))) == {"a"}


def test_links_out_of_the_folder_are_fine(tmp_path):
    """The Hugging Face cache is made of them."""
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    assert set(read_folder(tmp_path / "snapshot")) == {"a"}


@pytest.mark.parametrize("name", ["../x.safetensors", "a/../../x", "/etc/x", "..\\x", "", 3, None])
def test_an_index_that_leads_out_of_the_folder(name, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    message = error_of(read_folder, indexed(inner, {"a": name}))
    assert "outside the folder" in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "\x00"])
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "is no index of safetensors" in error_of(read_folder, tmp_path)


def test_an_index_of_what_is_not_there(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors")
    message = error_of(read_folder, indexed(tmp_path, {"b": "1.safetensors"}))
    assert "lack 'b'" in message
    message = error_of(read_folder, indexed(tmp_path, {"b": "2.safetensors"}))
    assert "2.safetensors' is no complete safetensors file" in message


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _long_header(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 2**60) + file.read_bytes()[8:])


def _no_json(file: Path) -> None:
    file.write_bytes(struct.pack("<Q", 4) + b"oops" + b"\0" * 8)


def _pickle(file: Path) -> None:
    torch.save({"a": torch.zeros(2)}, file)


@pytest.mark.parametrize("damage", [_cut, _long_header, _no_json, _pickle, Path.unlink])
def test_damaged_files(damage, tmp_path):
    file = tmp_path / "1.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    damage(file)
    message = error_of(read_folder, indexed(tmp_path, {"a": "1.safetensors"}))
    assert f"'{file}' is no complete safetensors file" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "m.pth"])
def test_pickles_are_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    message = error_of(read_folder, tmp_path)
    assert f"holds '{name}' and no safetensors" in message
    assert "save_pretrained(other_folder)" in message


def test_no_folder_and_an_empty_one(tmp_path):
    assert "is no folder on this machine" in error_of(read_folder, Path("org/name"))
    assert "holds neither model.safetensors nor" in error_of(read_folder, tmp_path)


# --- Reading. ---


def opened(tmp_path: Path, model: nn.Module) -> PretrainedWeights:
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return PretrainedWeights(str(tmp_path), ModuleTree.read(model))


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 4, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.tensor([True, False, True]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("slice_bytes", [2**20, 30])
def test_parts_of_tensors(dtype, slice_bytes, tmp_path, monkeypatch):
    """Read as they are, or cast in slices, down to one row each."""
    monkeypatch.setattr("composer_fsdp2.checkpoint.pretrained._SLICE_BYTES", slice_bytes)
    model = Kinds()
    weights = opened(tmp_path, model)
    assert "weight" in weights
    assert "other" not in weights
    full = model.weight.detach().to(dtype)
    for (start, stop), (left, right) in itertools.product(
        [(0, 6), (1, 4), (5, 6)], [(0, 4), (1, 3)]
    ):
        target = torch.full((stop - start, right - left, 3), 9.0, dtype=dtype)
        weights.read_into(target, "weight", (start, left, 0))
        assert torch.equal(target, full[start:stop, left:right])
    scalar = torch.zeros((), dtype=dtype)
    weights.read_into(scalar, "scale", ())
    assert scalar == 0.5
    weights.read_into(torch.empty(0, 4, 3, dtype=dtype), "weight", (6, 0, 0))


def test_integers_and_booleans(tmp_path):
    model = Kinds()
    weights = opened(tmp_path, model)
    count, mask = torch.zeros((), dtype=torch.long), torch.zeros(2, dtype=torch.bool)
    weights.read_into(count, "count", ())
    weights.read_into(mask, "mask", (1,))
    assert count == 5
    assert mask.tolist() == [False, True]


def test_into_memory_with_gaps(tmp_path):
    model = nn.Linear(3, 4)
    weights = opened(tmp_path, model)
    target = torch.zeros(5, 6)[1:, ::2]
    weights.read_into(target, "weight", (0, 0))
    assert torch.equal(target, model.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_that_shrinks_after_it_was_opened(dtype, tmp_path):
    weights = opened(tmp_path, nn.Linear(3, 4, bias=False))
    _cut(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors'"):
        weights.read_into(torch.zeros(4, 3, dtype=dtype), "weight", (0, 0))


# --- Experts that the model has in one tensor. ---

COUNT, INSIDE, WIDTH = 3, 2, 4


class Merged(nn.Module):
    """Experts of transformers 5."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated = is_transposed, True
        self.gate_up_proj = nn.Parameter(torch.zeros(COUNT, 2 * INSIDE, WIDTH))
        self.down_proj = nn.Parameter(torch.zeros(COUNT, WIDTH, INSIDE))


def model_with(experts: nn.Module) -> nn.Module:
    model, layer, mlp = nn.Module(), nn.Module(), nn.Module()
    mlp.gate, mlp.experts = nn.Linear(WIDTH, COUNT, bias=False), experts
    layer.mlp, model.layer = mlp, layer
    return model


LISTS = {
    "Mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3-MoE": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def lists(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Saves a matrix for each expert; returns the tensors that are made of them."""
    block, *names = LISTS[family]
    sizes = (INSIDE, WIDTH), (INSIDE, WIDTH), (WIDTH, INSIDE)
    parts = [torch.randn(COUNT, *size) for size in sizes]
    gate = torch.randn(COUNT, WIDTH)
    saved = {f"layer.{block}.gate.weight": gate}
    for name, part in zip(names, parts, strict=True):
        for number, one in enumerate(part):
            saved[f"layer.{block}.experts.{number}.{name}.weight"] = one.clone()
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return {
        "layer.mlp.gate.weight": gate,
        "layer.mlp.experts.gate_up_proj": torch.cat(parts[:2], dim=1),
        "layer.mlp.experts.down_proj": parts[2],
    }


@pytest.mark.parametrize("family", LISTS)
def test_merged_experts_are_read_from_the_matrices_of_each(family: str, tmp_path: Path):
    expected = lists(family, tmp_path)
    weights = PretrainedWeights(str(tmp_path), ModuleTree.read(model_with(Merged())))
    assert weights.keys.keys() == expected.keys()
    for name, whole in expected.items():
        for start in itertools.product(*map(range, whole.shape)):
            part = whole[tuple(slice(begin, begin + 2) for begin in start)]
            target = torch.empty(part.shape, dtype=torch.float64)
            weights.read_into(target, name, start)
            assert torch.equal(target, part.double())


def test_experts_that_are_not_known_to_be_merged_so_are_refused(tmp_path: Path):
    lists("Mixtral", tmp_path)
    tree = ModuleTree.read(model_with(Merged(is_transposed=True)))
    said = error_of(PretrainedWeights, str(tmp_path), tree)
    assert "mlp.experts.gate_up_proj" in said
    assert "block_sparse_moe.experts.0.w1.weight" in said


def test_a_matrix_of_an_expert_that_is_missing_is_named(tmp_path: Path):
    lists("Qwen3-MoE", tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    del saved["layer.mlp.experts.1.up_proj.weight"]
    save_file(saved, file, metadata={"format": "pt"})
    tree = ModuleTree.read(model_with(Merged()))
    assert "it lacks 'layer.mlp.experts.gate_up_proj'" in error_of(
        PretrainedWeights, str(tmp_path), tree
    )


def test_experts_with_matrices_of_unequal_shapes_are_not_merged(tmp_path: Path):
    lists("Qwen3-MoE", tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    saved["layer.mlp.experts.1.up_proj.weight"] = torch.zeros(INSIDE, WIDTH + 1)
    save_file(saved, file, metadata={"format": "pt"})
    tree = ModuleTree.read(model_with(Merged()))
    assert "it lacks 'layer.mlp.experts.gate_up_proj'" in error_of(
        PretrainedWeights, str(tmp_path), tree
    )
