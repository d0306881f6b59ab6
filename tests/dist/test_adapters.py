"""LoRA adapters of PEFT: where they are sharded, how they train, what checkpoints hold of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer.models import HuggingFaceModel
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from composer_fsdp2 import ModelWeights, installed, prepare_fully_shard, summon_full_params
from composer_fsdp2.checkpoint.huggingface import write_huggingface
from composer_fsdp2.checkpoint.source import FileCheckpoint, FolderCheckpoint
from composer_fsdp2.errors import CheckpointError, ConfigError, PlanError
from composer_fsdp2.plan.unit_size import FROZEN_MAY_DIFFER
from composer_fsdp2.step.run import run_of
from tests.dist.test_tensor_parallel import assert_same_state, mean, of_this_group
from tests.support.experts import FAMILIES as EXPERTS
from tests.support.models import batches, llama_config, lm_loss
from tests.support.pairs import parametrize_by_turns, parametrize_pairs
from tests.support.parity import (
    OPTIMIZERS,
    Recipe,
    assert_close,
    assert_same_values,
    autocast,
    copy_values,
    device_for,
    full,
    model_loss,
    train_together,
)
from tests.support.traffic import Bytes
from tests.support.training import Tokens, largest_difference, trainer_for

hf_fsdp = pytest.importorskip("llmfoundry.models.hf.hf_fsdp", reason="needs the extra foundry")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
FULL = {"mixed_precision": "FULL"}


def lora(
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    heads: tuple[int, int] = (2, 1),
    prepare_base: Callable[[nn.Module], object] = lambda base: None,
    **changes: Any,
) -> HuggingFaceModel:
    """A small Llama with adapters, made as LLM Foundry makes it."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    config = llama_config(tied, hidden_size=16, vocab_size=32, use_cache=False, **sizes)
    base = LlamaForCausalLM(config).to(dtype)
    prepare_base(base)
    torch.manual_seed(seed)
    settings = {
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "up_proj"],
    }
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    adapters = peft.LoraConfig(**(kind | settings | changes))
    model = HuggingFaceModel(base, peft_config=adapters)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that the others would have no gradient
            nn.init.normal_(param, std=0.1)
    hf_fsdp.prepare_hf_model_for_fsdp(model.model, "cpu")
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def unsharded_names(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]


BLOCKS = [f"model.base_model.model.model.layers.{index}" for index in range(2)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_are_in_the_unit_of_their_block(changes: dict[str, Any]):
    model = lora(**changes)
    _, units = prepare_fully_shard(model, None, {})
    assert list(units) == [*BLOCKS, "model"]
    assert unsharded_names(model) == []


@pytest.mark.table("tied", "dora")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, {}),
        ({"tied": False}, {"activation_checkpointing": True}),
        ({"tied": False, "modules_to_save": ["lm_head"]}, {}),
        ({"use_dora": True}, {}),
        ({"tied": False, "target_modules": ["embed_tokens", "v_proj"]}, {}),
    ],
    ids=["tied", "recomputed", "modules_to_save", "dora", "embedding"],
)
def test_trains_like_one_process(changes: dict[str, Any], config: dict[str, Any]):
    oracle, model = lora(**changes), lora(**changes)
    pair = [OPTIMIZERS["adamw"](trained(each)) for each in (oracle, model)]
    prepare_fully_shard(model, pair[1], config)
    train_together(oracle.model, pair[0], model.model, pair[1], Recipe(steps=5))


def with_reference(model: peft.PeftModel, batch: Any) -> torch.Tensor:
    """A loss with a term of KL to the model without adapters, in every third step."""
    model.step = getattr(model, "step", -1) + 1
    if model.step % 3:
        return model_loss(model, batch)
    with torch.no_grad(), model.disable_adapter():
        reference = torch.log_softmax(model(batch[0]).logits, -1)
    logits = torch.log_softmax(model(batch[0]).logits, -1)
    apart = nn.functional.kl_div(logits, reference, log_target=True, reduction="batchmean")
    return lm_loss(logits, batch[1]) + 0.1 * apart


def in_turn(model: peft.PeftModel, batch: Any) -> torch.Tensor:
    """A loss of one adapter for two steps, then of the other, with a forward of that in between."""
    model.step = getattr(model, "step", -1) + 1
    turn, step = divmod(model.step, 2)
    if step == 0:
        adapters = ["default", "second"]
        with torch.no_grad():
            model.set_adapter(adapters.pop(turn % 2))
            model(batch[0])
        model.set_adapter(adapters[0])
    return model_loss(model, batch)


