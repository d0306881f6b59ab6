"""Every two controls of memory and speed together, against an unsharded copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.step.run import run_of
from tests.support.models import TinyLM, batches, lm_loss
from tests.support.pairs import Case, covering, pairs_of
from tests.support.parity import TOLERANCE, assert_close, gathered

CONTROLS: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "full", "selective", "offload"),
    "gradient_sync": ("every", "last", "reduce_scatter_only"),
    "reshard_after_forward": ("auto", True, False, 2),
    "copies": (1, 2),
    "prefetch": (0, 2),
    "compile": (False, True),
    "precision": ("fp32", "bf16", "islands"),
    "tie": ("none", "two modules"),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "offload": {"activation_checkpointing": True, "activation_cpu_offload": True},
}
LOW = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {"mixed_precision": "FULL"},
    "bf16": {"mixed_precision": LOW},
    "islands": {"mixed_precision": LOW, "keep_fp32": ["blocks.*.norm"]},
}
STEPS, MICROBATCHES = 3, 2
WIDER_SUMS = hasattr(FSDPParam, "unsharded_grad_dtype")
"""whether this torch (2.15) adds the gradients of both uses of a tied weight in the dtype of the
reduction where it keeps them for a later microbatch; all others are added as they are computed"""


def allowed(case: Case) -> bool:
    """Only HSDP can average over copies later, and two ranks have no smaller groups."""
    if case["gradient_sync"] == "reduce_scatter_only" and case["copies"] == 1:
        return False
    return not (case["reshard_after_forward"] == 2 and case["copies"] == 2)


CASES = covering(CONTROLS, allowed)


def test_every_pair_is_there():
    found = {pair for case in CASES for pair in pairs_of(case)}
    names = list(CONTROLS)
    missing = []
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            for value in CONTROLS[one]:
                wanted = {((one, value), (other, b)) for b in CONTROLS[other]}
                missing += sorted(map(str, wanted - found))
    assert missing == [
        "(('gradient_sync', 'reduce_scatter_only'), ('reshard_after_forward', 2))",
        "(('gradient_sync', 'reduce_scatter_only'), ('copies', 1))",
        "(('reshard_after_forward', 2), ('copies', 2))",
    ]


def config_of(case: Case) -> dict[str, Any]:
    return {
        **RECOMPUTE[case["recompute"]],
        **PRECISION[case["precision"]],
        "gradient_sync": case["gradient_sync"],
        "reshard_after_forward": case["reshard_after_forward"],
        "data_parallel_replicate_degree": case["copies"],
        "forward_prefetch": case["prefetch"],
        "backward_prefetch": case["prefetch"],
        "compile": {"backend": "eager"} if case["compile"] else False,
    }


def name_of(case: Case) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


# The compiler of torch 2.13 looks at the gradients of inputs that are no leaves.
@pytest.mark.table(
    "recompute=none gradient_sync=last reshard_after_forward=False copies=1 prefetch="
    "0 compile=False precision=fp32 tie=none"
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_controls_together(case: Case):
    model = TinyLM(case["tie"])
    oracle = copy.deepcopy(model)
    pair = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (oracle, model)]
    prepare_fully_shard(model, pair[1], config_of(case))
    sharding = run_of(model)
    assert sharding is not None
    for step, batch in enumerate(batches(STEPS, 4 * MICROBATCHES)):
        parts = [part.chunk(4 * MICROBATCHES) for part in batch]
        microbatches = list(zip(*parts, strict=True))
        expected = [
            backward_alone(oracle, one, case["precision"], wider=_is_wider(case, step, index))
            for index, one in enumerate(microbatches)
        ]
        own = microbatches[dist.get_rank() :: 4]
        with sharding.accumulation.batch():
            for number, microbatch in enumerate(own, 1):
                with sharding.accumulation.microbatch(last=number == MICROBATCHES):
                    loss = lm_loss(model(microbatch[0]), microbatch[1])
                    assert_close("loss", expected[4 * number - 4 + dist.get_rank()], loss.detach())
                    (loss / MICROBATCHES).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    values = gathered(oracle)
    for name, value in gathered(model).items():
        assert (value - values[name]).abs().max().item() <= TOLERANCE, name


def _is_wider(case: Case, step: int, index: int) -> bool:
    """In the first microbatch of a batch, but for the first one of all, which does reduce."""
    return WIDER_SUMS and case["gradient_sync"] == "last" and step > 0 and index // 4 == 0


def backward_alone(
    oracle: TinyLM, microbatch: tuple[torch.Tensor, ...], precision: str, *, wider: bool
) -> torch.Tensor:
    """One microbatch of one rank, of which all count the same; sums up in fp32."""
    low = oracle if precision == "fp32" else lowered(oracle, islands=precision == "islands")
    if wider:
        for param in low.parameters():
            param.grad_dtype = torch.float32
    loss = lm_loss(low(microbatch[0]), microbatch[1])
    (loss / (4 * MICROBATCHES)).backward()
    if low is not oracle:
        for param, computed in zip(oracle.parameters(), low.parameters(), strict=True):
            grad = computed.grad
            assert grad is not None
            param.grad = grad.float() if param.grad is None else param.grad + grad.float()
    return loss.detach()


def lowered(oracle: TinyLM, *, islands: bool) -> TinyLM:
    """A copy that computes in bf16, its norms in fp32 where they are islands."""
    low = copy.deepcopy(oracle).to(torch.bfloat16)
    low.zero_grad()
    if islands:
        for block, own in zip(low.blocks, oracle.blocks, strict=True):
            block.norm = copy.deepcopy(own.norm)
            block.norm.zero_grad()
            block.norm.register_forward_pre_hook(lambda _module, inputs: (inputs[0].float(),))
            block.norm.register_forward_hook(lambda _module, _inputs, out: out.bfloat16())
    return low
