"""Muon for sharded models: one optimizer with two algorithms.

Hidden matrices get orthogonalised momentum, everything else AdamW. What a matrix becomes is
computed from the whole matrix in one place, so that it is the same on any number of ranks; see
[Note: exchange] in `optim.muon_exchange`.
"""

from __future__ import annotations

import itertools
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

from composer_fsdp2.errors import PlanError
from composer_fsdp2.optim.local import local_gradient
from composer_fsdp2.optim.muon_exchange import Exchange
from composer_fsdp2.optim.muon_groups import (
    Blocks,
    Choice,
    Overrides,
    choose,
    choose_by_names,
    with_blocks,
)
from composer_fsdp2.optim.muon_iteration import Iteration, Layout, iterate, lr_ratio
from composer_fsdp2.optim.muon_places import Parameter, Piece, RankGrid
from composer_fsdp2.optim.muon_settings import (
    ITERATION_DTYPES,
    PlannedGroups,
    by_shape,
    check_algorithm,
    check_values,
    divide_group,
    dtype_name,
    follow_parameters,
    globs,
    group_entries,
    make_state,
    mark_of,
    overwrite,
)
from composer_fsdp2.optim.norms import local_part
from composer_fsdp2.plan.module_tree import ModuleTree

__all__ = ["Muon"]


