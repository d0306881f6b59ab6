"""Moves an optimizer from the parameters it was built with to their shards."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.plan.module_tree import ModuleTree, canonical_param_ids
from composer_fsdp2.ranks import broadcast_from_rank0
from composer_fsdp2.shard.layout import Slot, slot_of
from composer_fsdp2.text import listed

__all__ = [
    "DetachedOptimizer",
    "check_optimizers",
    "describe_optimizer",
    "detach_optimizer",
    "reattach_optimizer",
]


_KERNELS = ("bitsandbytes", "apex", "transformer_engine", "deepspeed", "colossalai")
"""packages whose kernels take raw pointers; a DTensor's own is null"""
_LOW_BIT_PACKAGES = ("torchao", "bitsandbytes", "llmfoundry", "composer")
_LOW_BIT = re.compile("8_?bit|4_?bit|fp8|lion8b", re.IGNORECASE)
_INSTEAD = (
    "torch.optim.AdamW(..., fused=True) or Composer's DecoupledAdamW; FSDP2 shards their state, "
    "and optimizer_state: {bits: 8} saves as much memory"
)

_NEEDS_FULL = {
    "Adafactor": "scales each step by norms over rows, columns and the whole parameter",
    "LBFGS": "joins all gradients into one vector and takes its products",
    "Rprop": "picks elements by sign, which not every torch can on shards",
    "SparseAdam": "steps sparse gradients, and FSDP2 reduces dense ones",
}
"""optimizers of torch that fail or go another way on shards, and why"""


@dataclass(slots=True, eq=False)
class DetachedOptimizer:
    """Holds an optimizer without parameters, and the slot of each of them in the model.

    A slot has no names and no addresses, so it survives wrappers and ties.
    """

    optimizer: torch.optim.Optimizer
    groups: list[list[Slot | nn.Parameter]]
    """for each group its slots; a parameter of another module stays itself"""
    states: list[tuple[Slot, torch.Size, dict[Any, Any]]]
    """state of each parameter that has been stepped, and the parameter's full shape"""


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], tree: ModuleTree, *, gives_values: bool
) -> None:
    """Refuses optimizers whose parameters or state cannot be moved to shards.

    Collective: no.

    Args:
        optimizers: as the user built them.
        tree: the model before sharding.
        gives_values: whether this rank's state is the one that is kept (rank 0's is).

    Raises:
        PlanError: for parameters of another model, for one weight in two groups, for state that
            cannot be divided, and for a kind that cannot work on shards.
    """
    names = {id(ref.param): ref.name for ref in reversed(tree.params)}
    for optimizer in optimizers:
        _check_kind(optimizer)
    _check_foreign(optimizers, tree, names)
    for optimizer in optimizers:
        _check_aliases(optimizer, tree, names)
        states = [(p, state) for p, state in optimizer.state.items() if id(p) in names]
        for param, state in states:
            name = names[id(param)]
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    continue
                if value.is_meta and gives_values:
                    raise PlanError(
                        f"The optimizer state '{key}' of '{name}' is on the meta device and has no "
                        "values. Training would start from uninitialised memory. Build the "
                        "optimizer after the model is prepared, or the model on cpu on rank 0."
                    )
                if value.shape != param.shape:
                    raise PlanError(
                        f"The optimizer state '{key}' of '{name}' has shape {tuple(value.shape)}, "
                        f"its parameter {tuple(param.shape)}. It cannot be divided into the "
                        "parameter's shards. Build the optimizer after the model is prepared."
                    )