TURNS = {"reference": with_reference, "in turn": in_turn}
RESHARD = ["auto", True, False]


def with_second(model: peft.PeftModel) -> list[nn.Parameter]:
    """Gives a model a second adapter; returns the parameters of both."""
    model.add_adapter("second", model.peft_config["default"])
    adapters = {n: param for n, param in model.named_parameters() if "lora_" in n}
    for name, param in adapters.items():
        if "second" in name:  # drawn by each rank, and zero
            nn.init.constant_(param, 0.02)
    return list(adapters.values())


@pytest.mark.table("False-in turn-adamw")
@pytest.mark.world_size(2)
@parametrize_pairs(reshard=RESHARD, turns=TURNS, optimizer=["sgd", "adamw"])
def test_no_adapter_is_frozen_by_what_happens_between_steps(
    reshard: Any, turns: str, optimizer: str
):
    """PEFT sets `requires_grad` of gathered parameters, in units that stayed gathered."""
    changes = {"tied": False, "target_modules": ["q_proj", "lm_head", "embed_tokens"]}
    oracle, model = lora(**changes), lora(**changes)
    adapters = [with_second(each.model) for each in (oracle, model)]
    pair = [OPTIMIZERS[optimizer](params) for params in adapters]
    prepare_fully_shard(model, pair[1], {"reshard_after_forward": reshard})
    models = oracle.model, pair[0], model.model, pair[1]
    train_together(*models, Recipe(steps=8), TURNS[turns])


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@parametrize_by_turns(reshard=RESHARD, turns=TURNS, optimizer=["adamw", "sgd"])
def test_nor_with_tensor_parallelism(reshard: Any, turns: str, optimizer: str):
    oracle, model = (lora(tied=False, heads=(4, 2)) for _ in range(2))
    adapters = [with_second(each.model) for each in (oracle, model)]
    pair = [OPTIMIZERS[optimizer](params) for params in adapters]
    settings = {"reshard_after_forward": reshard, "tensor_parallel": 2}
    prepare_fully_shard(model, pair[1], settings)
    for number, (ids, targets) in enumerate(batches(8, 8)):
        expected = TURNS[turns](oracle.model, (ids, targets))
        got = TURNS[turns](model.model, (of_this_group(ids), of_this_group(targets)))
        expected.backward()
        got.backward()
        assert_close(f"loss of step {number}", expected.detach(), mean(got))
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)
    assert_same_state(*pair)


@pytest.mark.world_size(2)
def test_bf16_base_with_adapters_in_fp32_trains_like_one_process():
    """Frozen weights keep their dtype; adapters compute in their own, as PEFT has it."""
    oracle, model = (lora(dtype=torch.bfloat16) for _ in range(2))
    pair = [OPTIMIZERS["adamw"](trained(each)) for each in (oracle, model)]
    _, units = prepare_fully_shard(model, pair[1], FULL)
    apart = [name for name in units if "lora_" in name]
    assert bool(apart) is not FROZEN_MAY_DIFFER
    assert {param.dtype for param in trained(model)} == {torch.float32}
    train_together(oracle.model, pair[0], model.model, pair[1], Recipe(steps=5))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("width", [4, 2], ids=["own dtypes", "bf16"])
def test_frozen_weights_are_neither_upcast_nor_reduced(width: int):
    spec = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    config = FULL if width == 4 else {"mixed_precision": spec}
    model = lora(dtype=torch.bfloat16)
    adapters = sum(param.numel() for param in trained(model))
    frozen = sum(param.numel() for param in model.parameters()) - adapters
    in_blocks = frozen - 32 * 16 - 16  # the embedding and a norm stay gathered
    prepare_fully_shard(model, None, config)
    ids = torch.arange(12).reshape(2, 6)
    for _ in range(2):  # in which ranks agree on what the first forward has shown
        model({"input_ids": ids, "labels": ids})["loss"].backward()
    with Bytes() as sent:
        model({"input_ids": ids, "labels": ids})["loss"].backward()
    assert sum(sent.gathered.values()) == 2 * (frozen + in_blocks) + 2 * width * adapters
    assert sent.reduced == {torch.float32: 4 * adapters}


# --- Checkpoints. ---

STEPS, HALF = 4, 2
FORMATS = {"sharded": "ep0-ba2", "full": "ep0-ba2-rank0.pt"}


