"""`ModelWeights` yields what `save_pretrained` of an unsharded copy writes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import ModelWeights, PlanError, prepare_fully_shard
from composer_fsdp2.trainer.extensions.weights_out import WeightInfo
from tests.dist.test_tensor_parallel import FAMILIES as DENSE
from tests.dist.test_tensor_parallel import loss_of
from tests.dist.test_tensor_uneven import ODD_FAMILIES, odd_batches
from tests.support.experts import FAMILIES as EXPERTS

pytestmark = [
    pytest.mark.world_size(4),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]

TENSOR = {"tensor_parallel": 2}
SMALL = 2048
"""bytes of a bucket: several weights of the small models, and less than their largest"""

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("Llama, tied", {}),
    ("Llama, tied", {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}),
    ("Llama, tied", TENSOR | {"activation_checkpointing": True}),
    ("MPT, grouped", TENSOR),
    ("Phi-3, odd", TENSOR),
    *((name, {"expert_parallel": 2}) for name in EXPERTS if name != "GPT-OSS"),
    *((name, {}) for name in EXPERTS),
]


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family in EXPERTS:
        return EXPERTS[family][0]()
    return (DENSE | {f"{name}, odd": make for name, make in ODD_FAMILIES.items()})[family]()


def saved(model: Any, folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    """What one process writes."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder, **kwargs)
    dist.barrier()
    return load_file(next(folder.glob("*.safetensors")))


def gathered(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """What is yielded, and as was announced."""
    pairs = [(name, tensor.clone()) for name, tensor in weights]
    if pairs or dist.get_rank() == 0:
        told = [WeightInfo(name, value.dtype, tuple(value.shape)) for name, value in pairs]
        assert told == weights.metadata()
    return dict(pairs)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.table("MPT, grouped-settings3", "Mixtral-settings5")
@pytest.mark.parametrize(("family", "settings"), LAYOUTS)
def test_as_saved_by_one_process(family: str, settings: dict[str, Any], tmp_path: Path):
    expected = saved(made(family), tmp_path)
    model = made(family)
    prepare_fully_shard(model, None, settings, precision="fp32")
    found = gathered(ModelWeights(model, bucket_bytes=SMALL))
    same(found, expected if dist.get_rank() == 0 else {})
    cast = gathered(ModelWeights(model, dtype=torch.bfloat16, every_rank=True))
    same(cast, {name: value.bfloat16() for name, value in expected.items()})


@pytest.mark.world_size(2)
def test_a_tied_weight_under_each_of_its_names():
    model = made("Llama, tied")
    prepare_fully_shard(model, None, {}, precision="fp32")
    names = [info.name for info in ModelWeights(model, tied=True).metadata()]
    once = [info.name for info in ModelWeights(model).metadata()]
    assert [*once, "lm_head.weight"] == names


@pytest.mark.world_size(2)
def test_between_microbatches_and_in_buckets_of_a_size():
    model = made("Llama, tied")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepare_fully_shard(model, None, {"reshard_after_forward": False}, precision="fp32")
    weights = ModelWeights(model, bucket_bytes=1000, every_rank=True)
    sizes: list[int] = []
    found: dict[str, torch.Tensor] = {}
    for bucket in weights.buckets():
        sizes.append(sum(tensor.nbytes for _, tensor in bucket))
        assert sizes[-1] <= 1000 or len(bucket) == 1
        found |= bucket
        if len(sizes) == 1:  # leaves units gathered
            loss_of(model, odd_batches(1)[0]).backward()
    assert len(sizes) > 3
    assert max(sizes) > 1000
    expected.pop("lm_head.weight")
    same(found, expected)
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.world_size(2)
def test_a_model_of_no_library():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    prepare_fully_shard(model, None, {}, precision="fp32")
    same(gathered(ModelWeights(model, every_rank=True)), expected)
    with pytest.raises(PlanError, match="without adapters of PEFT"):
        ModelWeights(model, adapters="only")
    bad: Any = "merge"
    with pytest.raises(PlanError, match="neither 'merged' nor 'only'"):
        ModelWeights(model, adapters=bad)
