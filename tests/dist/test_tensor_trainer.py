"""Composer's Trainer with tensor parallelism: data, counts, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.callbacks import OptimizerMonitor, SpeedMonitor
from composer.core import Evaluator
from composer.models import ComposerModel
from composer.utils import dist as composer_dist
from composer.utils.parallelism import TPConfig
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from composer_fsdp2 import install
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.step.run import run_of
from composer_fsdp2.trainer.loop.groups import refuse_auto
from tests.dist.test_tensor_parallel import global_batches, gpt2, llama
from tests.support.parity import TOLERANCE
from tests.support.training import largest_difference, loader_of, trainer_for

STEPS, SIZE, DEGREE = 4, 8, 2


class Language(ComposerModel):
    """A batch is (ids, ids)."""

    def __init__(self, kind: str = "gpt2") -> None:
        super().__init__()
        self.net = (
            gpt2() if kind == "gpt2" else llama(tie_word_embeddings=True, num_key_value_heads=4)
        )

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0], use_cache=False)

    def loss(self, outputs: Any, batch: Any, *_: Any) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[0][:, 1:].flatten())


def samples(count: int = STEPS * SIZE) -> TensorDataset:
    ids = global_batches(STEPS).flatten(0, 1)[:count]
    return TensorDataset(ids, ids)


def built(kind: str = "gpt2") -> Language:
    torch.manual_seed(0)
    return Language(kind)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    # A larger eps keeps rounding in gradients that are zero from becoming steps.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)


def trained_alone(
    kind: str, data: TensorDataset, change: Callable[[Any], object] = list
) -> tuple[Language, list[float]]:
    model = built(kind)
    optimizer, losses = adamw(model), list[float]()
    for start in range(0, len(data), SIZE):
        batch = data[start : start + SIZE]
        loss = model.loss(model(batch), batch)
        loss.backward()
        change(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def trained(parallelism: dict[str, Any], kind: str = "gpt2", **kwargs: Any) -> Any:
    model = built(kind)
    settings = {"batch": SIZE // 2, "parallelism_config": parallelism, **kwargs}
    trainer = trainer_for(model, adamw(model), samples(), **settings)
    trainer.fit()
    return trainer


FORMS: dict[str, dict[str, Any]] = {
    "degree": {"tp": {"degree": 2}, "fsdp2": {}},
    "in fsdp2": {"fsdp2": {"tensor_parallel": 2}},
    "layer_plan": {
        "tp": {
            "tensor_parallel_degree": 2,
            "layer_plan": {"*.c_attn": "colwise", "*.mlp.c_fc": "colwise"},
        },
        "fsdp2": {},
    },
    "TPConfig": {
        "tp": TPConfig(
            tensor_parallel_degree=2,
            layer_plan={"*.mlp.c_fc": ColwiseParallel(), "*.mlp.c_proj": RowwiseParallel()},
        ),
        "fsdp2": {},
    },
}


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("form", FORMS)
def test_trainer_reads_counts_and_trains_as_one_process(form: str):
    install()
    expected, _ = trained_alone("gpt2", samples())
    trainer = trained(FORMS[form])
    timestamp = trainer.state.timestamp
    assert timestamp.sample.value == STEPS * SIZE
    assert timestamp.batch.value == STEPS
    assert largest_difference(trainer.state.model, expected) <= TOLERANCE


@pytest.mark.world_size(4)
def test_different_batches_in_a_group_are_an_error_on_every_rank():
    install()
    model = built()
    data = samples()
    # Each rank has its own data, as a dataset that deals itself to ranks has.
    rolled = TensorDataset(data.tensors[0].roll(dist.get_rank(), 0), data.tensors[1])
    trainer = trainer_for(
        model,
        adamw(model),
        data,
        parallelism_config=FORMS["degree"],
        train_dataloader=loader_of(rolled, SIZE // 2),
    )
    with pytest.raises(PlanError, match=r"Ranks 0 and 1 .* read different batches.*num_replicas"):
        trainer.fit()


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("parallelism", "match"),
    [
        ({"tp": {"degree": 3}, "fsdp2": {}}, "does not divide the world size 4"),
        ({"tp": {"strategy": "ffn"}, "fsdp2": {}}, "strategy 'ffn'.*different data"),
        (
            {"tp": {"degree": 2}, "fsdp2": {"cpu_offload": True}},
            "'cpu_offload' is true beside 'tensor_parallel'",
        ),
        ({"tp": {"degree": 2}, "fsdp2": {"tensor_parallel": 2}}, "Both 'tp' and"),
    ],
)
def test_bad_settings_are_refused(parallelism: dict[str, Any], match: str):
    install()
    model = built()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=match):
        trainer_for(model, adamw(model), samples(), parallelism_config=parallelism)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


ITEMS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "monitor": ({"callbacks": [OptimizerMonitor()]}, ConfigError, "OptimizerMonitor and tensor"),
    "auto": (
        {"device_train_microbatch_size": "auto"},
        ConfigError,
        "is auto, and tensor parallelism is asked for",
    ),
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", ITEMS)
def test_items_that_have_not_been_tried_are_refused(case: str):
    install()
    given, kind, match = ITEMS[case]
    model = built()
    settings = {"parallelism_config": FORMS["degree"], **given}
    with pytest.raises(kind, match=match):
        trainer_for(model, adamw(model), samples(), **settings)


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_and_microbatches(kind: str):
    install()
    threshold = 0.05 if kind == "norm" else 1e-3
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[kind]
    expected, _ = trained_alone("gpt2", samples(), lambda params: clip(params, threshold))
    trainer = trained(
        FORMS["degree"],
        algorithms=[GradientClipping(kind, threshold)],
        callbacks=[SpeedMonitor(window_size=2)],
        device_train_microbatch_size=2,
    )
    assert largest_difference(trainer.state.model, expected) <= TOLERANCE


@pytest.mark.world_size(4)
def test_operations_are_counted_once():
    install()
    model = built()
    model.flops_per_batch = lambda batch: 12 * len(batch[0])
    trainer_for(model, adamw(model), samples(), parallelism_config=FORMS["degree"])
    assert model.flops_per_batch(samples()[:4]) == 24


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:Cannot split tensor of length 3")
@pytest.mark.world_size(4)
def test_evaluation_and_data_that_ends_unevenly():
    install()
    data = samples(STEPS * SIZE - 3)
    model = built()
    trainer = trainer_for(
        model,
        adamw(model),
        data,
        batch=SIZE // 2,
        parallelism_config=FORMS["degree"],
        eval_dataloader=loader_of(samples(SIZE - 2), SIZE // 2),
    )
    trainer.fit()
    trainer.eval()
    # The sampler repeats one sample, so that both groups have 15.
    assert trainer.state.timestamp.sample.value == STEPS * SIZE - 2
    assert trainer.state.eval_timestamp.sample.value == SIZE - 2
    odd = Evaluator(label="odd", dataloader=groups_loader(samples(5)))
    # The second one deals to ranks, and comes to the Trainer when it evaluates.
    for given in (odd, Evaluator(label="late", dataloader=loader_of(samples(5), SIZE // 2))):
        trainer.eval(eval_dataloader=given)
        assert trainer.state.eval_timestamp.sample.value == 5
    odd.auto_microbatching = True  # which Composer takes on a GPU alone
    with pytest.raises(ConfigError, match="device_eval_microbatch_size of 'odd' is auto"):
        refuse_auto(run_of(trainer.state.model).batch_group, odd)
    expected, _ = trained_alone("gpt2", repeated(data))
    assert largest_difference(trainer.state.model, expected) <= TOLERANCE


def groups_loader(data: TensorDataset) -> DataLoader[Any]:
    """As a user who knows of groups writes it."""
    sampler = composer_dist.get_sampler(
        data, num_replicas=2, rank=dist.get_rank() // DEGREE, shuffle=False
    )
    return DataLoader(data, batch_size=SIZE // 2, sampler=sampler)


def repeated(data: TensorDataset) -> TensorDataset:
    """With the first sample once more at the end, as the sampler pads it."""
    ids = torch.cat([data.tensors[0], data.tensors[0][:1]])
    return TensorDataset(ids, ids)
