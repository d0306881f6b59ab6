"""A step waits for the device no more often than Composer's own, and not once for each unit."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from composer.core import Callback, State
from composer.optim import DecoupledAdamW
from transformers import LlamaForCausalLM

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.checkpoint.write import Staging
from tests.accelerator import device
from tests.accelerator.device import BACKEND, NAME
from tests.accelerator.training import Pretend
from tests.support.models import TinyComposer, TinyLM, batches, llama_config, lm_loss
from tests.support.training import built, samples_of, trainer_for

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "recomputed": {"activation_checkpointing": True},
    "last gradients": {"gradient_sync": "last"},
    "state on the CPU": {"optimizer_state": {"device": "cpu"}},
}
SEARCHED = 3
"""batches in which what is checked once is checked"""


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.filterwarnings("ignore:gradient_sync is 'last'")
@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp32") for name in SETTINGS), ("recomputed", "amp_bf16")]
)
def test_forward_backward_and_step_wait_for_nothing(name: str, precision: str):
    model = TinyLM("two modules")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepare_fully_shard(model, optimizer, SETTINGS[name], precision=precision, device=Pretend())
    for step, batch in enumerate(batches(5, 8)):
        ids, targets = (part.to(NAME) for part in batch)
        with device.waits() if step >= SEARCHED else contextlib.nullcontext(Counter()) as found:
            with torch.autocast(NAME, torch.bfloat16, enabled=precision == "amp_bf16"):
                loss = lm_loss(model(ids), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not found, found


class Waits(Callback):
    """Keeps what the host waited for in each batch."""

    def __init__(self, found: Counter[str]) -> None:
        self.found, self.batches = found, list[Counter[str]]()

    def batch_end(self, state: State, logger: Any) -> None:
        self.batches.append(Counter(self.found))
        self.found.clear()


class Buffered(TinyComposer):
    """Has a buffer in each block."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.net.blocks:
            block.register_buffer("seen", torch.zeros(2))


def waits_of(parallelism: Any, size: int | str, layers: int = 3) -> Counter[str]:
    """The waits of a batch of the Trainer, once the first ones are over."""
    model = built(lambda: Buffered(layers=layers)).to(NAME)
    with installed(), device.waits() as found:
        waits = Waits(found)
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(6, 8),
            device=Pretend(),
            parallelism_config=parallelism,
            device_train_microbatch_size=size,
            callbacks=[waits],
        )
        trainer.fit()
        trainer.close()
    return waits.batches[-1]


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.parametrize("size", [4, 1])
def test_a_batch_of_the_trainer_waits_no_more_often_than_composers(size: int):
    composers = waits_of(None, size)
    own = waits_of({"fsdp2": {}}, size)
    assert composers
    assert not own - composers, own


@pytest.mark.world_size(2, backend=BACKEND)
def test_no_wait_comes_from_a_unit_or_a_microbatch():
    found = waits_of({"fsdp2": {}}, 4, layers=3)
    assert waits_of({"fsdp2": {}}, 4, layers=6) == found
    assert waits_of({"fsdp2": {}}, 1, layers=3) == found


@pytest.mark.world_size(2, backend=BACKEND)
def test_a_batch_that_may_be_tried_again_keeps_buffers_without_a_wait():
    found = waits_of({"fsdp2": {}}, "auto")
    assert found
    assert not [place for place in found if "snapshot" in place], found


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_a_divided_sequence_waits_no_more_often_for_more_layers(method: str):
    found = []
    for layers in (1, 3):
        model = LlamaForCausalLM(llama_config(num_hidden_layers=layers))
        settings = {"sequence_parallel": {"degree": 2, "method": method}}
        prepare_fully_shard(model, None, settings, precision="fp32", device=Pretend())
        for ids, _ in batches(2, 4, length=8):
            mask = torch.ones_like(ids)
            mask[0, -2:] = 0
            given = {"input_ids": ids, "labels": ids, "attention_mask": mask}
            with device.waits() as waits:
                on = {name: value.pin_memory().to(NAME) for name, value in given.items()}
                model(**on, position_ids=torch.arange(8, device=NAME).expand(4, 8)).loss.backward()
        found.append(waits)
    assert found[0] == found[1]
    assert 0 < sum(times for place, times in found[0].items() if "parallel.sequence" in place) <= 3


@pytest.mark.world_size(2, backend=BACKEND)
def test_composers_adamw_reads_no_count_of_steps_from_the_device():
    model = TinyLM("two modules")
    optimizer = DecoupledAdamW(model.parameters(), lr=0.1)
    prepare_fully_shard(model, optimizer, {}, precision="fp32", device=Pretend())
    for step, batch in enumerate(batches(5, 8)):
        ids, targets = (part.to(NAME) for part in batch)
        lm_loss(model(ids), targets).backward()
        with device.waits() if step >= SEARCHED else contextlib.nullcontext(Counter()) as found:
            optimizer.step()
        assert not found, found


@pytest.mark.world_size(1, backend=BACKEND)
def test_a_checkpoint_is_copied_without_a_wait_for_each_tensor():
    values = {name: torch.full((3,), 2.0, device=NAME) for name in "abc"}
    with device.waits() as found:
        copied = Staging().copy(values)
    assert sum(found.values()) <= 1, found
    assert all(torch.equal(copy, torch.full((3,), 2.0)) for copy in copied.values())
