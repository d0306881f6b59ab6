"""Expert parallelism: bytes on the wire against theory, and CPU time of a step against by hand.

Method: four gloo ranks of this machine, one thread each, train a small Mixtral of transformers 4.51
(4 layers, d=128, 8 experts, 2 of them for a token, fp32), `--degree` of them hold the experts of a
layer between them.

`--figure bytes` counts the collectives of the second step. In theory a layer's tokens travel four
times a step, to the experts and back in forward and in backward, which is four times
`tokens x experts of a token x width` numbers on the average rank, and ranks first tell each other
how many rows come for each expert. A rank gathers 1/degree of the experts, twice, and reduces their
gradients once, over the ranks that hold the same ones. Goal: each ratio <= 1.005.

`--figure time` trains two copies in turns, as `step.py` does: one prepared by this package, and one
divided by hand with torch's `all_to_all_single_autograd` and `fully_shard` on two meshes. The
figure is the median of the ratio of process CPU times on rank 0. Goal: <= 1.10.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import comm
import shapes
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GOAL, BYTES_GOAL = 1.10, 1.005
RANKS, LAYERS, WIDTH, EXPERTS, CHOSEN = 4, 4, 128, 8, 2
SAMPLES, LENGTH, VOCAB = 4, 128, 2048
LAYER = "MixtralDecoderLayer"


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        vocab_size=VOCAB,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


# --- by hand ---


class _ExpertsByHand(nn.Module):
    def __init__(self, experts: nn.ModuleList, group: dist.ProcessGroup) -> None:
        super().__init__()
        share, place = EXPERTS // group.size(), group.rank()
        self.own = nn.ModuleList(list(experts)[place * share : (place + 1) * share])
        self.group = group

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What the experts make of each pair of token and expert, sorted by the expert."""
        ranks, order = self.group.size(), torch.argsort(chosen.flatten(), stable=True)
        mine = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        sent = mine.view(ranks, -1).sum(1).tolist()
        received = theirs.view(ranks, -1).sum(1).tolist()
        rows = tokens[order // CHOSEN]
        arrived: Any = all_to_all_single_autograd(rows, received, sent, self.group)
        expert = torch.arange(len(self.own)).repeat(ranks).repeat_interleave(theirs)
        by_expert = torch.argsort(expert, stable=True)
        parts = arrived[by_expert].split(torch.bincount(expert, minlength=len(self.own)).tolist())
        made = torch.cat([one(part) for one, part in zip(self.own, parts, strict=True)])
        returned: Any = all_to_all_single_autograd(
            made[torch.argsort(by_expert)].contiguous(), sent, received, self.group
        )
        return returned[torch.argsort(order)]


def _block_by_hand(block: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = hidden.view(-1, WIDTH)
    logits = block.gate(tokens)
    weights, chosen = torch.topk(torch.softmax(logits, dim=1), CHOSEN, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    made = block.experts(tokens, chosen).view(-1, CHOSEN, WIDTH)
    return (made * weights[..., None]).sum(1).view(hidden.shape), logits


def _by_hand(degree: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    everyone = init_device_mesh("cpu", (RANKS,))
    mesh = init_device_mesh("cpu", (RANKS // degree, degree), mesh_dim_names=("efsdp", "ep"))
    for layer in model.model.layers:
        block = layer.block_sparse_moe
        block.experts = _ExpertsByHand(block.experts, mesh["ep"].get_group())
        block.forward = MethodType(_block_by_hand, block)
        fully_shard(block.experts, mesh=mesh["efsdp"])
        block.experts.set_reduce_scatter_divide_factor(float(RANKS))
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone), _adamw(model)


def _ours(degree: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = _adamw(model)
    # By hand the ends of the model are in the root: two units more cost more.
    policy = {"classes": [LAYER], "embeddings": False, "lm_head": False}
    shapes.prepare(model, (LAYER,), optimizer, wrap_policy=policy, expert_parallel=degree)
    return model, optimizer


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A loop, for by hand lists of tensors may not be on several meshes.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


# --- time ---


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH))

    def step() -> float:
        start = time.process_time()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return step


def measure_time(degree: int, pairs: int, warmup: int) -> None:
    """Trains both copies on every rank and prints the line of rank 0."""
    ours, theirs = _steps(*_ours(degree)), _steps(*_by_hand(degree))
    shapes.paired_ratio(ours, theirs, warmup)
    value = shapes.paired_ratio(ours, theirs, pairs)
    if dist.get_rank() == 0:
        shapes.emit("experts_time", {"degree": degree, "ranks": RANKS, **value}, GOAL)


# --- bytes ---


def _is_divided(name: str) -> bool:
    return ".self_attn." in name


def _least(degree: int, tensor: int) -> comm.Traffic:
    """The least that the average rank sends."""
    model, tokens = _model(), SAMPLES * LENGTH
    units = shapes.plan(model, (LAYER,)).units
    dense = [
        SimpleNamespace(
            params=[name for name in unit.params if ".experts." not in name],
            reshard_after_forward=unit.reshard_after_forward,
        )
        for unit in units
    ]
    shard = RANKS // tensor
    least = comm.minimum(model, dense, shard, tensor=tensor, is_divided=_is_divided)
    for layer in model.model.layers:
        own = sum(p.numel() * 4 for p in layer.block_sparse_moe.experts.parameters()) // degree
        least.gather(own, RANKS // degree)
        least.gather(own, RANKS // degree)
        least.scatter(own, RANKS // degree)
        least.exchanged += 4 * tokens // tensor * CHOSEN * WIDTH * 4 + EXPERTS * 8
    if tensor > 1:
        _add_tensor(least, model, tokens, shard, tensor)
    return least


def _add_tensor(least: comm.Traffic, model: Any, tokens: int, shard: int, tensor: int) -> None:
    """Adds what ranks with the same tokens send each other, of attention and of experts.

    Outputs are added up in forward, gradients of inputs and of the router's weights in backward.
    What is whole on each rank has its gradient averaged.
    """
    for _ in model.model.layers:
        for _ in range(4):
            least.average(tokens * WIDTH * 4, tensor)
        least.average(tokens * CHOSEN * 4, tensor)
    for name, param in model.named_parameters():
        if not _is_divided(name) and ".experts." not in name:
            least.average(param.numel() * 4 // shard, tensor)


def measure_bytes(degree: int, tensor: int) -> None:
    """Counts a step on every rank, and prints the mean of them."""
    model, least = _model(), _least(degree, tensor)
    plan = {"lm_head": "whole", "*.gate": "whole"}
    config = {"tensor_parallel": {"degree": tensor, "layer_plan": plan}} if tensor > 1 else {}
    shapes.prepare(model, (LAYER,), expert_parallel=degree, **config)
    generator = torch.Generator().manual_seed(dist.get_rank() // tensor)
    tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator)
    for _ in range(2):
        with comm.CountTraffic() as counter:
            model(tokens, labels=tokens).loss.backward()
        model.zero_grad()
    seen = counter.traffic
    mean = torch.tensor([seen.wire, seen.exchanged], dtype=torch.float64)
    dist.all_reduce(mean)
    wire, exchanged = (mean / RANKS).tolist()
    layer: Any = model.get_submodule("model.layers.0.block_sparse_moe.experts")
    held = sum(p.numel() * 4 for p in layer.parameters() if p.to_local().numel())
    if dist.get_rank() == 0:
        value = {
            "degree": degree,
            "tensor": tensor,
            "ranks": RANKS,
            "ratio": max(wire / least.wire, exchanged / least.exchanged),
            "wire_bytes": [round(wire), round(least.wire)],
            "exchanged_bytes": [round(exchanged), least.exchanged],
            "gathered_experts_bytes_of_a_layer": held,
            "calls": dict(seen.calls),
            "minimum_calls": dict(least.calls),
        }
        shapes.emit("experts_bytes", value, BYTES_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=["bytes", "time"], default="bytes")
    parser.add_argument("--degree", type=int, choices=[2, 4], default=2)
    parser.add_argument("--tensor", type=int, choices=[1, 2], default=1)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    if options.figure == "bytes":
        shapes.run_ranks(measure_bytes, RANKS, options.degree, options.tensor)
    else:
        shapes.run_ranks(measure_time, RANKS, options.degree, options.pairs, options.warmup)


if __name__ == "__main__":
    main()
