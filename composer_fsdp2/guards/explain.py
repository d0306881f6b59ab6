"""Says in a sentence what an error of torch means for a sharded model, or what has no effect.

[Note: explained errors] Some mistakes are only possible with FSDP2, and torch speaks of them in
its own terms: of DTensors, of storage, of custom Functions. Such an error passes through the
model's forward or the Trainer's step. Its traceback shows the line at fault, and the run knows
which unit it has come to last. Every other error goes on as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Generator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import errors
from composer_fsdp2.errors import PlanError, ShardReadError
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.tensors import tree_leaves
from composer_fsdp2.torch_private.units import (
    gathered_param,
    has_run,
    is_gathered,
    params_of,
    sharded_param,
)

__all__ = ["ExplainErrors", "explained", "explained_reading"]


class ExplainErrors(StepListener):
    """Explains errors that leave the model's forward.

    While ranks compare their collectives, an error of one rank is raised on all of them.
    """

    def forward_failed(self, error: Exception) -> None:
        """Raises an explained error instead of torch's. Collective: yes, in a checked step.

        Raises:
            PlanError: what the error means for a sharded model.
        """
        explanation = _explain(self.run, error)
        if explanation is None:
            return
        try:
            self.run.tell("failed", str(explanation))
        except PlanError as common:
            raise common from error
        raise explanation from error


@contextlib.contextmanager
def explained(run: Run) -> Generator[None]:
    """Explains errors that leave the block, where they have to do with FSDP2.

    Collective: no.

    Raises:
        PlanError: with the line and what to write instead; torch's error is its cause.
    """
    try:
        yield
    except Exception as error:  # newer torch asserts where older torch raises a RuntimeError
        explanation = _explain(run, error)
        if explanation is None:
            raise
        raise explanation from error


@contextlib.contextmanager
def explained_reading() -> Generator[None]:
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
        said = " ".join(str(error).split())[:100]
        raise ShardReadError(
            f"Code outside the model computed with a sharded tensor{_line_of(error)} in a way for "
            f"which torch has no rule ({said}). This rank holds a part of the tensor, so the "
            "result would be of that part. Compute with `composer_fsdp2.full_tensor(model, name)` "
            "on every rank, or inside `with composer_fsdp2.summon_full_params(model):`; clip with "
            "composer_fsdp2.clip_grad_norm_."
        ) from error


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
_DTENSOR = str(Path("torch", "distributed", "tensor"))
"""folder of torch whose assertions are about DTensors"""
_DTYPES = (
    "same dtype",
    "same datatype",
    "mixed dtype",
    "scalar type",
    "type should be the same",
    "type and weight type",
    "must be equal",  # followed by both dtypes, of attention
)


def _is_unknown_of_shards(error: Exception) -> bool:
    """Whether torch has no sharding rule for an operator of DTensors."""
    return type(error).__name__ in _NO_RULE_KINDS or any(part in str(error) for part in _NO_RULE)


def _explain(run: Run, error: Exception) -> PlanError | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return None  # nothing of it may be looked at: that would keep alive what it should free
    frames = traceback.extract_tb(error.__traceback__)
    # Torch asserts where a DTensor is added to a plain tensor.
    asserts = isinstance(error, AssertionError) and frames and _DTENSOR in frames[-1].filename
    shards = [name for name, p in run.model.named_parameters() if isinstance(p, DTensor)]
    if shards and (asserts or _is_unknown_of_shards(error)):
        return PlanError(_mixed(run.model, error, shards))
    if "storage of size 0" in text:
        return PlanError(
            "The model computed with the memory of a gathered parameter that FSDP2 had "
            f"freed{_line_of(error)}. Somebody keeps a parameter, or a view of it, beyond the "
            "forward of its unit; or the output of a unit is a view and was changed in place, so "
            "that FSDP2 did not learn of backward; or the loss depends on a value that a unit kept "
            "in an attribute or by a hook, but not in its first step. Read parameters from their "
            "module in every forward, keep copies (weight.detach().clone()), write x = x + y "
            "instead of x += y for what a unit returns, and return what the loss depends on, or "
            "put it into a list or dict that the unit is given."
        )
    if "is a view and is being modified inplace" in text and "custom Function" in text:
        return PlanError(
            f"The model changes an input or output of a unit in place{_line_of(error)}. The unit "
            f"that ran last is {f'{run.entered!r}' if run.entered else 'the root'}. FSDP2 learns "
            "from these tensors when backward has come to the unit, and a change in place would "
            "cut them off. Write a new tensor: x = x * 2 instead of x.mul_(2), or x = x.clone() "
            "before the change."
        )
    if any(part in text for part in _DTYPES) and (units := _casting(run)):
        objects = [leaf for leaf in tree_leaves(run.inputs) if not isinstance(leaf, torch.Tensor)]
        # Classes of objects with tensors that nobody casts.
        kinds = sorted(
            {
                f"a {type(leaf).__name__}"
                for leaf in objects
                if not dataclasses.is_dataclass(leaf)
                for value in getattr(leaf, "__dict__", {}).values()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            }
        )
        if kinds:
            return PlanError(
                f"The model was given tensors in {' and '.join(kinds)}, and computes with them in "
                f"another dtype than that in which {' and '.join(units)} gathers its parameters"
                f"{_line_of(error)}. FSDP2 casts tensors in tuples, lists and dictionaries, and "
                "nothing in other objects. Cast them in forward (x.to(self.weight.dtype)), give "
                "the model a dictionary, or train with an amp precision, which casts both."
            )
        return PlanError(
            "The model computes in another dtype than that in which "
            f"{' and '.join(units)} gathers its parameters{_line_of(error)}. What comes into the "
            "model is cast, not what its modules compute in another dtype or cast themselves. Cast "
            "to the weight's dtype (x.to(self.weight.dtype)), train with an amp precision, which "
            "casts both, have each unit cast its inputs (cast_forward_inputs: true in "
            "mixed_precision), or keep the unit's parameters in their own dtype: mixed_precision: "
            "FULL for the unit in `fsdp_wrap_fn` or `wrap_policy`; keep_fp32, if that is float32."
        )
    return None


def _casting(run: Run) -> list[str]:
    """Units that are gathered now, in another dtype than that of their parameters."""
    return [
        f"unit '{unit}'" if unit else "the root unit"
        for unit, groups in run.groups.items()
        if any(
            has_run(param) and gathered_param(param).dtype != sharded_param(param).dtype
            for group in groups
            if is_gathered(group)
            for param in params_of(group)
        )
    ]


# Whole paths: a user's own folder may be called torch or composer_fsdp2.
_NOT_THE_USERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, errors.__file__))


def _frame_of(error: Exception) -> traceback.FrameSummary | None:
    """Returns the user's last line of code: the last that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = (frame for frame in reversed(frames) if not frame.filename.startswith(_NOT_THE_USERS))
    return next(theirs, None)


