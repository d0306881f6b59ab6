"""Composer's Trainer with the plugin installed: every way in, and the numbers that come out."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.loggers import InMemoryLogger
from composer.optim import LinearScheduler
from composer.utils.parallelism import FSDPConfig, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import ConfigError, FSDP2Config, TrainerFSDP2Config, installed
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support.models import VOCAB, Block, TinyComposer, llama_config
from tests.support.parity import AUTOCAST_TOLERANCE, OPTIMIZERS
from tests.support.training import (
    Tokens,
    autocast_on_the_cpu,
    built,
    composers_own,
    largest_difference,
    loader_of,
    samples_of,
    train_alone,
    trainer_for,
    weights,
)

SGD, ADAMW = OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]


WAYS_IN = {
    "mapping": lambda: {"fsdp2": {"reshard_after_forward": True}},
    "empty mapping": lambda: {"fsdp2": {}},
    "FSDP2Config": lambda: {"fsdp2": FSDP2Config()},
    "TrainerFSDP2Config": lambda: {"fsdp2": TrainerFSDP2Config()},
    "Composer's FSDP2Config": lambda: {"fsdp2": composers_own()},
    "Composer's FSDP2Config as fsdp": lambda: {"fsdp": composers_own()},
    "ParallelismConfig": lambda: ParallelismConfig(fsdp2=TrainerFSDP2Config()),
    "ParallelismConfig of a mapping": lambda: ParallelismConfig(fsdp2={}),  # type: ignore
    "fsdp, version 2": lambda: {"fsdp": {"state_dict_type": "full", "version": 2}},
}


@pytest.mark.table("Composer's FSDP2Config", "ParallelismConfig of a mapping")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_gives_fsdp2(way: str):
    model = built(TinyComposer)
    with installed():
        trainer = trainer_for(
            model, SGD(model.parameters()), samples_of(2, 8), parallelism_config=WAYS_IN[way]()
        )
        trainer.fit()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4
    assert isinstance(trainer.state.fsdp_config, TrainerFSDP2Config)
    trainer.close()


@pytest.mark.world_size(2)
def test_fsdp1_settings_still_reach_fsdp1():
    parsed = parse_parallelism_config({"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}})
    assert parsed is not None
    assert parsed.fsdp2 is None
    assert isinstance(parsed.fsdp, FSDPConfig)
    assert parsed.fsdp.sharding_strategy == "SHARD_GRAD_OP"


@pytest.mark.world_size(2)
def test_a_misspelt_version_is_an_error():
    model = built(TinyComposer)
    with installed(), pytest.raises(ConfigError, match="Did you mean 'fsdp2'"):
        trainer_for(model, None, samples_of(1, 8), parallelism_config={"fdsp2": {}})


# --------------------------------------------------------------------------------------- parity

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"device_train_microbatch_size": 2},
    "uneven last microbatch": {"device_train_microbatch_size": 3},
    "norm clipping": {"algorithms": lambda: GradientClipping("norm", 0.05)},
    "norm clipping, microbatches": {
        "algorithms": lambda: GradientClipping("norm", 0.05),
        "device_train_microbatch_size": 2,
    },
    "value clipping": {"algorithms": lambda: GradientClipping("value", 0.002)},
    "evaluation in between": {
        "eval_dataloader": lambda: loader_of(samples_of(2, 8, seed=1), 4),
        "eval_interval": "3ba",
    },
    "schedule": {
        "schedulers": lambda: LinearScheduler(alpha_i=1.0, alpha_f=0.1),
        "max_duration": "20ba",
    },
    "keeps parameters": {"fsdp2": {"reshard_after_forward": False}},
    "frees parameters": {"fsdp2": {"reshard_after_forward": True}},
}


def _oracle_settings(case: str, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    """The same case, done by hand."""
    if case.startswith("norm clipping"):
        return {"change_gradients": lambda params: nn.utils.clip_grad_norm_(params, 0.05)}
    if case == "value clipping":
        return {"change_gradients": lambda params: nn.utils.clip_grad_value_(params, 0.002)}
    if case == "schedule":
        # Composer's schedulers are stepped before its clock: step k has the rate of step k - 1.
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - 0.9 * max(0, step - 1) / steps
        )
        return {"after_step": schedule.step}
    return {}


def _settings(case: str) -> dict[str, Any]:
    return {key: value() if callable(value) else value for key, value in CASES[case].items()}


@pytest.mark.table("value clipping-adamw")
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("case", "name"),
    [("plain", "adamw"), *zip(CASES, itertools.cycle(OPTIMIZERS), strict=False)],
)
def test_trains_like_one_process(case: str, name: str):
    assert _difference(case, name, 20) <= 1e-6


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES)
def test_trains_like_one_process_under_autocast(case: str):
    with autocast_on_the_cpu():
        assert _difference(case, "sgd", 4, "amp_bf16") <= AUTOCAST_TOLERANCE


def _difference(case: str, name: str, steps: int, precision: str = "fp32") -> float:
    """The largest one of losses and weights, between the Trainer and one process."""
    oracle, model = built(TinyComposer), built(TinyComposer)
    alone, sharded = (OPTIMIZERS[name](m.parameters()) for m in (oracle, model))
    samples, logger, settings = samples_of(steps, 8), InMemoryLogger(), _settings(case)
    losses = train_alone(
        oracle,
        alone,
        samples,
        8,
        precision=precision,
        microbatch=settings.get("device_train_microbatch_size"),
        **_oracle_settings(case, alone, steps),
    )
    if "max_duration" in settings:
        settings["max_duration"] = f"{steps}ba"
    with installed():
        trainer = trainer_for(
            model, sharded, samples, loggers=logger, precision=precision, **settings
        )
        trainer.fit()
    trainer.close()
    logged = [float(value) for _, value in logger.data["loss/train/total"]]
    assert len(logged) == steps
    of_losses = max(abs(a - b) for a, b in zip(logged, losses, strict=True))
    return max(of_losses, largest_difference(model, oracle))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("when", ["in the Trainer", "in fit"])
def test_composer_refuses_a_duration_in_seconds(when: str):
    """Every rank has a clock of its own, so that each would stop after another batch."""
    model = built(TinyComposer)
    durations = ("1sec", None) if when == "in the Trainer" else ("1ba", "1sec")
    with installed(), pytest.raises(ValueError, match="Wall clock time not an allowed time unit"):
        _fit_for(model, *durations)


def _fit_for(model: TinyComposer, *durations: str | None) -> None:
    first, then = durations
    sgd = SGD(model.parameters())
    trainer_for(model, sgd, samples_of(1, 8), max_duration=first).fit(duration=then)


HSDP = {"data_parallel_replicate_degree": 2}


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("fsdp2", "name"),
    [
        ({**HSDP, "data_parallel_shard_degree": 2}, "sgd"),
        (HSDP, "adamw"),
        ({"reshard_after_forward": 2}, "sgd"),
        ({"reshard_after_forward": 2}, "adamw"),
    ],
    ids=str,
)
def test_four_ranks_train_like_one_process(fsdp2: dict[str, Any], name: str):
    oracle, model = built(TinyComposer), built(TinyComposer)
    alone, sharded = (OPTIMIZERS[name](m.parameters()) for m in (oracle, model))
    samples = samples_of(20, 8)
    clip = {"change_gradients": lambda params: nn.utils.clip_grad_norm_(params, 0.5)}
    train_alone(oracle, alone, samples, 8, **clip)
    with installed():
        trainer = trainer_for(
            model,
            sharded,
            samples,
            fsdp2,
            batch=2,
            algorithms=GradientClipping("norm", 0.5),
            device_train_microbatch_size=1,
        )
        trainer.fit()
    trainer.close()
    assert largest_difference(model, oracle) <= 1e-6


@pytest.mark.world_size(4)
def test_hsdp_mesh_reaches_the_trainer():
    """Every rank holds half of each weight, and each half is held twice."""
    model = built(TinyComposer)
    with installed():
        trainer = trainer_for(
            model, SGD(model.parameters()), samples_of(1, 8), {"data_parallel_replicate_degree": 2}
        )
    mesh = trainer.state.device_mesh
    assert mesh is not None
    assert tuple(mesh.mesh.shape) == (2, 2)
    head = model.net.head.weight
    assert isinstance(head, DTensor)
    assert head.to_local().shape[0] == (9 if mesh.get_local_rank(1) == 0 else VOCAB - 9)
    trainer.close()


class Checkpointed(TinyComposer):
    """Says which modules are checkpointed, as Composer asks."""

    def __init__(self) -> None:
        super().__init__()
        self.net.activation_checkpointing_fn = lambda module: isinstance(module, Block)


@pytest.mark.table("activation_checkpointing-TinyComposer", "activation_cpu_offload-TinyComposer")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [TinyComposer, Checkpointed])
@pytest.mark.parametrize("how", ["activation_checkpointing", "activation_cpu_offload"])
def test_activation_checkpointing_changes_nothing(make: type[TinyComposer], how: str):
    found: list[dict[str, torch.Tensor]] = []
    for on in (True, False):
        model = built(make)
        with installed():
            trainer = trainer_for(model, SGD(model.parameters()), samples_of(5, 8), {how: on})
            trainer.fit()
        wrapped = [m for m in model.modules() if hasattr(m, "_checkpoint_wrapped_module")]
        assert len(wrapped) == (3 if on else 0)
        found.append(weights(model))
        trainer.close()
    assert largest_difference(*found) == 0.0


@pytest.mark.world_size(2)
def test_predicts_like_one_process():
    model = built(TinyComposer)
    oracle = copy.deepcopy(model)
    samples = samples_of(3, 8)
    with installed():
        trainer = trainer_for(model, SGD(model.parameters()), samples)
        loader = loader_of(samples, 4)
        outputs = trainer.predict(loader)
    assert len(outputs) == 3
    for batch, output in zip(loader, outputs, strict=True):
        assert (output - oracle(batch)).abs().max() <= 1e-6
    trainer.close()


@pytest.mark.world_size(2)
def test_evaluates_before_any_training():
    oracle, model = built(TinyComposer), built(TinyComposer)
    samples = samples_of(3, 8)
    train_alone(oracle, SGD(oracle.parameters()), samples, 8)
    with installed():
        trainer = trainer_for(
            model, SGD(model.parameters()), samples, eval_dataloader=loader_of(samples, 4)
        )
        trainer.eval()
        trainer.fit()
    assert largest_difference(model, oracle) <= 1e-6
    trainer.close()


@pytest.mark.world_size(2)
def test_the_trainers_default_optimizer():
    """Composer builds one before it shards."""
    model = built(TinyComposer)
    before = weights(model)
    with installed(), pytest.warns(UserWarning, match="No optimizer was specified"):
        trainer = trainer_for(model, None, samples_of(2, 8))
    trainer.fit()
    held = {
        id(param) for group in trainer.state.optimizers[0].param_groups for param in group["params"]
    }
    assert held == {id(param) for param in model.parameters()}
    assert largest_difference(model, before) > 0
    trainer.close()


# --------------------------------------------------------------------------------- Hugging Face


def _llama(tied: bool) -> Any:
    from composer.models import HuggingFaceModel
    from transformers import LlamaForCausalLM

    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = llama_config(tied, vocab_size=31, max_position_embeddings=32, **tokens)
    with warnings.catch_warnings():
        # There is no tokenizer without network, and none is needed for ready tokens.
        warnings.filterwarnings("ignore", "The tokenizer was not provided")
        return HuggingFaceModel(LlamaForCausalLM(config), use_logits=True)


@pytest.mark.table
@pytest.mark.smoke
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_model(tied: bool):
    model = built(lambda: _llama(tied))
    oracle = copy.deepcopy(model)
    tokens = Tokens(10 * 8)
    alone = ADAMW(oracle.parameters())
    for start in range(0, len(tokens), 8):
        ids = tokens.ids[start : start + 8]
        oracle({"input_ids": ids, "labels": ids})["loss"].backward()
        alone.step()
        alone.zero_grad()
    with installed():
        trainer = trainer_for(
            model, ADAMW(model.parameters()), tokens, eval_dataloader=loader_of(tokens, 4)
        )
        trainer.fit()
        trainer.eval()
    assert largest_difference(model, oracle) <= 1e-6
    head, embedding = model.model.lm_head.weight, model.model.model.embed_tokens.weight
    assert (head is embedding) is tied
    prompt = tokens.ids[:3, :4]
    settings = {"max_new_tokens": 6, "do_sample": False}
    model.eval()
    oracle.eval()
    assert torch.equal(
        model.generate(prompt, **settings), oracle.model.generate(prompt, **settings)
    )
    trainer.close()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks_write_into_the_callers_cache(dtype: str):
    """torch's own cast of inputs would give each block a copy, and generation would go wrong."""
    model = built(lambda: _llama(tied=False))
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32"}
    with installed():
        trainer = trainer_for(
            model, SGD(model.parameters()), Tokens(8), {"mixed_precision": precision}
        )
    with torch.no_grad():
        cache = model.model(input_ids=Tokens(2).ids, use_cache=True).past_key_values
    assert [cache.get_seq_length(layer) for layer in range(2)] == [6, 6]
    trainer.close()
