"""Says in a sentence what an error of torch means for a sharded model.

[Note: explained errors] Some mistakes are only possible with FSDP2, and torch speaks of them in
its own terms: of DTensors, of storage, of custom Functions. Such an error passes through the
model's forward or the Trainer's step. There the frames of its traceback show which module was at
work. Every other error goes on as it is.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import types
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import errors
from composer_fsdp2.errors import PlanError, ShardReadError
from composer_fsdp2.shard.torch_private.gathered import gathered_param, is_gathered
from composer_fsdp2.shard.torch_private.units import (
    has_run,
    param_groups,
    params_of,
    sharded_param,
)
from composer_fsdp2.step.run import Run, StepListener

__all__ = ["ExplainErrors", "explained", "explained_reading"]


class ExplainErrors(StepListener):
    """Explains errors that leave the model's forward.

    While ranks compare their collectives, an error of one rank is raised on all of them.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        run.model.forward = _Explained(run, run.model.forward)


class _Explained:
    """A forward that explains its errors; copied with its module, as a bound method is."""

    def __init__(self, run: Run, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._run, self._forward = run, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            explanation = _explain(self._run.model, error)
            if explanation is None:
                raise
            try:
                self._run.tell("failed", str(explanation))
            except PlanError as common:
                raise common from error
            raise explanation from error


@contextlib.contextmanager
def explained(model: nn.Module) -> Generator[None]:
    """Explains errors that leave the block, where they have to do with FSDP2.

    Collective: no.

    Raises:
        PlanError: naming the module and what to write instead; torch's error is its cause.
    """
    try:
        yield
    except Exception as error:  # newer torch asserts where older torch raises a RuntimeError
        explanation = _explain(model, error)
        if explanation is None:
            raise
        raise explanation from error


@contextlib.contextmanager
def explained_reading(model: nn.Module) -> Generator[None]:
    """Explains errors of code that reads shards outside the model, as callbacks do.

    Collective: no.

    Raises:
        ShardReadError: naming the line and what to write instead; torch's error is its cause.
    """
    try:
        yield
    except ShardReadError:
        raise
    except (RuntimeError, ValueError) as error:
        if not _is_unknown_of_shards(error):
            raise
        raise ShardReadError(_unknown(_Scene(model, error), error)) from error


def _is_unknown_of_shards(error: Exception) -> bool:
    """Whether torch was asked for something of a DTensor for which it has no rule."""
    return type(error).__name__ in _NO_RULE_KINDS or any(part in str(error) for part in _NO_RULE)


# Whole paths: a user's own folder may be called torch or composer_fsdp2.
_NOT_THE_USERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, errors.__file__))

_NO_RULE = (
    "does not have a sharding strategy",
    "Sharding propagation failed",
    "not supported for tensor subclasses, got DTensor",
    "access the data pointer on an invalid python storage",  # safetensors
    "mixed torch.Tensor and DTensor",
    "different mesh",  # of layers that tensor parallelism divides, and of those that are whole
    "same mesh",
)
_NO_RULE_KINDS = ("DataDependentOutputException", "DynamicOutputShapeException")
"""raised for DTensors by torch's own shape propagation"""

_DTYPES = (
    "same dtype",
    "same datatype",
    "mixed dtype",
    "scalar type",
    "type should be the same",
    "type and weight type",
    "must be equal",  # followed by both dtypes, of attention
)


def _explain(model: nn.Module, error: Exception) -> PlanError | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return None  # nothing of it may be looked at: that would keep alive what it should free
    scene = _Scene(model, error)
    if "mixed torch.Tensor and DTensor" in text or scene.is_of_shards(error):
        return PlanError(_mixed(scene))
    if _is_unknown_of_shards(error) and scene.shard() is not None:
        return PlanError(_mixed(scene))
    if "storage of size 0" in text:
        return PlanError(_freed(scene))
    if "is a view and is being modified inplace" in text and "custom Function" in text:
        return PlanError(_in_place(scene))
    if any(part in text for part in _DTYPES) and scene.casts():
        return PlanError(_other_dtype(scene))
    return None