def _check_foreign(
    optimizers: Sequence[torch.optim.Optimizer], tree: ModuleTree, names: Mapping[int, str]
) -> None:
    """Refuses parameters that are not in the model, unless all of the model's are there too."""
    members = [
        (param, group, number, index)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for index, param in enumerate(group["params"])
    ]
    foreign: list[tuple[Any, str]] = []
    for param, group, number, index in members:
        if id(param) not in names:
            param_names = group.get("param_names")
            name = f"'{param_names[index]}'" if param_names else f"group {number} parameter {index}"
            foreign.append((param, f"{name} {tuple(param.shape)}"))
    if not foreign:
        return
    texts = ", ".join(text for _, text in foreign[:10])
    ids = {id(param) for param, *_ in members}
    trained = {names[id(ref.param)] for ref in tree.params if ref.param.requires_grad}
    missing = sorted(trained - {names[key] for key in ids & names.keys()})
    if missing:
        raise PlanError(
            f"The optimizer holds {len(foreign)} parameters that are not in the model: {texts}. "
            "They would be stepped while the model does not train. Build the optimizer from the "
            "parameters of the model that is prepared. Parameters of the model that the optimizer "
            f"does not hold: {', '.join(missing[:10])}."
        )
    if any(isinstance(param, DTensor) for param, _ in foreign):
        raise PlanError(
            f"The optimizer also holds parameters of another sharded model: {texts}. It steps the "
            "local shards of one model. Give each model an optimizer of its own, or build the "
            "optimizer when both models are prepared."
        )


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that read past DTensors, or whose state depends on the number of ranks.

    Packages are not imported: the classes an optimizer derives from name their modules.
    """
    name = type(optimizer).__name__
    # A user's subclass too: a class it derives from makes the step.
    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "torch" and cls.__name__ == "Muon":
            raise PlanError(
                f"The optimizer {name} is torch.optim.Muon, which orthogonalises matrices piece by "
                "piece where they are sharded: its result depends on the number of ranks, and each "
                "matrix takes more than ten collectives. Use composer_fsdp2.Muon(model, ...), "
                "which brings each matrix to one rank and steps all other parameters by AdamW; "
                "adjust_lr_fn='original' is torch's default."
            )
        if package == "torch" and cls.__name__ in _NEEDS_FULL:
            raise PlanError(
                f"The optimizer {name} {_NEEDS_FULL[cls.__name__]}. On each rank it would get a "
                "part of every parameter, and stop or compute something else than on whole ones. "
                "Use one that steps element by element: AdamW, Adam, SGD, Adagrad, RMSprop, or "
                "Composer's DecoupledAdamW and DecoupledSGDW."
            )
        if package in _LOW_BIT_PACKAGES and _LOW_BIT.search(cls.__name__):
            raise PlanError(
                f"The optimizer {name} of {package} keeps its state in a few bits, with one scale "
                "for each block of elements. FSDP2 cuts parameters between ranks and the blocks "
                "with them, so the state depends on the number of ranks, and a resumed run would "
                f"train something else. Use {_INSTEAD}."
            )
        if package in _KERNELS and cls is not torch.optim.Optimizer:
            raise PlanError(
                f"The optimizer {name} is one of {package}, whose kernels take raw pointers. The "
                "pointer of a sharded parameter (a DTensor) is null: the step would crash, or "
                f"leave the weights as they are. Use {_INSTEAD}."
            )
        if package == "torchao" and cls.__name__ == "CPUOffloadOptimizer":
            raise PlanError(
                f"The optimizer {name} of torchao steps copies of the parameters in CPU memory, "
                "which it made before the model was sharded. The model would train nothing. Use "
                "its inner optimizer, with optimizer_state: {device: cpu} in "
                "parallelism_config.fsdp2, or cpu_offload: true."
            )


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Returns the facts that ranks must have in common: groups, their sizes, existing state."""
    lines = [type(optimizer).__name__]
    lines += [f"group {i}: {len(g['params'])}" for i, g in enumerate(optimizer.param_groups)]
    lines += [
        f"state {tuple(param.shape)}: {sorted(map(str, state))}"
        for param, state in optimizer.state.items()
    ]
    return "\n".join(lines)


