"""Muon for sharded models: one optimizer with two algorithms.

Hidden matrices get orthogonalised momentum, all other parameters AdamW. A matrix is orthogonalised
in full on one rank, so that the result is the same on any number of ranks; see [Note: exchange] in
`optim.muon.exchange`.

[Note: undecided groups] `model.parameters()` does not say which matrices are hidden. A group of it
is divided by shape at once, into parameters that may be matrices and vectors, and when the model is
known, embeddings and the like move from the first group to the second. So the number of groups
stays, one of which may be empty: Composer builds learning rate schedules, which go by it, in
between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.optim.local import MatrixOptimizer, local_gradient
from composer_fsdp2.optim.muon.exchange import (
    MatrixPart,
    MatrixSplit,
    Ranks,
    plan_exchange,
    ranks_of,
)
from composer_fsdp2.optim.muon.groups import (
    ITERATION_DTYPES,
    Blocks,
    MatrixChoice,
    Overrides,
    PlannedGroups,
    check_matrices,
    check_values,
    choose,
    choose_by_names,
    entries_of,
    globs,
    with_blocks,
    with_entries,
)
from composer_fsdp2.optim.muon.newton_schulz import MatrixLayout, lr_ratio, orthogonalise
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.torch_private.tensors import local_part, values_known

__all__ = ["Muon"]


class Muon(MatrixOptimizer):
    """Steps hidden matrices by Muon and all other parameters by AdamW.

    Collective: `step` is, for sharded parameters, over their mesh.

    It can be built before `prepare_fully_shard` or after it. From a module it knows at once which
    parameters are hidden matrices; from `model.parameters()` it learns it when the model is
    prepared; from `model.named_parameters()` also without, by names and shapes.

    Args:
        params: a module, parameters, named parameters, or groups, each of which may say
            `algorithm: muon` or `adamw`, and `blocks`.
        lr: learning rate of both algorithms.
        weight_decay: of both algorithms; decoupled, times the learning rate, as in AdamW.
        momentum: share of Muon's average that stays in a step.
        nesterov: whether Muon looks one step ahead.
        ns_coefficients: three numbers of Newton-Schulz.
        eps: least norm that Newton-Schulz divides by.
        ns_steps: how often Newton-Schulz is iterated.
        adjust_lr_fn: how the shape of a matrix changes its learning rate: `match_rms_adamw` lets
            one rate serve both algorithms; `original` and `spectral_unclamped` as in torch.
        iteration_dtype: `bf16` or `fp32`, in which matrices also travel.
        adamw_lr: learning rate of AdamW; that of Muon by default.
        adamw_weight_decay: of AdamW; that of Muon by default.
        adamw_betas: decay of AdamW's two averages.
        adamw_eps: is added to the root that AdamW divides by.
        muon: globs of parameters that get Muon whatever they are.
        adamw: globs of parameters that get AdamW whatever they are.
        blocks: matrices that are joined in one parameter, by glob: their number, or the outputs of
            each; `null` for one matrix; `{turns: 8, outputs: [4, 2, 2]}` for eight times four
            outputs of the first, two of the second and two of the third. Those of `Wqkv`,
            `qkv_proj`, `query_key_value`, `gate_up_proj` and their like are known.
        bucket_bytes: size of full matrices on a rank at a time; one matrix at least.

    Raises:
        ConfigError: for a wrong value.
        PlanError: for a group that mixes both algorithms, a vector given to Muon, and names that
            the model does not have.

    Example:
        >>> import torch
        >>> from composer_fsdp2 import Muon
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> optimizer = Muon(model, lr=0.02)
        >>> [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adamw', 2)]
        >>> model(torch.arange(8)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        *,
        iteration_dtype: str | torch.dtype = "bf16",
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: Sequence[float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        muon: str | Sequence[str] = (),
        adamw: str | Sequence[str] = (),
        blocks: Mapping[str, Blocks] | None = None,
        bucket_bytes: int = 2**27,
    ) -> None:
        names: dict[Any, Any] = {dtype: name for name, dtype in ITERATION_DTYPES.items()}
        defaults = {
            "algorithm": None,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn or "original",
            "iteration_dtype": names.get(iteration_dtype, iteration_dtype),
            "adamw_betas": tuple(adamw_betas),
            "adamw_eps": adamw_eps,
        }
        adamw_settings = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
        self._for_adamw = {key: value for key, value in adamw_settings.items() if value is not None}
        self._overrides = Overrides(globs(muon), globs(adamw), dict(blocks or {}))
        self._bucket_bytes = bucket_bytes
        self._layouts: list[list[MatrixLayout]] = []
        """for each group the layouts of its parameters, in their order"""
        self._layout_of: dict[Tensor, MatrixLayout] = {}
        """layouts by parameter, from the first step on: sharding exchanges parameters before it"""
        is_model = isinstance(params, nn.Module)
        super().__init__(params.parameters() if is_model else params, defaults)
        if is_model:
            planned = self.plan_groups(ModuleTree.read(params))
            # No schedule goes by the number of groups yet.
            filled = [number for number, group in enumerate(planned.groups) if group["params"]]
            planned.groups = [planned.groups[number] for number in filled]
            planned.layouts = [planned.layouts[number] for number in filled]
            self.assign_groups(planned)

    # --- Groups. ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; a group without an algorithm is divided when the model is known.

        Collective: no.

        Args:
            param_group: `params` and settings.

        Raises:
            ConfigError: for a wrong value, and for `blocks` without `algorithm: muon`.
            PlanError: for a vector in a group of Muon.
        """
        blocks = param_group.pop("blocks", None)
        if blocks is not None and param_group.get("algorithm") != "muon":
            raise ConfigError(
                "A group of Muon has 'blocks' without algorithm: muon. They would have no effect. "
                "Write algorithm: muon in the group, or name the parameters in the optimizer's own "
                "blocks."
            )
        for_adamw = {k: v for k, v in self._for_adamw.items() if k not in param_group}
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        check_values(group)
        entries = entries_of(group)
        parts = [group]
        layouts = [MatrixLayout()] * len(entries)
        if group["algorithm"] is None:
            # See [Note: undecided groups].
            matrices = with_entries(group, [pair for pair in entries if pair[0].ndim > 1])
            others = with_entries(group, [pair for pair in entries if pair[0].ndim < 2])
            others.update(for_adamw, algorithm="adamw")
            # Both groups, where there may be matrices.
            parts = [part for part in (matrices, others) if matrices["params"] or part["params"]]
        elif group["algorithm"] == "adamw":
            group.update(for_adamw)
        else:
            number = len(self.param_groups)
            check_matrices(entries, number)
            if blocks is not None:
                layouts = [
                    with_blocks(
                        f"parameter {index} of group {number}", param.shape, MatrixLayout(), blocks
                    )
                    for index, (param, _) in enumerate(entries)
                ]
        for part in parts:
            self.param_groups.append(part)
            self._layouts.append(layouts[: len(part["params"])])
            if self._layout_of:
                self._layout_of.update(zip(part["params"], layouts, strict=False))

    def plan_groups(self, tree: ModuleTree) -> PlannedGroups:
        """Returns the groups that the model's parameters will have. Collective: no.

        Args:
            tree: the model of the optimizer's parameters, sharded or not.

        Returns:
            Groups for `assign_groups`, with a text for ranks to compare.

        Raises:
            PlanError: for globs that match nothing, and for a vector that is to be a matrix.
        """
        names = {id(ref.param): ref.name for ref in reversed(tree.params)}
        return self._plan(choose(tree, self._overrides), names)

    def decide(self, model: nn.Module) -> None:
        """Settles which parameters are hidden matrices, where that is still open. Collective: no.

        Args:
            model: of the optimizer's parameters.
        """
        if any(group["algorithm"] is None for group in self.param_groups):
            self.assign_groups(self.plan_groups(ModuleTree.read(model)))

    def assign_groups(self, planned: PlannedGroups) -> None:
        """Gives every parameter its algorithm. Collective: no.

        Args:
            planned: from `plan_groups`, since when parameters are the same objects.
        """
        self._layouts, self._layout_of = planned.layouts, {}
        self.param_groups[:] = planned.groups

    def _plan(self, choices: Mapping[int, MatrixChoice], names: Mapping[int, str]) -> PlannedGroups:
        """Returns groups of one algorithm each."""
        hidden = {key for key, choice in choices.items() if choice.algorithm == "muon"}
        groups = list(self.param_groups)
        for number, group in enumerate(groups):
            if group["algorithm"] is None:
                # The group after it gets the other parameters; see [Note: undecided groups].
                entries = entries_of(group)
                matrices = [pair for pair in entries if id(pair[0]) in hidden]
                others = [pair for pair in entries if id(pair[0]) not in hidden]
                others += entries_of(groups[number + 1])
                groups[number] = {**with_entries(group, matrices), "algorithm": "muon"}
                groups[number + 1] = with_entries(groups[number + 1], others)
        layout_of = {key: choice.layout for key, choice in choices.items()}
        for group, layouts in zip(self.param_groups, self._layouts, strict=True):
            pairs = zip(group["params"], layouts, strict=True)
            # Blocks that a group itself says come first.
            layout_of.update((id(p), layout) for p, layout in pairs if layout != MatrixLayout())
        layouts = [[layout_of.get(id(p), MatrixLayout()) for p in g["params"]] for g in groups]
        lines = [f"buckets of {self._bucket_bytes} bytes a rank"]
        for group, of_group in zip(groups, layouts, strict=True):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            lines.append(str(settings))
            lines += [
                f"  {names.get(id(param), tuple(param.shape))}: {layout}"
                for param, layout in zip(group["params"], of_group, strict=True)
            ]
        return PlannedGroups(groups, layouts, "\n".join(lines))

    def _settle_groups(self) -> None:
        """Decides groups that are still undecided by names, without the model.

        Keeps layouts with their parameters when some leave a group, as in `LayerFreezing`.

        Raises:
            PlanError: an undecided group has no names; a group lost parameters before the first
                step, or got new ones.
        """
        undecided = [group for group in self.param_groups if group["algorithm"] is None]
        if any("param_names" not in group for group in undecided):
            raise PlanError(
                "Muon does not know which of its matrices are hidden ones: it was built from "
                "parameters without names, and no model was prepared. Embeddings and heads would "
                "be orthogonalised. Build it from the model (`Muon(model, lr=...)`) or from "
                "model.named_parameters(), give every group an `algorithm`, or call "
                "prepare_fully_shard(model, optimizer, ...) before the first step."
            )
        if undecided:
            named = [
                (name, param)
                for group in self.param_groups
                for param, name in entries_of(group)
                if name
            ]
            self.assign_groups(self._plan(choose_by_names(named, self._overrides), {}))
        group_params = [group["params"] for group in self.param_groups]
        if not self._layout_of:
            for params, layouts in zip(group_params, self._layouts, strict=True):
                if len(params) == len(layouts):
                    self._layout_of.update(zip(params, layouts, strict=True))
        for number, params in enumerate(group_params):
            if any(param not in self._layout_of for param in params):
                raise PlanError(
                    f"Group {number} of Muon has {len(params)} parameters and was given "
                    f"{len(self._layouts[number])}. Two share memory and became one, or the group "
                    "was changed, and their blocks are not known any more. Tie parameters by "
                    "assignment (`b.weight = a.weight`), and give new ones to `add_param_group`."
                )
            self._layouts[number] = [self._layout_of[param] for param in params]

    # --- The step. ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps every parameter that has a gradient.

        Collective: yes, over the mesh of sharded matrices. Ranks need gradients for the same
        matrices, which `unused_parameters` sees to.

        Args:
            closure: computes the loss anew.

        Returns:
            The loss of the closure.

        Raises:
            PlanError: the hidden matrices are not known yet.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle_groups()
        # torch counts no change of a local tensor for the DTensor around it.
        increment_version([p for g in self.param_groups for p in g["params"] if p.grad is not None])
        together: dict[Any, list[_Update]] = defaultdict(list)
        for group, layouts in zip(self.param_groups, self._layouts, strict=True):
            is_muon = group["algorithm"] == "muon"
            keys = ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq")
            for param in group["params"]:
                if not self.state.get(param) and (param.requires_grad or param.grad is not None):
                    # For all parameters at once: a checkpoint asks every rank for the same keys.
                    count = {} if is_muon else {"step": torch.zeros((), dtype=torch.float32)}
                    self.state[param] = {**count, **{key: torch.zeros_like(param) for key in keys}}
            if not is_muon:
                self._step_adamw(group)
                continue
            for param, layout in zip(group["params"], layouts, strict=True):
                if (grad := local_gradient(param)) is not None:
                    mesh, axes = _divided_by(param)
                    # torch's checkpoints give experts of other ranks a gradient as well.
                    if mesh is not None and mesh.get_coordinate() is None:
                        continue
                    update = self._momentum(group, param, grad)
                    together[mesh, axes, update.dtype].append(
                        _Update(
                            local_part(param), update, MatrixSplit.of(param, axes, layout), group
                        )
                    )
        for (mesh, axes, dtype), updates in together.items():
            self._step_matrices(mesh, axes, self._bucket_bytes // dtype.itemsize, updates)
        return loss

    def _step_adamw(self, group: Mapping[str, Any]) -> None:
        updates = [
            (param, grad, self.state[param])
            for param in group["params"]
            if (grad := local_gradient(param)) is not None
        ]
        adamw(
            [local_part(param) for param, _, _ in updates],
            [grad for _, grad, _ in updates],
            [local_part(state["exp_avg"]) for _, _, state in updates],
            [local_part(state["exp_avg_sq"]) for _, _, state in updates],
            [],
            [state["step"] for _, _, state in updates],
            amsgrad=False,
            beta1=group["adamw_betas"][0],
            beta2=group["adamw_betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )

    def _momentum(self, group: Mapping[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        """Returns the update to orthogonalise. Updates the momentum and decays the weight."""
        average = local_part(self.state[param]["momentum_buffer"])
        grad = grad.to(average.dtype)
        average.lerp_(grad, 1 - group["momentum"])
        local_part(param).mul_(1 - float(group["lr"]) * group["weight_decay"])
        update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
        return update.to(ITERATION_DTYPES[group["iteration_dtype"]])

    def _step_matrices(
        self, mesh: DeviceMesh | None, axes: Sequence[int], limit: int, updates: list[_Update]
    ) -> None:
        """Orthogonalises updates and adds them to the shards. Collective: yes, over the mesh."""

        def orthogonal(number: int, matrix: Tensor) -> Tensor:
            group = updates[number].group
            return orthogonalise(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        def apply(part: MatrixPart, result: Tensor) -> None:
            update = updates[part.matrix.param]
            *_, rows, columns = part.matrix.shape
            sizes = (columns, rows) if update.split.layout.transposed else (rows, columns)
            ratio = lr_ratio(update.group["adjust_lr_fn"], *sizes)
            result, target = result.to(update.local.device), update.local[part.shard_index]
            target.add_(result, alpha=-float(update.group["lr"]) * ratio)
            if not isinstance(part.shard_index[0], slice):  # a copy
                update.local[part.shard_index] = target

        with values_known():
            ranks, process_group = (Ranks(), None) if mesh is None else ranks_of(mesh, axes)
            exchange = plan_exchange(tuple(update.split for update in updates), ranks, limit)
        shards = [update.update for update in updates]
        if mesh is not None:
            # The device of the mesh: with cpu_offload the shard is in CPU memory.
            shards = [shard.to(mesh.device_type) for shard in shards]
        exchange.run(shards, process_group, orthogonal, apply)

    # --- Copies. ---

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state dict. Collective: no.

        Args:
            state_dict: of an optimizer with the same groups.
        """
        # torch's checkpoints lose the settings of groups that have no parameters.
        current = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        current += [{}] * len(state_dict["param_groups"])
        groups = state_dict["param_groups"]
        groups = [{**settings, **group} for settings, group in zip(current, groups, strict=False)]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        attributes = ("_for_adamw", "_overrides", "_bucket_bytes", "_layouts")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in attributes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layout_of = {}


@dataclass(slots=True, eq=False)
class _Update:
    """The change of a parameter in a step, before its matrices are orthogonal."""

    local: Tensor
    """this rank's shard of the parameter"""
    update: Tensor
    """in the shape of the shard and the dtype of the iteration"""
    split: MatrixSplit
    group: Mapping[str, Any]


def _divided_by(param: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Returns the mesh axes that divide a parameter; no mesh if every rank has the full one."""
    if not isinstance(param, DTensor):
        return None, ()
    placements = enumerate(param.placements)
    axes = tuple(
        axis for axis, placement in placements if getattr(placement, "dim", None) is not None
    )
    if any(placement.is_partial() for placement in param.placements):
        raise PlanError(
            f"A parameter of shape {tuple(param.shape)} is placed as {param.placements}. Muon "
            "brings together matrices that are divided, not terms of a sum. Give it to AdamW "
            "(adamw: [...])."
        )
    return (param.device_mesh, axes) if axes else (None, ())