class _Scene:
    """Which module an error was raised in, and at which line."""

    def __init__(self, model: nn.Module, error: BaseException) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._units = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
        self.frames = list(_frames_of(error.__traceback__))
        self.at: list[tuple[nn.Module, types.FrameType]] = [
            (holder, frame)
            for frame, _ in self.frames
            if isinstance(holder := frame.f_locals.get("self"), nn.Module)
            and id(holder) in self._names
        ]

    def is_of_shards(self, error: Exception) -> bool:
        """Whether DTensor asserts something, as it does where one is added to a plain tensor."""
        inside = self.frames[-1][0].f_globals.get("__name__", "") if self.frames else ""
        return isinstance(error, AssertionError) and inside.startswith("torch.distributed.tensor.")

    @property
    def module(self) -> nn.Module | None:
        """The innermost one whose code ran, none of torch's wrappers."""
        return self.at[-1][0] if self.at else None

    def title(self, module: nn.Module | None) -> str:
        if module is None:
            return "code outside the model"
        name = self._names[id(module)].replace("_checkpoint_wrapped_module.", "")
        kind = type(module).__name__.removeprefix("FSDP")
        return f"'{name}' ({kind})" if name else f"the model ({kind})"

    def line(self) -> str:
        """Returns the user's last line of code: the last that is neither torch's nor ours."""
        for frame, number in reversed(self.frames):
            file = frame.f_code.co_filename
            if not file.startswith(_NOT_THE_USERS):
                code = linecache.getline(file, number).strip()
                return f" ({file}:{number}: `{code}`)" if code else f" ({file}:{number})"
        return ""

    def shard(self) -> tuple[str, str] | None:
        """Names of the sharded parameter that was computed with, and of its unit."""
        module = self.module
        if module is None:
            return None
        shards = [(k, p) for k, p in module.named_parameters() if isinstance(p, DTensor)]
        line, own = self.line(), module._parameters
        # Of those inside, the one the code names, such as `self.blocks[0].up.weight`.
        shards.sort(key=lambda shard: ".".join(shard[0].split(".")[-2:]) not in line)
        shards.sort(key=lambda shard: shard[0] not in own)
        for key, param in shards[:1]:
            name = f"{self._names[id(module)]}.{key}".lstrip(".")
            return name.replace("_checkpoint_wrapped_module.", ""), self.unit_of(param)
        return None

    def unit_of(self, param: nn.Parameter) -> str:
        for name, unit in self._units.items():
            for group in param_groups(unit):
                if any(sharded_param(record) is param for record in params_of(group)):
                    return name
        return ""

    def running_unit(self) -> str | None:
        """The innermost unit whose forward, or another method, was running."""
        names = {id(unit): name for name, unit in self._units.items()}
        for module, _ in reversed(self.at):
            if id(module) in names:
                return names[id(module)]
        return None

    def methods(self) -> list[str]:
        """Methods of modules, besides forward, that were running, as `forward_methods` has them."""
        found: dict[str, None] = {}
        forwards: set[int] = set()
        for module, frame in self.at:
            if frame.f_code.co_name == "forward":
                forwards.add(id(module))
            # What its module's own forward calls gathers no more than that does.
            elif _is_method(frame, module) and id(module) not in forwards:
                found[f"{self._names[id(module)]}.{frame.f_code.co_name}".lstrip(".")] = None
        return list(found)

    def casts(self) -> bool:
        """Whether parameters of the running unit are gathered in another dtype than their own."""
        unit = self._units.get(self.running_unit() or "")
        groups = param_groups(unit) if unit is not None else []
        return any(
            has_run(param)
            and is_gathered(group)
            and gathered_param(param).dtype != sharded_param(param).dtype
            for group in groups
            for param in params_of(group)
        )


