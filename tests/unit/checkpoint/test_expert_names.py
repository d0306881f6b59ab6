"""Experts under the names of a model: both ways, and values that cannot be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import State
from composer.devices import DeviceCPU
from composer.models import ComposerModel
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from composer_fsdp2.checkpoint.convert import convert_to_sharded
from composer_fsdp2.checkpoint.expert_names import ExpertNames, RenamedFolder
from composer_fsdp2.checkpoint.source import FileCheckpoint, FolderCheckpoint, flatten
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.trainer.checkpoint.load import check_checkpoint

EXPERTS, ROWS, COLUMNS = 3, 4, 5
STACKS = {"mlp.gate.weight": (EXPERTS, COLUMNS)} | {
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * ROWS, COLUMNS),
    "mlp.experts.down_proj": (EXPERTS, COLUMNS, ROWS),
}
OTHER = {"a.norm.weight": (COLUMNS,)}


def stacks() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    sizes = {f"a.{name}": size for name, size in STACKS.items()} | OTHER
    return {name: torch.randn(size, generator=made) for name, size in sizes.items()}


def matrices(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {"a.block_sparse_moe.gate.weight": values["a.mlp.gate.weight"]}
    for number in range(EXPERTS):
        start = f"a.block_sparse_moe.experts.{number}"
        stack = values["a.mlp.experts.gate_up_proj"][number]
        found[f"{start}.w1.weight"] = stack[:ROWS].clone()
        found[f"{start}.w2.weight"] = values["a.mlp.experts.down_proj"][number].clone()
        found[f"{start}.w3.weight"] = stack[ROWS:].clone()
    return found | {"a.norm.weight": values["a.norm.weight"]}


def run_state(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of a run whose moments are its weights, times two."""
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": 2 * value} for name, value in weights.items()
    }
    groups = [{"lr": 0.1, "params": list(weights)}]
    optimizer = {"state": state, "param_groups": groups}
    return {"state": {"model": weights, "optimizers": {"AdamW": optimizer}}}


def saved_as(folder: Path, values: dict[str, Any], kind: str) -> Any:
    torch.save(values, folder / "file.pt")
    file = FileCheckpoint(folder / "file.pt")
    if kind == "full":
        return file
    convert_to_sharded(file, folder / "sharded", 10**9, lambda *_: None)
    return FolderCheckpoint(folder / "sharded")


def shown(saved: Any, model: dict[str, torch.Tensor]) -> Any:
    names = ExpertNames(saved, model)
    if isinstance(saved, FolderCheckpoint):
        return RenamedFolder(saved, names)
    saved.values = names.renamed(saved.values)
    saved.refresh()
    return saved


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("to_stacks", [True, False])
def test_as_if_saved_in_the_form_of_the_model(kind: str, to_stacks: bool, tmp_path: Path):
    forms = stacks(), matrices(stacks())
    before, after = forms[::-1] if to_stacks else forms
    saved = shown(saved_as(tmp_path, run_state(before), kind), after)
    expected, ways = flatten(run_state(after))
    assert saved.paths == ways
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert saved.tensors[key].shape == value.shape, key
            assert torch.equal(saved.tensor(key), value), key
    groups = saved.object("state.optimizers.AdamW.param_groups.0.params")
    other = tmp_path / "other"
    other.mkdir()
    names = ExpertNames(saved_as(other, run_state(before), "full"), after)
    assert set(names.renamed(groups)) == set(after)


@pytest.mark.parametrize("to_stacks", [True, False])
def test_order_is_that_of_the_model(to_stacks: bool, tmp_path: Path):
    """Ranks distribute tensors in this order, and each process has its own order of sets."""
    before, after = (stacks(), matrices(stacks()))[:: -1 if to_stacks else 1]
    names = ExpertNames(saved_as(tmp_path, run_state(before), "full"), after)
    assert list(names.sources) == [name for name in after if name not in before]


def test_experts_of_one_form_are_left_alone(tmp_path: Path):
    saved = saved_as(tmp_path, run_state(stacks()), "full")
    assert not ExpertNames(saved, stacks())
    assert not ExpertNames(saved, {"b.weight": torch.zeros(1)})


def test_another_number_of_experts_does_not_pass(tmp_path: Path):
    wanted = matrices(stacks())
    fewer = {name: value for name, value in wanted.items() if ".experts.2." not in name}
    saved = shown(saved_as(tmp_path, run_state(stacks()), "sharded"), fewer)
    key = "state.model.a.block_sparse_moe.experts.1.w1.weight"
    assert saved.tensors[key].shape != fewer[key.removeprefix("state.model.")].shape


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single process")
@pytest.mark.parametrize("change", ["another step", "no state"])
def test_state_that_only_some_experts_have_is_refused(change: str, tmp_path: Path):
    values = run_state(matrices(stacks()))
    state = values["state"]["optimizers"]["AdamW"]["state"]
    expert = state["a.block_sparse_moe.experts.1.w1.weight"]
    if change == "no state":
        del state["a.block_sparse_moe.experts.1.w1.weight"]
    else:
        expert["step"] = torch.tensor(6.0)
    with pytest.raises(CheckpointError, match=r"differs between the experts.*load_weights_only"):
        shown(saved_as(tmp_path, values, "full"), stacks())
    folder = shown(saved_as(tmp_path, values, "sharded"), stacks())
    reader = FileSystemReader(tmp_path / "sharded")
    wanted = run_state(stacks())
    with pytest.raises(CheckpointError, match=r"differs between the experts.*load_weights_only"):
        folder.check_values_of_all(reader, wanted)
    del wanted["state"]["optimizers"]
    folder.check_values_of_all(reader, wanted)


class WithExperts(ComposerModel):
    """Has parameters of the given names and shapes."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            *path, attribute = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(attribute, nn.Parameter(value))

    def forward(self, batch: Any) -> torch.Tensor: ...

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor: ...


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("to_stacks", [True, False])
def test_the_check_before_a_run_finds_experts_of_the_other_form(
    kind: str, to_stacks: bool, tmp_path: Path
):
    before, after = (stacks(), matrices(stacks()))[:: -1 if to_stacks else 1]
    saved_as(tmp_path, run_state(before), kind)
    path = tmp_path / ("file.pt" if kind == "full" else "sharded")
    model = WithExperts(after)
    state = State(model=model, rank_zero_seed=0, run_name="run", device=DeviceCPU())
    check_checkpoint(path, state, True, True, None)
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(CheckpointError, match="more"):
        check_checkpoint(path, state, True, True, None)
