"""Units of other sizes and dtypes train like one process, and move what they should."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from torch import nn
from transformers import LlamaForCausalLM

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.step.run import run_of
from tests.support.models import Block, TinyComposer, TinyLM, batches, llama_config
from tests.support.parity import OPTIMIZERS, Recipe, check_parity
from tests.support.traffic import Bytes
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

SHORT = Recipe(steps=3, clip_norm=0.5)
fp32, bf16 = torch.float32, torch.bfloat16


def llama() -> LlamaForCausalLM:
    """Untied, with ends of 1 MiB."""
    shape = {"vocab_size": 4096, "hidden_size": 64}
    return LlamaForCausalLM(llama_config(tied=False, use_cache=False, **shape))


# --- Embedding and head apart. ---


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("config", [{}, {"activation_checkpointing": True}])
def test_untied_ends_train_like_one_process(config: dict[str, Any]):
    # Not clipped: torch's own fp32 norm of a whole head is off by 1e-4.
    model = check_parity(llama, config, "adamw", Recipe(steps=3))
    assert type(model.model.embed_tokens).__name__ == "FSDPEmbedding"
    assert type(model.lm_head).__name__ == "FSDPLinear"


@pytest.mark.table("last block")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("trained", ["all", "last block"])
def test_ends_are_gathered_once(trained: str):
    """As much as with both in the root, which is kept until backward."""
    sent: list[Bytes] = []
    for apart in (None, False):
        model = llama()
        model.requires_grad_(trained == "all")
        model.model.layers[1].requires_grad_(True)
        policy = {"embeddings": apart, "lm_head": apart}
        _, units = prepare_fully_shard(model, None, {"wrap_policy": policy})
        assert ("lm_head" in units) is (apart is None)
        with Bytes() as counted:
            model(batches(1, 2)[0][0]).logits.sum().backward()
        sent.append(counted)
    assert sent[0].gathered == sent[1].gathered
    assert sent[0].reduced == sent[1].reduced


# --- Bounds. ---


@pytest.mark.world_size(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_divided_units_train_like_one_process(recompute: bool):
    policy = {"max_unit_bytes": 900}
    config = {"wrap_policy": policy, "activation_checkpointing": recompute}
    model = check_parity(TinyLM, config, recipe=SHORT)
    largest = max(unit.numel for unit in run_of(model).plan.units)
    assert largest * 4 <= 900


@pytest.mark.world_size(2)
def test_merged_units_train_like_one_process():
    policy = {"classes": ["LayerNorm", "Block"], "min_unit_bytes": 400}
    model = check_parity(TinyLM, {"wrap_policy": policy}, recipe=SHORT)
    assert not type(model.blocks[0].norm).__name__.startswith("FSDP")


# --- Small ends. ---


class Marked(TinyLM):
    """Its final norm is marked as LLM Foundry marks that of an MPT model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm._fsdp_wrap = True


class MarkedComposer(TinyComposer):
    def __init__(self) -> None:
        super().__init__()
        self.net = Marked()


APART = {"wrap_policy": {"names": ["net.norm"]}}


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_a_final_norm_goes_with_the_unit_around_it():
    sent: list[Bytes] = []
    for config in ({"wrap_policy": {"names": ["norm"], "classes": ["Block"]}}, {}):
        model = check_parity(Marked, config, "adamw", SHORT)
        assert type(model.norm).__name__.startswith("FSDP") is bool(config)
        with Bytes() as counted:
            model(batches(1, 2)[0][0]).sum().backward()
        sent.append(counted)
    apart, joined = (counted.calls for counted in sent)
    # Gathered in forward and again in backward, and reduced.
    assert apart == joined + Counter(gather=2, reduce=1)


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_of_a_norm_apart_goes_on(kind: str, tmp_path: Path):
    """As runs of versions before have it, and back."""

    def run(policy: dict[str, Any], **settings: Any) -> Trainer:
        model = built(MarkedComposer)
        config = {"fsdp2": {"state_dict_type": kind, **policy}}
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        trainer = trainer_for(
            model, optimizer, samples_of(4, 8), parallelism_config=config, **settings
        )
        trainer.fit()
        trainer.close()
        return trainer

    name = "ep0-ba2" if kind == "sharded" else "ep0-ba2-rank0.pt"
    with installed():
        oracle = weights(run({}, max_duration="4ba").state.model)
        for index, (before, after) in enumerate([(APART, {}), ({}, APART)]):
            folder = tmp_path / str(index)
            first = run(before, max_duration="2ba", save_folder=str(folder), save_interval="2ba")
            names = [unit.module for unit in run_of(first.state.model).plan.units]
            assert ("net.norm" in names) is (before is APART)
            second = run(after, max_duration="4ba", load_path=str(folder / name))
            assert second.state.timestamp.batch == 4
            assert largest_difference(weights(second.state.model), oracle) <= 1e-6


# --- dtypes. ---