def _is_method(frame: types.FrameType, module: object) -> bool:
    """Whether it runs a method of the module that could be listed in `forward_methods`."""
    name = frame.f_code.co_name
    known = name == "forward" or name.startswith("_")
    return not known and callable(getattr(type(module), name, None))


def _frames_of(traceback: types.TracebackType | None) -> Iterator[tuple[types.FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


# --- What is said. ---


def _mixed(scene: _Scene) -> str:
    shard = scene.shard()
    name, unit = shard if shard is not None else ("a parameter", None)
    what = f"'{name}'" if shard is not None else name
    outside = _outside(scene.title(scene.module), what, unit, scene.line(), scene.methods())
    return (
        f"{outside} A penalty over all parameters is the optimizer's weight_decay, or is computed "
        "with `param.full_tensor()` of each parameter that is a DTensor."
    )


def _outside(module: str, param: str, unit: str | None, line: str, methods: list[str]) -> str:
    around = "its unit" if unit is None else f"unit '{unit}'" if unit else "the root unit"
    methods = methods or [f"{unit or 'path.to.module'}.method"]
    return (
        f"{module} computed with this rank's shard of {param}{line}. The whole parameter is "
        f"there only while the forward of {around} runs, and this was outside. "
        "Call the module, not its forward by name; or name the method that is called instead of "
        f"forward, so that it gathers too (forward_methods: ['{methods[-1]}']); or choose "
        "the units so that whatever uses the parameter lies inside one: wrap_policy, with the "
        "module around both in `names`, or "
        f"without {around if unit else 'a unit so small'}."
    )


def _unknown(scene: _Scene, error: Exception) -> str:
    said = " ".join(str(error).split())[:100]
    return (
        f"Code outside the model computed with a sharded tensor{scene.line()} in a way for which "
        f"torch has no rule ({said}). This rank holds a part of the tensor, so the result would be "
        "of that part. Compute with `composer_fsdp2.full_tensor(model, name)` on every rank, or "
        "inside `with composer_fsdp2.summon_full_params(model):`; clip with "
        "composer_fsdp2.clip_grad_norm_."
    )


def _freed(scene: _Scene) -> str:
    return (
        f"{scene.title(scene.module)} computed with the memory of a gathered parameter that FSDP2 "
        f"had freed{scene.line()}. Somebody keeps a parameter, or a view of it, beyond the forward "
        "of its unit; or the output of a unit is a view and was changed in place, so that FSDP2 "
        "did not learn of backward. Read parameters from their module in every forward, keep "
        "copies (weight.detach().clone()), and write x = x + y instead of x += y for what a unit "
        "returns."
    )


def _in_place(scene: _Scene) -> str:
    unit = scene.running_unit()
    where = f"unit '{unit}'" if unit else "the root unit"
    return (
        f"{scene.title(scene.module)} changes an input or output of {where} in "
        f"place{scene.line()}. FSDP2 learns from these tensors when backward has come to the unit, "
        "and a change in place would cut them off. Write a new tensor: x = x * 2 instead of "
        "x.mul_(2), or x = x.clone() before the change."
    )


def _other_dtype(scene: _Scene) -> str:
    unit = scene.running_unit()
    where = f"unit '{unit}'" if unit else "the root unit"
    return (
        f"{scene.title(scene.module)} computes in another dtype than that in which {where} gathers "
        f"its parameters{scene.line()}. What comes into the model is cast, not what its modules "
        "compute in another dtype or cast themselves. Cast to the weight's dtype "
        "(x.to(self.weight.dtype)), train with an amp precision, which casts both, have each unit "
        "cast its inputs (cast_forward_inputs: true in mixed_precision), or keep the unit's "
        "parameters in their own dtype: mixed_precision: FULL for the unit in `fsdp_wrap_fn` or "
        "`wrap_policy`; keep_fp32, if that is float32."
    )