class Muon(torch.optim.Optimizer):
    """Steps hidden matrices by Muon and all other parameters by AdamW.

    Collective: `step` is, for sharded parameters, over their mesh.

    It can be built before `prepare_fully_shard` or after it. From a module it knows at once which
    parameters are hidden matrices; from `model.parameters()` it learns it when the model is
    prepared; from `model.named_parameters()` also without, by names and shapes.

    Args:
        params: a module, parameters, named parameters, or groups, each of which may say
            `algorithm: muon` or `adamw`, and `blocks`.
        lr: learning rate of both algorithms.
        weight_decay: of both; decoupled, times the learning rate, as in AdamW.
        momentum: of Muon: how much of the average stays.
        nesterov: whether Muon looks one step ahead.
        ns_coefficients: of Newton-Schulz, three numbers.
        eps: least norm that Newton-Schulz divides by.
        ns_steps: how often Newton-Schulz is iterated.
        adjust_lr_fn: how the shape of a matrix changes its learning rate: `match_rms_adamw` lets
            one rate serve both algorithms; `original` and `spectral_unclamped` as in torch.
        iteration_dtype: `bf16` or `fp32`, in which matrices also travel.
        adamw_lr: learning rate of AdamW; that of Muon by default.
        adamw_weight_decay: of AdamW; that of Muon by default.
        adamw_betas: of AdamW.
        adamw_eps: of AdamW.
        muon: globs of parameters that get Muon whatever they are.
        adamw: globs of parameters that get AdamW whatever they are.
        blocks: matrices that are joined in one parameter, by glob: their number, or the outputs of
            each; `null` for one matrix; `{turns: 8, outputs: [4, 2, 2]}` for eight times four
            outputs of the first, two of the second and two of the third. Those of `Wqkv`,
            `qkv_proj`, `query_key_value`, `gate_up_proj` and their like are known.
        bucket_bytes: what a rank holds of whole matrices at a time; one matrix at least.

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
            "iteration_dtype": dtype_name(iteration_dtype),
            "adamw_betas": tuple(adamw_betas),
            "adamw_eps": adamw_eps,
        }
        self._for_adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
        self._overrides = Overrides(globs(muon), globs(adamw), dict(blocks or {}))
        self._bucket_bytes = bucket_bytes
        self._layouts: list[list[Layout]] = []
        """of the parameters of each group, in their order"""
        self._stepped: list[list[Tensor]] = []
        """the parameters of each group in the last step"""
        self._exchanges: dict[Any, _Held] = {}
        model = params if isinstance(params, nn.Module) else None
        given: Any = params if model is None else model.parameters()
        super().__init__(given, defaults)
        if model is not None:
            self.assign_groups(self.plan_groups(ModuleTree.read(model)).without_empty())

    # --- Groups. ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; one without an algorithm is divided when the model is known.

        Collective: no.

        Args:
            param_group: `params` and settings.

        Raises:
            ConfigError: for a wrong value.
            PlanError: for a vector in a group of Muon.
        """
        algorithm = param_group.get("algorithm")
        own = frozenset(param_group)
        blocks = param_group.pop("blocks", None)
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        check_values(group)
        if algorithm is None:
            parts = by_shape(group, own, self._for_adamw)
            self.param_groups += parts
            self._layouts += [[Layout()] * len(part["params"]) for part in parts]
            return
        if algorithm == "adamw":
            overwrite(group, self._for_adamw, own)
        number = len(self.param_groups)
        check_algorithm(group, number)
        layouts = [
            with_blocks(f"parameter {index} of group {number}", param.shape, Layout(), blocks)
            if algorithm == "muon" and blocks is not None
            else Layout()
            for index, param in enumerate(group["params"])
        ]
        self.param_groups.append(group)
        self._layouts.append(layouts)

    def plan_groups(self, tree: ModuleTree) -> PlannedGroups:
        """Settles what every parameter gets, and changes nothing. Collective: no.

        Args:
            tree: of the model whose parameters it holds; sharded or not.

        Returns:
            What `assign_groups` takes; as text, for ranks to compare.

        Raises:
            PlanError: for globs that match nothing, and for a vector that is to be a matrix.
        """
        names = {id(ref.param): ref.name for ref in reversed(tree.params)}
        return self._plan(choose(tree, self._overrides), names)

    def decide(self, model: nn.Module) -> None:
        """Settles which parameters are hidden matrices, where that is still open. Collective: no.

        Args:
            model: whose parameters it holds.
        """
        if any(mark_of(group) is not None for group in self.param_groups):
            self.assign_groups(self.plan_groups(ModuleTree.read(model)))

    def assign_groups(self, planned: PlannedGroups) -> None:
        """Gives every parameter its algorithm. Collective: no.

        Args:
            planned: by `plan_groups`, with the parameters that it holds now.
        """
        self._layouts, self._stepped = planned.layouts, []
        self.param_groups[:] = planned.groups

    def _plan(self, choices: Mapping[int, Choice], names: Mapping[int, str]) -> PlannedGroups:
        """Groups as they will be, each of one algorithm."""
        groups: list[tuple[dict[str, Any], Sequence[Layout]]] = []
        held = list(zip(self.param_groups, self._layouts, strict=True))
        for mark, same in itertools.groupby(held, key=lambda pair: mark_of(pair[0])):
            if mark is None:
                groups += same
                continue
            parts = divide_group([group for group, _ in same], choices)
            groups += [(part, [Layout()] * len(part["params"])) for part in parts]
        layouts = [
            [
                choices[id(param)].layout if id(param) in choices and given == Layout() else given
                for param, given in zip(group["params"], known, strict=True)
            ]
            if group["algorithm"] == "muon"
            else list(known)
            for group, known in groups
        ]
        planned = PlannedGroups([group for group, _ in groups], layouts)
        planned.text = f"buckets of {self._bucket_bytes} bytes a rank\n{planned.describe(names)}"
        return planned

    def _decide(self) -> None:
        """Divides what is not divided yet, as well as it can be without the model."""
        open_groups = [group for group in self.param_groups if group["algorithm"] is None]
        if not open_groups:
            return
        if any("param_names" not in group for group in open_groups):
            raise PlanError(
                "Muon does not know which of its matrices are hidden ones: it was built from "
                "parameters without names, and no model was prepared. Embeddings and heads would "
                "be orthogonalised. Build it from the model (`Muon(model, lr=...)`) or from "
                "model.named_parameters(), give every group an `algorithm`, or call "
                "prepare_fully_shard(model, optimizer, ...) before the first step."
            )
        entries = [entry for group in self.param_groups for entry in group_entries(group)]
        named = [(name, param) for param, name in entries if name]
        self.assign_groups(self._plan(choose_by_names(named, self._overrides), {}))

    # --- The step. ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps every parameter that has a gradient.

        Collective: yes, over the mesh of sharded matrices. Ranks have gradients for the same ones,
        which `unused_parameters` sees to.

        Args:
            closure: computes the loss anew.

        Returns:
            What the closure returned.

        Raises:
            PlanError: it is not known yet which parameters are hidden matrices.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._decide()
        follow_parameters(self.param_groups, self._stepped, self._layouts)
        # torch counts no change of a local tensor for the DTensor around it.
        increment_version([p for g in self.param_groups for p in g["params"] if p.grad is not None])
        matrices: list[_Matrix] = []
        for group, layouts in zip(self.param_groups, self._layouts, strict=True):
            make_state(group, self.state)
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
            else:
                matrices += self._momentum(group, layouts)
        self._step_matrices(matrices)
        return loss

    def _step_adamw(self, group: Mapping[str, Any]) -> None:
        given = [(param, local_gradient(param)) for param in group["params"]]
        stepped = [(p, grad, self.state[p]) for p, grad in given if grad is not None]
        held = [one for one in stepped if one[1].numel()]
        for _, grad, state in stepped:
            if not grad.numel():
                state["step"] += 1
        if not held:
            return
        beta1, beta2 = group["adamw_betas"]
        adamw(
            [local_part(param) for param, _, _ in held],
            [grad for _, grad, _ in held],
            [local_part(state["exp_avg"]) for _, _, state in held],
            [local_part(state["exp_avg_sq"]) for _, _, state in held],
            [],
            [state["step"] for _, _, state in held],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )

    def _momentum(self, group: Mapping[str, Any], layouts: Sequence[Layout]) -> list[_Matrix]:
        """Takes gradients into the momentum and returns what is to be orthogonalised."""
        how = Iteration(
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
            ITERATION_DTYPES[group["iteration_dtype"]],
        )
        found: list[_Matrix] = []
        for param, layout in zip(group["params"], layouts, strict=True):
            grad = local_gradient(param)
            if grad is None:
                continue
            local, average = local_part(param), local_part(self.state[param]["momentum_buffer"])
            grad = grad.to(average.dtype)
            average.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
            local.mul_(1 - float(group["lr"]) * group["weight_decay"])
            found.append(_Matrix(param, local, update.to(how.dtype), layout, how, group))
        return found

    def _step_matrices(self, matrices: Sequence[_Matrix]) -> None:
        together: dict[Any, list[_Matrix]] = defaultdict(list)
        for matrix in matrices:
            place = _place(matrix.param)
            if place is None:
                result = iterate(matrix.update, matrix.layout, matrix.how)
                shape = tuple(matrix.param.shape)
                matrix.apply(
                    matrix.layout, shape, Piece((0,) * len(shape), (0,) * len(shape), shape), result
                )
            else:
                together[(*place, matrix.how.dtype)].append(matrix)
        for key, members in together.items():
            self._exchange(key, members)

    def _exchange(
        self, key: tuple[DeviceMesh, tuple[int, ...], torch.dtype], members: list[_Matrix]
    ) -> None:
        """Collective: yes, over the mesh."""
        mesh, axes, dtype = key
        signature = tuple((id(matrix.param), matrix.layout) for matrix in members)
        held = self._exchanges.get(key)
        if held is None or held.signature != signature:
            params = [matrix.described(axes) for matrix in members]
            grid = RankGrid.of(mesh, axes)
            exchange = Exchange(params, grid, dtype.itemsize, self._bucket_bytes)
            held = _Held(signature, [matrix.param for matrix in members], exchange)
            self._exchanges[key] = held
        # Of the mesh, not of the shard: with cpu_offload that one is in CPU memory.
        device = torch.device(mesh.device_type)
        held.exchange.run(
            [matrix.update.to(device) for matrix in members],
            lambda item, whole: iterate(whole, item.layout, members[item.param].how),
            lambda item, piece, part: members[item.param].apply(
                item.layout, item.shape, piece, part
            ),
        )

    # --- Copies. ---

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state. Collective: no.

        Args:
            state_dict: of an optimizer with the same groups.
        """
        # torch's checkpoints lose the settings of groups that have no parameters.
        own = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        own += [{}] * len(state_dict["param_groups"])
        pairs = zip(own, state_dict["param_groups"], strict=False)
        groups = [{**settings, **group} for settings, group in pairs]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        own = ("_for_adamw", "_overrides", "_bucket_bytes", "_layouts")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stepped, self._exchanges = [], {}


@dataclass(slots=True, eq=False)
class _Matrix:
    """A parameter in one step."""

    param: Tensor
    local: Tensor
    """this rank's shard of it"""
    update: Tensor
    """of the shard, in the dtype of the iteration"""
    layout: Layout
    how: Iteration
    group: Mapping[str, Any]

    def described(self, axes: Sequence[int]) -> Parameter:
        """Returns all that the exchange has to know."""
        assert isinstance(self.param, DTensor)
        return Parameter.of(self.param, axes, self.layout)

    def apply(self, layout: Layout, shape: Sequence[int], piece: Piece, result: Tensor) -> None:
        """Adds a piece of a result, whose item has this layout and shape, to the shard."""
        lr, adjust = float(self.group["lr"]), self.group["adjust_lr_fn"]
        inputs = shape[-2] if layout.transposed else shape[-1]
        target = piece.in_shard(self.local)
        ratios = [lr_ratio(adjust, size, inputs) for size in layout.sizes(shape)]
        if len(set(ratios)) == 1:
            target.add_(result.to(target.device), alpha=-lr * ratios[0])
            return
        axis = layout.axis % result.ndim
        end, start = result.shape[axis], -piece.there[axis]
        for number, size in layout.parts(shape):
            begin, after = max(start, 0), start + size
            if (held := min(after, end) - begin) > 0:
                part = result.narrow(axis, begin, held).to(target.device)
                target.narrow(axis, begin, held).add_(part, alpha=-lr * ratios[number])
            start = after


@dataclass(slots=True, eq=False)
class _Held:
    """An exchange and what it was made for, held so that no id is given twice."""

    signature: tuple[Any, ...]
    params: list[Tensor]
    exchange: Exchange


def _place(param: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Where a parameter is divided; None if every rank has all of it."""
    if not isinstance(param, DTensor):
        return None
    placed = list(enumerate(param.placements))
    axes = tuple(axis for axis, place in placed if getattr(place, "dim", None) is not None)
    others = [p for axis, p in placed if axis not in axes and not p.is_replicate()]
    if others or (len(axes) > 1 and param.ndim > 2):
        raise PlanError(
            f"A parameter of shape {tuple(param.shape)} is placed as {param.placements}. Muon "
            "brings together matrices in two dimensions, and lists of them that are divided along "
            "one axis of the mesh. Give it to AdamW (adamw: [...])."
        )
    return (param.device_mesh, axes) if axes else None
