"""Linear layers in fp8, emulated: the numbers, what is sent, and what shards hold."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composer_fsdp2 import ConfigError, PlanError, prepare_fully_shard, summon_full_params
from tests.support.models import TinyLM, batches, lm_loss
from tests.support.parity import assert_same_values
from tests.support.traffic import Bytes

float8 = pytest.importorskip("torchao.float8", reason="needs the extra fp8")
PRELOAD = ("torchao.float8",)

LAYERS = [f"blocks.{block}.{part}" for block in range(2) for part in ("up", "down")]
MODEL = partial(TinyLM, layers=2, width=32)
EMULATED = {"emulate": True, "names": ["blocks.*.up", "blocks.*.down"]}
GATHERED = {**EMULATED, "all_gather": True}


def _model() -> TinyLM:
    torch.manual_seed(0)
    return MODEL()


def _alone(recipe: str = "tensorwise") -> TinyLM:
    """Unsharded, converted by torchao itself."""
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    return float8.convert_to_float8_training(
        _model(), config=config, module_filter_fn=lambda _, name: name in LAYERS
    )


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """On the same batches on every rank: a scale is that of the whole batch."""
    losses = []
    for ids, targets in batches(steps, 4):
        loss = lm_loss(model(ids), targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# torch 2.13's compiler asks the input of a block for its gradient.
@pytest.mark.table("fp83-config3", "fp84-config4")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("fp8", "config"),
    [
        (EMULATED, {}),
        (GATHERED, {}),
        ({**EMULATED, "recipe": "rowwise"}, {}),
        ({**EMULATED, "recipe": "rowwise_with_gw_hp"}, {}),
        (GATHERED, {"activation_checkpointing": True}),
        (GATHERED, {"reshard_after_forward": False, "eval_reshard_after_forward": True}),
        (GATHERED, {"forward_prefetch": 1, "backward_prefetch": 1}),
        (GATHERED, {"compile": {"backend": "aot_eager"}}),
    ],
)
def test_trains_as_torchaos_own_conversion(fp8: dict[str, Any], config: Mapping[str, Any]):
    oracle, model = _alone(fp8.get("recipe", "tensorwise")), _model()
    adam, own = (torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (oracle, model))
    prepare_fully_shard(model, own, {"fp8": fp8, **config})
    assert _train(model, own) == pytest.approx(_train(oracle, adam), abs=1e-6)
    assert_same_values(oracle, model)


@pytest.mark.world_size(4)
def test_copies_of_shards():
    oracle, model = _alone(), _model()
    sgd, own = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (oracle, model))
    prepare_fully_shard(model, own, {"fp8": GATHERED, "data_parallel_replicate_degree": 2})
    assert _train(model, own) == pytest.approx(_train(oracle, sgd), abs=1e-6)
    assert_same_values(oracle, model)


@pytest.mark.world_size(2)
def test_weights_are_sent_in_one_byte_an_element():
    sent = {}
    for name, fp8 in (("fp32", False), ("fp8", GATHERED)):
        model = _model()
        prepare_fully_shard(model, None, {"fp8": fp8, "reshard_after_forward": False})
        with Bytes() as counted:
            model(batches(1, 4)[0][0])
        sent[name] = sum(counted.gathered.values())
    cast = sum(_model().get_submodule(layer).weight.numel() for layer in LAYERS)
    assert sent["fp32"] - sent["fp8"] == 3 * cast


@pytest.mark.world_size(2)
def test_shards_names_and_what_is_saved_are_plain():
    plain, model = _model(), _model()
    up = model.blocks[0].up
    prepare_fully_shard(model, None, {"fp8": GATHERED})
    assert model.blocks[0].up is up
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    shards = {name: value.to_local() for name, value in model.state_dict().items()}
    assert {type(shard) for shard in shards.values()} == {torch.Tensor}
    torch.save(shards, saved := io.BytesIO())
    assert b"torchao" not in saved.getvalue()


@pytest.mark.world_size(2)
def test_what_is_written_into_the_weights_is_computed_with():
    oracle, model = _alone(), _model()
    adam, own = (torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (oracle, model))
    prepare_fully_shard(model, own, {"fp8": GATHERED})
    _train(model, own), _train(oracle, adam)
    with summon_full_params(model), torch.no_grad():
        for changed in (oracle, model):
            # A scale from before would clip: the largest value is another one now.
            changed.blocks[1].down.weight.mul_(3)
    ids = batches(1, 4)[0][0]
    assert torch.equal(model(ids), oracle(ids))
    assert _train(model, own) == pytest.approx(_train(oracle, adam), abs=1e-6)
    assert_same_values(oracle, model)


KEEPS_FP32 = {"keep_fp32": ["blocks.0.up"], "mixed_precision": {"param_dtype": "bf16"}}


def _tied() -> TinyLM:
    model = MODEL()
    first, second = model.blocks
    second.up.weight = first.up.weight
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "fp8", "config", "said"),
    [
        (MODEL, {"emulate": True}, {}, "no linear layer was chosen"),
        (MODEL, {"emulate": True, "names": ["block.*"]}, {}, "matches no module name"),
        (MODEL, {"emulate": True, "names": ["head"]}, {}, r"\(17, 32\), where both have to be"),
        (partial(MODEL, width=24), EMULATED, {}, "multiples of 16"),
        (_tied, EMULATED, {}, "its weight is also used elsewhere"),
        (MODEL, EMULATED, KEEPS_FP32, r"of its own kind \(fp32\)"),
        (MODEL, GATHERED, {"reshard_after_forward": 2}, "no second, smaller gather"),
    ],
)
def test_layers_that_cannot_are_refused(
    make: Any, fp8: dict[str, Any], config: dict[str, Any], said: str
):
    with pytest.raises(PlanError, match=said):
        prepare_fully_shard(make(), None, {"fp8": fp8, **config})


@pytest.mark.world_size(2)
def test_small_layers_are_left_out():
    model = TinyLM(layers=2, width=128)
    model.blocks[1].up = nn.Linear(128, 112)
    model.blocks[1].down = nn.Linear(112, 128)
    prepare_fully_shard(model, None, {"fp8": {"emulate": True}})
    linear = float8.float8_linear.Float8Linear
    chosen = [name for name, inner in model.named_modules() if isinstance(inner, linear)]
    assert chosen == ["blocks.0.up", "blocks.0.down"]


@pytest.mark.world_size(2)
def test_a_machine_that_cannot_is_told():
    with pytest.raises(ConfigError, match="a run on cpu that cannot multiply fp8"):
        prepare_fully_shard(_model(), None, {"fp8": True}, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None)
        with pytest.raises(ConfigError, match="torchao is not installed"):
            prepare_fully_shard(_model(), None, {"fp8": EMULATED})