def _line_of(error: Exception) -> str:
    frame = _frame_of(error)
    if frame is None:
        return ""
    code = f": `{frame.line}`" if frame.line else ""
    return f" ({frame.filename}:{frame.lineno}{code})"


def _mixed(model: nn.Module, error: Exception, shards: list[str]) -> str:
    frame = _frame_of(error)
    line, method = (frame.line or "", frame.name) if frame is not None else ("", "")
    # Those that the code names, such as `self.blocks[0].up.weight`.
    named = [name for name in shards if ".".join(name.split(".")[-2:]) in line]
    param = f"a parameter such as '{named[0]}'" if named else "a parameter"
    is_public = not method.startswith("_") and not hasattr(nn.Module, method)
    holders = [
        f"{name}.{method}".lstrip(".")
        for name, module in model.named_modules()
        if is_public and callable(getattr(type(module), method, None))
    ]
    method = (
        holders[0] if len(holders) == 1 else f"path.to.module.{method if holders else 'method'}"
    )
    return (
        f"The model computed with this rank's shard of {param}{_line_of(error)}. The whole "
        "parameter is there only while the forward of its unit runs, and this was outside. Call "
        "the module, not its forward by name; or name the method that is called instead of "
        f"forward, so that it gathers too (forward_methods: ['{method}']); or choose the units so "
        "that whatever uses the parameter lies inside one: wrap_policy, with the module around "
        "both in `names`, or without a unit so small. A penalty over all parameters is the "
        "optimizer's weight_decay, or is computed with `param.full_tensor()` of each parameter "
        "that is a DTensor."
    )
