"""Features with streams, collectives or devices of their own compute what they do on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

from composer_fsdp2 import Muon, clip_grad_norm_, prepare_fully_shard
from tests.accelerator.device import BACKEND, NAME
from tests.accelerator.training import Pretend
from tests.dist.test_expert_parallel import _mixtral
from tests.support.experts import Sparse, choose
from tests.support.models import TinyLM, batches, llama_config
from tests.support.parity import model_loss

STEPS = 3


def llama() -> nn.Module:
    return LlamaForCausalLM(llama_config(num_key_value_heads=2))


def large() -> nn.Module:
    return TinyLM(width=200)  # parameters below a size keep their state as it is


Case = tuple[Callable[[], nn.Module], dict[str, Any]]
CASES: dict[str, Case] = {
    "Muon": (TinyLM, {}),
    "Muon, offloaded": (TinyLM, {"cpu_offload": True}),
    "state in bf16": (large, {"optimizer_state": {"dtype": "bf16"}}),
    "state in 8 bits": (large, {"optimizer_state": {"bits": 8, "device": "cpu"}}),
    "DTensors stepped": (TinyLM, {"local_step": False, "cpu_offload": True}),
    "unused experts": (Sparse, {}),
    "fp32 norms": (TinyLM, {"keep_fp32": ["*norm*"]}),
    "tensors divided": (llama, {"tensor_parallel": {"degree": 2}}),
    "sequences divided": (llama, {"sequence_parallel": {"degree": 2}}),
    "experts divided": (_mixtral, {"expert_parallel": {"degree": 2, "modules": "auto"}}),
    "chunked": (llama, {"chunked_loss": {"chunks": 2}, "tiled_mlp": {"shards": 2}}),
    "all offloaded": (
        TinyLM,
        {"activation_checkpointing": True, "activation_cpu_offload": True, "cpu_offload": True},
    ),
}


def losses(name: str, settings: Mapping[str, Any], where: str) -> list[float]:
    """The losses of this rank's steps on a device."""
    torch.manual_seed(0)
    model = CASES[name][0]()
    optimizer: torch.optim.Optimizer = (
        # In bf16 the last bits of a gradient, which differ between devices, become eight.
        Muon(model, lr=3e-3, iteration_dtype="fp32")
        if "Muon" in name
        else torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    )
    device = "cpu" if where == "cpu" else Pretend()
    prepare_fully_shard(model, optimizer, settings, precision="fp32", device=device)
    choose(model, [0, 1] if dist.get_rank() else [1, 1])
    divides = {"tensor_parallel", "sequence_parallel"} & settings.keys()
    found = []
    for batch in batches(STEPS, 4, length=8):
        own = batch if divides else [part.chunk(2)[dist.get_rank()] for part in batch]
        ids, targets = (part.to(where) for part in own)
        if isinstance(model, TinyLM):
            loss = model_loss(model, (ids, targets))
        else:
            loss = model(input_ids=ids, labels=targets, use_cache=False).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.world_size(2, backend=BACKEND)
@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.")
@pytest.mark.parametrize("name", CASES)
def test_computes_as_on_the_cpu(name: str):
    settings = CASES[name][1]
    on_the_cpu = {key: value for key, value in settings.items() if key != "cpu_offload"}
    expected = losses(name, on_the_cpu, "cpu")
    # State is rounded by chance, and gradients differ in their last bits.
    tolerance = 1e-3 if "optimizer_state" in settings else 1e-6
    assert losses(name, settings, NAME) == pytest.approx(expected, rel=tolerance)


class MovesToItsHead(nn.Module):
    """Asks where its head's weight is, as MPT does, before it calls the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body._fsdp_wrap = self.head._fsdp_wrap = True  # pyright: ignore
        self.places: list[str] = []
        self.head.register_forward_hook(
            lambda _module, inputs, _output: self.places.append(inputs[0].device.type)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(hidden).to(self.head.weight.device))


@pytest.mark.world_size(1, backend=BACKEND)
@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor.")
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_inputs_that_a_model_moved_to_offloaded_weights_come_back(precision: str):
    model = MovesToItsHead()
    prepare_fully_shard(model, None, {"cpu_offload": True}, precision=precision, device=Pretend())
    model(torch.ones(2, 8, device=NAME)).sum().backward()
    assert model.places == [NAME]