def run(
    folder: Path | None,
    kind: str,
    model: HuggingFaceModel | None = None,
    frozen: str = "shard",
    **kwargs: Any,
) -> Trainer:
    model = model or lora()
    samples: Any = Tokens(STEPS * 8)
    with installed():
        trainer = trainer_for(
            model,
            OPTIMIZERS["adamw"](trained(model)),
            samples,
            {"state_dict_type": kind, "frozen": frozen},
            max_duration=f"{STEPS}ba",
            save_folder=None if folder is None else str(folder),
            save_interval=f"{HALF}ba",
            **kwargs,
        )
        trainer.fit()
    trainer.close()
    return trainer


def losses_in_bf16(model: HuggingFaceModel, frozen: str) -> list[torch.Tensor]:
    """Trains adapters in `amp_bf16` without a Trainer; returns the loss of each batch."""
    optimizer = OPTIMIZERS["adamw"](trained(model))
    prepare_fully_shard(model, optimizer, {"frozen": frozen}, "amp_bf16", device_for("amp_bf16"))
    losses = []
    for ids, _ in batches(4, 2):
        with autocast("amp_bf16"):
            loss = model({"input_ids": ids, "labels": ids})["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Adapters and base. Collective: yes."""
    return {name: full(param).clone() for name, param in trainer.state.model.named_parameters()}


@pytest.mark.table("full")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_checkpoints_hold_whole_adapters_and_nothing_else(kind: str, tmp_path: Path):
    whole = run(tmp_path / "whole", kind)
    path = tmp_path / "whole" / FORMATS[kind]
    saved: Any = FolderCheckpoint(path) if kind == "sharded" else FileCheckpoint(path)
    weights = [key for key in saved.tensors if key.startswith("state.model.")]
    shapes = {f"state.model.{n}": p.shape for n, p in lora().named_parameters() if "lora_" in n}
    assert {key: saved.tensors[key].shape for key in weights} == shapes
    resumed = run(tmp_path / "second", kind, lora(seed=1), load_path=str(path))
    assert int(resumed.state.timestamp.batch) == STEPS
    assert largest_difference(everything(resumed), everything(whole)) == 0.0
    folder = tmp_path / f"peft{dist.get_rank()}"
    write_huggingface(saved, folder, 1, lambda *_: None)
    for name, value in load_file(folder / "adapter_model.safetensors").items():
        key = f"state.model.model.{name.replace('weight', 'default.weight')}"
        weights.remove(key)
        assert torch.equal(value, saved.tensor(key))
    assert not weights
    with pytest.raises(CheckpointError, match=r"lora_A\.default\.weight"):
        run(tmp_path / "third", kind, lora(r=4), load_path=str(path))


@pytest.mark.world_size(2)
def test_checkpoints_that_would_lose_trained_weights_are_refused(tmp_path: Path):
    model = lora(tied=False, modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match=r"1 weights that are trained: 'model\..*lm_head"):
        run(tmp_path, "sharded", model)
    # Without a `save_folder` nothing is lost, until the run is saved by hand.
    trainer = run(None, "sharded", lora(tied=False, modules_to_save=["lm_head"]))
    with installed(), pytest.raises(ConfigError, match="should_save_peft_only"):
        trainer.save_checkpoint(str(tmp_path / "by_hand"))
    model = lora(tied=False, modules_to_save=["lm_head"])
    model.should_save_peft_only = False
    run(tmp_path / "all", "sharded", model)


# The base has no name, by which PEFT would look its vocabulary up.
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("changes", [{}, {"tied": False, "modules_to_save": ["lm_head"]}])
def test_saved_by_peft_as_without_sharding(changes: dict[str, Any], tmp_path: Path):
    plain, model = lora(**changes), lora(**changes)
    for one in (plain, model):
        # Composer makes plain text of these, which PEFT cannot write.
        settings = one.model.peft_config["default"]
        settings.peft_type, settings.task_type = peft.PeftType.LORA, peft.TaskType.CAUSAL_LM
    prepare_fully_shard(model, None, {"activation_checkpointing": True})
    with installed():
        model.model.save_pretrained(str(tmp_path / "sharded"))
    plain.model.save_pretrained(str(tmp_path / f"plain{dist.get_rank()}"))
    found, expected = tmp_path / "sharded", tmp_path / f"plain{dist.get_rank()}"
    assert {f.name for f in found.iterdir()} == {f.name for f in expected.iterdir()}
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (found / file).read_bytes() == (expected / file).read_bytes()


@pytest.mark.table("modules_to_save")
@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "changes",
    [{"tied": False, "modules_to_save": ["lm_head"]}, {"use_dora": True}, {"bias": "lora_only"}],
    ids=["modules_to_save", "dora", "bias"],
)
def test_weights_are_handed_out_merged_or_alone(changes: dict[str, Any], tmp_path: Path):
    plain, model = lora(**changes), lora(**changes)
    prepare_fully_shard(model, None, {"activation_checkpointing": True})
    alone = peft.get_peft_model_state_dict(plain.model)
    merged = plain.model.merge_and_unload().state_dict()
    if changes.get("tied", True):
        merged.pop("lm_head.weight")
    for adapters, expected in (("merged", merged), ("only", alone), ("merged", merged)):
        weights = ModelWeights(model, adapters=adapters, every_rank=True)
        found = {name: tensor.clone() for name, tensor in weights}
        assert [*found] == [info.name for info in weights.metadata()]
        assert found.keys() == expected.keys(), adapters
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def tuned_norms() -> nn.Module:
    base = LlamaForCausalLM(llama_config(False, hidden_size=16, vocab_size=32))
    names = ["input_layernorm", "post_attention_layernorm"]
    return peft.get_peft_model(base, peft.LNTuningConfig("CAUSAL_LM", target_modules=names))


