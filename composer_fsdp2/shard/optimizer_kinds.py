"""Optimizers that cannot work on shards, known by their class and the module it comes from."""

from __future__ import annotations

import re

import torch

from composer_fsdp2.errors import PlanError

__all__ = ["check_optimizer_kind"]

_KERNELS = ("bitsandbytes", "apex", "transformer_engine", "deepspeed", "colossalai")
"""packages whose kernels take raw pointers; a DTensor's own is null"""
_LOW_BIT_PACKAGES = ("torchao", "bitsandbytes", "llmfoundry", "composer")
_LOW_BIT = re.compile("8_?bit|4_?bit|fp8|lion8b", re.IGNORECASE)
_OFFLOAD = "CPUOffloadOptimizer"
_INSTEAD = (
    "torch.optim.AdamW(..., fused=True) or Composer's DecoupledAdamW; FSDP2 shards their state, "
    "and optimizer_state: {bits: 8} saves as much memory"
)

_NEEDS_WHOLE: dict[type[torch.optim.Optimizer], str] = {
    kind: why
    for name, why in {
        "Adafactor": "scales each step by norms over rows, columns and the whole parameter",
        "LBFGS": "joins all gradients into one vector and takes its products",
        "Rprop": "picks elements by sign, which not every torch can on shards",
        "SparseAdam": "steps sparse gradients, and FSDP2 reduces dense ones",
    }.items()
    if (kind := getattr(torch.optim, name, None)) is not None
}
"""optimizers of torch that fail or go another way on shards, and why"""


_TORCH_MUON: type[torch.optim.Optimizer] | None = getattr(torch.optim, "Muon", None)


def check_optimizer_kind(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that read past DTensors, or whose state is another on other ranks.

    Collective: no. Packages are not imported: the classes an optimizer derives from name theirs.

    Raises:
        PlanError: with what to use instead.
    """
    name = type(optimizer).__name__
    if _TORCH_MUON is not None and isinstance(optimizer, _TORCH_MUON):
        raise PlanError(
            f"The optimizer {name} is torch.optim.Muon, which orthogonalises matrices piece by "
            "piece where they are sharded: its result depends on the number of ranks, and each "
            "matrix takes more than ten collectives. Use composer_fsdp2.Muon(model, ...), which "
            "brings each matrix to one rank and steps all other parameters by AdamW; "
            "adjust_lr_fn='original' is torch's default."
        )
    for kind, why in _NEEDS_WHOLE.items():
        if isinstance(optimizer, kind):
            raise PlanError(
                f"The optimizer {name} {why}. On each rank it would get a part of every "
                "parameter, and stop or compute something else than on whole ones. Use one that "
                "steps element by element: AdamW, Adam, SGD, Adagrad, RMSprop, or Composer's "
                "DecoupledAdamW and DecoupledSGDW."
            )
    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
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
        if package == "torchao" and cls.__name__ == _OFFLOAD:
            raise PlanError(
                f"The optimizer {name} of torchao steps copies of the parameters in CPU memory, "
                "which it made before the model was sharded. The model would train nothing. Use "
                "its inner optimizer, with optimizer_state: {device: cpu} in "
                "parallelism_config.fsdp2, or cpu_offload: true."
            )
