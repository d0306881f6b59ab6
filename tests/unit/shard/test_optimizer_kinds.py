"""Optimizers that cannot work on shards, by the package they come from."""

from __future__ import annotations

import pytest
import torch
from composer.optim import DecoupledAdamW
from torch import nn

from composer_fsdp2 import PlanError
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.shard.optimizer import check_optimizers


def _of(module: str, name: str) -> type[torch.optim.SGD]:
    """A class as a package that need not be installed would have it."""
    return type(name, (torch.optim.SGD,), {"__module__": module})


RAW = "kernels take raw pointers"
BITS = "depends on the number of ranks"
REFUSED = [
    ("bitsandbytes.optim.adamw", "AdamW", RAW),
    ("bitsandbytes.optim.lion", "PagedLion", RAW),
    ("bitsandbytes.optim.adamw", "AdamW8bit", BITS),
    ("bitsandbytes.optim.adamw", "PagedAdamW8bit", BITS),
    ("apex.optimizers.fused_adam", "FusedAdam", RAW),
    ("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam", RAW),
    ("deepspeed.ops.adam.fused_adam", "FusedAdam", RAW),
    ("torchao.optim.adam", "AdamW8bit", BITS),
    ("torchao.prototype.low_bit_optim.adam", "AdamW4bit", BITS),
    ("torchao.optim.adam", "AdamFp8", BITS),
    ("torchao.optim.cpu_offload", "CPUOffloadOptimizer", "cpu_offload: true"),
]


def check(make: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(2, 2)
    check_optimizers([make(model.parameters(), lr=0.1)], ModuleTree.read(model), gives_values=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(("module", "name", "why"), REFUSED)
def test_they_are_refused_by_name_with_what_works(module: str, name: str, why: str):
    made = _of(module, name)
    for cls in (made, type("Mine", (made,), {})):
        with pytest.raises(PlanError, match=why) as caught:
            check(cls)
        assert f"The optimizer {cls.__name__} " in str(caught.value)
        assert module.partition(".")[0] in str(caught.value)
        assert " Use " in str(caught.value)


@pytest.mark.parametrize(
    "cls",
    [
        torch.optim.SGD,
        torch.optim.AdamW,
        DecoupledAdamW,
        _of("my_package.optim", "AdamW8bit"),
        _of("torchao.optim.adam", "_AdamW"),
    ],
)
def test_others_are_not(cls: type[torch.optim.Optimizer]):
    check(cls)


def test_the_real_ones_are():
    optim = pytest.importorskip("torchao.optim", reason="needs the extra fp8")
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8"):
        with pytest.raises(PlanError, match=BITS):
            check(getattr(optim, name))