def experts_with_two_adapters() -> nn.Module:
    base = EXPERTS["Mixtral"][0]()
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    if not any(name.endswith(both[0]) for name, _ in base.named_parameters()):
        pytest.skip("transformers has no experts in one tensor")
    config: Any = peft.LoraConfig
    adapters = config(task_type="CAUSAL_LM", r=2, target_modules=[], target_parameters=both)
    return peft.get_peft_model(base, adapters)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [tuned_norms, experts_with_two_adapters])
def test_adapters_that_stand_around_each_other_or_change_places(
    make: Callable[[], nn.Module], tmp_path: Path
):
    torch.manual_seed(0)
    model: Any = make()
    with torch.no_grad():
        for param in trained(model):
            param.add_(torch.randn_like(param))
    merged = copy.deepcopy(model).merge_and_unload()
    if dist.get_rank() == 0:
        merged.save_pretrained(tmp_path)
    dist.barrier()
    expected = load_file(tmp_path / "model.safetensors")
    prepare_fully_shard(model, None, FULL)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(2):
        merged_weights = dict(ModelWeights(model, every_rank=True, tied=True))
        assert merged_weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(name, tensor, merged_weights[name])
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.world_size(2)
def test_prompts_are_not_left_out_without_a_word(tmp_path: Path):
    base = LlamaForCausalLM(llama_config(False, hidden_size=16, vocab_size=32))
    model = peft.get_peft_model(base, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3))
    prepare_fully_shard(model, None, FULL)
    for adapters in ("merged", "only"):
        with pytest.raises(PlanError, match="Write a folder with save_pretrained"):
            ModelWeights(model, adapters=adapters)
    with installed():
        model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")["prompt_embeddings"].shape == (3, 16)


@pytest.mark.world_size(2)
def test_merged_after_gathering_is_the_unsharded_merge():
    model, oracle, again = lora(), lora(), lora(seed=1)
    prepare_fully_shard(model, None, {})
    copy_values(model.model, again.model)
    expected = oracle.model.merge_and_unload().state_dict()
    merged = again.model.merge_and_unload().state_dict()
    assert expected.keys() == merged.keys()
    assert all(torch.equal(expected[name], merged[name]) for name in expected)


@pytest.mark.world_size(2)
def test_the_blocks_of_a_model_with_adapters_are_its_layers():
    """Where torch needs adapters of another dtype to be units, they are units inside a block."""
    model = lora(dtype=torch.bfloat16)
    prepare_fully_shard(model, None, {})
    sharding = run_of(model)
    assert sharding is not None
    blocks = [name.rpartition(".model.")[2] for name in sharding.plan.blocks()]
    assert blocks == ["layers.0", "layers.1"]


@pytest.mark.world_size(2)
def test_adapters_on_weights_that_were_sharded_before():
    """What the error says to do instead of sharding the model again."""
    config = llama_config(True, hidden_size=16, vocab_size=32, use_cache=False)
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    loaded = LlamaForCausalLM(config)
    prepare_fully_shard(loaded, None, {})
    with summon_full_params(loaded):
        weights = {name: value.clone() for name, value in loaded.state_dict().items()}
    with pytest.raises(
        PlanError, match=r"sharded by FSDP2 already.* before adapters are put on it"
    ):
        prepare_fully_shard(peft.get_peft_model(loaded, adapters), None, {})
    base = LlamaForCausalLM(config)
    base.load_state_dict(weights)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, adapters)
    oracle = copy.deepcopy(model)
    prepare_fully_shard(model, None, {})
    assert largest_difference(model, oracle) == 0.0
    model(torch.ones(2, 3, dtype=torch.long)).logits.sum().backward()