def _check_aliases(
    optimizer: torch.optim.Optimizer, tree: ModuleTree, names: Mapping[int, str]
) -> None:
    """Refuses two groups or two states for one weight, which two parameters may share."""
    representative = canonical_param_ids(tree.params)
    holders: dict[int, str] = {}
    for param in optimizer.state:
        if (name := names.get(id(param))) is None:
            continue
        other_name = holders.setdefault(representative[id(param)], name)
        if other_name != name:
            raise PlanError(
                f"The optimizer has stepped '{other_name}' and '{name}', which share memory. "
                "Sharded they are one parameter, and no single state continues both. Tie them by "
                "assignment (`b.weight = a.weight`) before building the optimizer."
            )
    first: dict[int, tuple[int, str]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if (name := names.get(id(param))) is None:
                continue
            other, other_name = first.setdefault(representative[id(param)], (number, name))
            if other != number:
                raise PlanError(
                    f"Groups {other} and {number} of the optimizer hold '{other_name}' and "
                    f"'{name}', which share memory. Sharded they are one parameter, and one "
                    "parameter has one group. Tie them by assignment (`b.weight = a.weight`) "
                    "before building the optimizer."
                )


def detach_optimizer(optimizer: torch.optim.Optimizer, tree: ModuleTree) -> DetachedOptimizer:
    """Takes the parameters out of the optimizer, so that sharding can free them.

    Collective: no. `check_optimizers` comes first.
    """
    # Under the first name of a tied parameter.
    slots: dict[int, Any] = {id(r.param): slot_of(tree, r) for r in reversed(tree.params)}
    groups = [[slots.get(id(p), p) for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    # State is keyed by the Parameter object, which would keep the full parameter alive.
    moved = [param for param in optimizer.state if id(param) in slots]
    states = [(slots[id(param)], param.shape, dict(optimizer.state.pop(param))) for param in moved]
    return DetachedOptimizer(optimizer, groups, states)


def reattach_optimizer(detached: DetachedOptimizer) -> None:
    """Gives the optimizer the sharded parameters, with their state from before.

    Collective: yes, when it had state: rank 0's is kept, as its weights are. Groups, their order,
    extra keys and `initial_lr` stay.
    """
    optimizer = detached.optimizer
    slots = [slot for group in detached.groups for slot in group]
    foreign = [tuple(slot.shape) for slot in slots if isinstance(slot, nn.Parameter)]
    if foreign and dist.get_world_size() > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"The optimizer also holds parameters that are not in the model, of the shapes "
            f"{listed(foreign, quote='')}. Nobody averages their gradients over the ranks. Do that "
            "before each step (torch.distributed.all_reduce), or make them a part of the model.",
            stacklevel=4,
        )
    for group, slots in zip(optimizer.param_groups, detached.groups, strict=True):
        params: dict[int, nn.Parameter] = {}
        for slot in slots:
            param = getattr(*slot) if isinstance(slot, tuple) else slot
            if id(param) in params:
                warnings.warn(
                    f"Two parameters of shape {tuple(param.shape)} shared memory and are one "
                    "parameter now, stepped once with the sum of both gradients. Before, an "
                    "optimizer with adaptive steps moved them twice. Tie them by assignment to say "
                    "so in the model.",
                    stacklevel=2,
                )
            params[id(param)] = param
        group["params"] = list(params.values())
    for (module, attribute), shape, state in detached.states:
        param = getattr(module, attribute)
        if param in optimizer.state:
            continue
        sharded_state = {key: _shard_state(value, shape, param) for key, value in state.items()}
        if not form_of(param).is_remote:
            optimizer.state[param] = sharded_state


def _shard_state(value: Any, full_shape: torch.Size, param: nn.Parameter) -> Any:
    """Returns the part of a state tensor that belongs to this rank's shard of the parameter."""
    if not isinstance(value, torch.Tensor) or value.shape != full_shape or value.ndim == 0:
        return value
    # Of the mesh, not of the shard: backends send nothing from CPU memory it was offloaded to.
    device = torch.device(param.device_mesh.device_type) if isinstance(param, DTensor) else None
    full = value.detach()
    full = torch.empty_like(full, device=param.device) if full.is_meta else full.to(param.device)
    broadcast_from_rank0(full, device or param.device)
    return form_of(param).shard(full, param)