def _low_with_norms_in_fp32() -> TinyLM:
    model = TinyLM()
    for block in model.blocks:
        block.up.to(bf16), block.down.to(bf16)
        block.register_forward_pre_hook(lambda _module, args: (args[0].float(),))
        block.norm.register_forward_hook(lambda _module, _args, output: output.bfloat16())
    return model


@pytest.mark.world_size(2)
def test_modules_of_several_dtypes_train_like_one_process():
    model = _low_with_norms_in_fp32()
    names = [name for name, param in model.named_parameters() if param.dtype == bf16]
    oracle = _low_with_norms_in_fp32()
    oracle.load_state_dict(model.state_dict())
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    _, units = prepare_fully_shard(model, pair[1], {"mixed_precision": "FULL"})
    assert "blocks.1.norm" in units
    assert [n for n, p in model.named_parameters() if p.dtype == bf16] == names
    losses = [_losses(m, o) for m, o in zip((oracle, model), pair, strict=True)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    assert losses[1][-1] < losses[1][0]


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    ids, targets = batches(1, 4)[0]
    found: list[float] = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


LOW = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("autocast", [False, True])
def test_kept_modules_compute_in_fp32(autocast: bool):
    """Inside autocast too, which would run a router's matrix product in bf16."""
    model = TinyLM()
    config = {"mixed_precision": LOW, "keep_fp32": ["*norm", "blocks.1.up"]}
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def watch(name: str, module: nn.Module) -> None:
        method = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            output = method(x)
            seen[name] = (module.weight.dtype, x.dtype, output.dtype)
            return output

        module.forward = forward

    for name in ("norm", "blocks.1.norm", "blocks.1.up", "blocks.0.up"):
        watch(name, model.get_submodule(name))
    prepare_fully_shard(model, None, config)
    with torch.autocast("cpu", bf16, enabled=autocast), Bytes() as sent:
        model(batches(1, 2)[0][0]).float().sum().backward()
    assert seen.pop("blocks.0.up") == (bf16, bf16, bf16)
    assert set(seen.values()) == {(fp32, fp32, fp32)}
    assert set(sent.gathered) == {bf16, fp32}
    assert set(sent.reduced) == {fp32}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_kept_modules_learn_as_in_fp32(recompute: bool):
    oracle, model = TinyLM(), TinyLM()
    oracle.load_state_dict(model.state_dict())
    pair = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (oracle, model)]
    config = {
        "mixed_precision": LOW,
        "keep_fp32": ["*norm"],
        "activation_checkpointing": recompute,
    }
    prepare_fully_shard(model, pair[1], config)
    losses = [_losses(m, o) for m, o in zip((oracle, model), pair, strict=True)]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert losses[1][-1] < losses[1][0] - 0.5


@pytest.mark.world_size(2)
def test_logits_may_be_scaled_in_place():
    class Scaling(TinyLM):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(ids)
            logits *= 0.5
            return logits

    check_parity(Scaling, {"wrap_policy": {"names": ["head"], "classes": ["Block"]}}, recipe=SHORT)


class Counted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 10))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


@pytest.mark.world_size(2)
def test_buffers_are_cast_where_asked():
    spec = {"buffer_dtype": "bf16"}
    model = nn.Sequential(Counted(), Counted())
    prepare_fully_shard(model, None, {"mixed_precision": {**LOW, **spec}})
    assert {b.scale.dtype for b in model} == {bf16}
    assert {b.calls.dtype for b in model} == {torch.long}
    assert model.state_dict()["0.scale"].dtype == bf16
    assert model(torch.randn(2, 10)).dtype == bf16
    one = nn.Sequential(Counted(), Counted())
    policy = {"names": {"1": {"mixed_precision": spec}, "0": {}}}
    prepare_fully_shard(one, None, {"wrap_policy": policy})
    assert [b.scale.dtype for b in one] == [fp32, bf16]


class MasterSGD(torch.optim.Optimizer):
    """Steps a copy in fp32 and rounds it into the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state["master"] = param.float()
                state["master"].sub_(param.grad.float(), alpha=group["lr"])
                param.copy_(state["master"])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stepped", [False, True])
def test_weights_in_bf16_with_a_master_in_the_optimizer(stepped: bool):
    """The master is state like any other, and is sharded in its own dtype."""
    torch.manual_seed(0)
    models = [nn.Linear(6, 4).to(bf16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    pair = [MasterSGD(model.parameters()) for model in models]
    data = torch.randn(8, 4, 6)
    if stepped:
        for model, optimizer in zip(models, pair, strict=True):
            model(data[0].to(bf16)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    prepare_fully_shard(models[1], pair[1], {"mixed_precision": {"reduce_dtype": "fp32"}})
    for batch in data:  # every rank has all of it, so the average is exact
        for model, optimizer in zip(models, pair, strict=True):
            model(batch.to(bf16)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, sharded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        master = pair[1].state[sharded]["master"]
        assert (sharded.dtype, master.dtype) == (bf16, fp32)
        assert master.to_local().shape == sharded.to_local().shape
        assert torch.equal(master.full_tensor(), pair[0].state[param]["master"])
        assert torch.equal(sharded.full_tensor(), param)
