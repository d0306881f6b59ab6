"""Checkpoints as DeepSpeed writes them, from the description of their files, in small."""

from __future__ import annotations

import enum
import math
import sys
import types
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["ODD", "odd_weights", "save", "stored"]


class ZeroStageEnum(int, enum.Enum):
    """Has the place and the values of DeepSpeed's."""

    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    """Has the place of DeepSpeed's, and some of its fields."""

    def __init__(self) -> None:
        self.cur_scale, self.dtype = 1.0, torch.bfloat16


@dataclass
class fragment_address:
    """Where a parameter is in the part of a rank."""

    numel: int
    start: int


_PLACES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextmanager
def stored(*others: type) -> Generator[None]:
    """Lets `torch.save` write the classes under their names in DeepSpeed."""
    for module, kind in (*_PLACES.items(), *((kind.__module__, kind) for kind in others)):
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            sys.modules.setdefault(name, types.ModuleType(name))
        setattr(sys.modules[module], kind.__name__, kind)
        kind.__module__ = module
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]


def odd_weights() -> dict[str, torch.Tensor]:
    """Two parameters of each of two groups, frozen and tied ones, buffers; few sizes are even."""
    torch.manual_seed(3)
    values = {
        "embed.weight": torch.randn(11, 5),
        "up.weight": torch.randn(7, 5),
        "up.bias": torch.randn(7),
        "scale": torch.randn(()),
        "frozen.weight": torch.randn(5, 7).bfloat16().float(),
        "mean": torch.randn(3).bfloat16().float(),
        "count": torch.tensor(4),
    }
    return {**values, "head.weight": values["embed.weight"]}


ODD: dict[str, Any] = {
    "groups": [["embed.weight", "up.weight"], ["up.bias", "scale"]],
    "frozen": ["frozen.weight"],
    "buffers": ["mean", "count"],
    "shared": {"head.weight": "embed.weight"},
}
"""which of `odd_weights` are what"""


def save(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    stage: int,
    world: int,
    *,
    groups: Sequence[Sequence[str]],
    frozen: Sequence[str] = (),
    buffers: Sequence[str] = (),
    shared: Mapping[str, str] | None = None,
    between: int = 0,
    others: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint and `latest`; returns the folder of the checkpoint.

    Args:
        path: the folder above.
        weights: name -> value, in the order of the model.
        stage: of ZeRO, from 1 to 3.
        world: number of ranks.
        groups: names of what the optimizer steps.
        frozen: names of parameters that it does not.
        buffers: names of buffers, which are saved in bf16 as parameters are.
        shared: second name -> name of a tied parameter.
        between: elements of padding behind each parameter, with stages 1 and 2.
        others: what else the model states hold.
    """
    folder = path / "global_step3"
    folder.mkdir(parents=True)
    (path / "latest").write_text(folder.name)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in weights.items()}
    empty = torch.empty(0, dtype=torch.bfloat16)
    shards = {name: _shares(half[name], world) for name in frozen}
    module = {k: v if stage < 3 or k in buffers else empty for k, v in half.items()}
    with stored():
        for rank in range(world):
            state: dict[str, Any] = {
                "module": module,
                "buffer_names": list(buffers),
                "optimizer": None,
                "param_shapes": [{name: weights[name].shape for name in group} for group in groups],
                "frozen_param_shapes": {name: weights[name].shape for name in frozen},
                "frozen_param_fragments": {
                    name: half[name] if stage < 3 else shards[name][rank] for name in frozen
                },
                "shared_params": dict(shared or {}) if rank == 0 else {},
                "dp_world_size": world,
                "mp_world_size": 1,
                "sparse_tensor_module_names": set(),
                "ds_config": {"zero_optimization": {"stage": stage}},
                "ds_version": "0.19.8",
                **(others or {}),
            }
            if stage < 3:  # saves no fragments
                state |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
            name = "mp_rank_00_model_states.pt"
            if stage == 3 or rank == 0:
                of_rank = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(state, folder / f"{of_rank}{name}")
            optimizer: dict[str, Any] = {
                "loss_scaler": LossScaler(),
                "zero_stage": ZeroStageEnum(stage),
                "partition_count": world if stage == 3 else [world] * len(groups),
                "param_slice_mappings": [{"up.bias": fragment_address(4, 0)}],
            }
            if stage == 3:
                optimizer["fp32_flat_groups"] = [
                    torch.cat([_shares(weights[name], world)[rank] for name in group])
                    for group in groups
                ]
            else:
                optimizer["single_partition_of_fp32_groups"] = [
                    _part([weights[name] for name in group], rank, world, between)
                    for group in groups
                ]
                optimizer["param_alignment_paddings"] = [[between] * len(group) for group in groups]
            file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, file)
    return folder


def _shares(weight: torch.Tensor, world: int) -> list[torch.Tensor]:
    share = math.ceil(weight.numel() / world)
    flat = torch.full((share * world,), math.nan, dtype=weight.dtype)
    flat[: weight.numel()] = weight.reshape(-1)
    return [part.clone() for part in flat.chunk(world)]


def _part(weights: Sequence[torch.Tensor], rank: int, world: int, between: int) -> torch.Tensor:
    """Returns one rank's part of the vector of a group."""
    padding = torch.full((between,), math.nan)
    vector = torch.cat([part for weight in weights for part in (weight.reshape(-1), padding)])
    end = -len(vector) % (2 * world)
    part = torch.cat([vector, torch.full((end,), math.nan)]).chunk(world)[rank]
    # The last rank leaves the padding at the end out.
    return part[: len(part) - end].clone() if rank == world - 1 else part.clone()
