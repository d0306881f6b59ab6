"""CPU time of a step of Muon on a sharded model, against the same by hand or torch's on DTensors.

Method: two gloo ranks of this machine, one thread each, a GPT-2-like model (`--blocks` blocks of
width `--width`, fp32, iteration in fp32). `composer_fsdp2.Muon` is given to `prepare_fully_shard`;
the other side steps the same model in the same process with the same gradients. The steps alternate
and the order within a pair is swapped every time; `ratio` is the median over the pairs of process
CPU times on rank 0.

`--over hand` is what a user would write for this model: plain shards, one all-to-all that brings
half of the matrices whole to each rank, Newton-Schulz, one all-to-all back, and torch's AdamW for
the rest. `--over torch` is `torch.optim.Muon` on the DTensors that `fully_shard` makes, and torch's
AdamW for the rest (torch 2.9 and newer).

`collectives` counts those of one step of ours, `collectives_of_the_other` those of the other side.
`bytes_over_theory` compares what ours sends with (N - 1)/N of all matrices, there and back.
`difference` is that of the weights of both sides after all steps: torch's on DTensors computes
something else in the third digit.

Goal: collectives 2, bytes_over_theory 1.005, ratio over hand 1.10, over torch 1.00.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import shapes
import torch
import torch.distributed as dist
from optimizer import Block, Gradients, Model, _like
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

GOALS = {"hand": 1.10, "torch": 1.00}
RATES: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Side:
    """Parameters by name, and a step of theirs."""

    params: dict[str, Any]
    step: Callable[[], Any]


class Sent(TorchDispatchMode):
    """Adds up the bytes that all-to-alls send to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall_base_" in str(func):
            elements = sum(args[4]) - args[4][dist.get_rank()]
            self.size_bytes += elements * args[1].element_size()
        return func(*args, **(kwargs or {}))


def _build(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return Model((Block(width) for _ in range(blocks)), width)


def _is_hidden(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name and "embed" not in name


def _ours(model: nn.Module) -> Side:
    from composer_fsdp2 import Muon, prepare_fully_shard

    # By hand and by torch each matrix is one; ours would take `qkv` block by block.
    optimizer = Muon(model, iteration_dtype="fp32", blocks={"*.qkv.weight": None}, **RATES)
    prepare_fully_shard(model, optimizer, {"wrap_policy": {"classes": ["Block"]}}, device="cpu")
    return Side(dict(model.named_parameters()), optimizer.step)


def _torchs(model: nn.Module) -> Side:
    shapes.shard_by_hand(model, ("Block",), init_device_mesh("cpu", (dist.get_world_size(),)))
    params = dict(model.named_parameters())
    hidden = [param for name, param in params.items() if _is_hidden(name)]
    rest = [param for name, param in params.items() if not _is_hidden(name)]
    muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **RATES)  # type: ignore
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), **RATES)

    def step() -> None:
        muon.step()
        adamw.step()

    return Side(params, step)


def _by_hand(model: nn.Module) -> Side:
    """On plain tensors of the shards' sizes; all matrices have rows that two ranks divide."""
    params = {name: nn.Parameter(_rows(param)) for name, param in model.named_parameters()}
    hidden = [param for name, param in params.items() if _is_hidden(name)]
    rest = [param for name, param in params.items() if not _is_hidden(name)]
    momenta = [torch.zeros_like(param) for param in hidden]
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), **RATES)

    def step() -> None:
        with torch.no_grad():
            grads = [param.grad for param in hidden if param.grad is not None]
            torch._foreach_lerp_(momenta, grads, 0.05)
            updates = torch._foreach_lerp(grads, momenta, 0.95)
            _step_hidden(hidden, _exchanged(list(updates)))
        adamw.step()

    return Side(params, step)


def _rows(whole: Tensor) -> Tensor:
    return whole.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


def _step_hidden(hidden: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
    for param, update in zip(hidden, updates, strict=True):
        longest = max(param.shape[0] * dist.get_world_size(), param.shape[1])
        param.mul_(1 - RATES["lr"] * RATES["weight_decay"])
        param.sub_(update, alpha=RATES["lr"] * 0.2 * longest**0.5)


def _exchanged(shards: list[Tensor]) -> list[Tensor]:
    """Every rank makes its share of the matrices orthogonal; returns this rank's rows of all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    owned = [shards[owner::ranks] for owner in range(ranks)]
    sizes = [sum(part.numel() for part in parts) for parts in owned]
    sent = torch.cat([part.reshape(-1) for parts in owned for part in parts])
    gathered = sent.new_empty(ranks * sizes[rank])
    dist.all_to_all_single(gathered, sent, [sizes[rank]] * ranks, sizes)
    rows = [_cut(buffer, owned[rank]) for buffer in gathered.split(sizes[rank])]
    whole = [_orthogonal(torch.cat(parts)) for parts in zip(*rows, strict=True)]
    back = torch.cat([m.chunk(ranks)[to].reshape(-1) for to in range(ranks) for m in whole])
    results = torch.empty_like(sent)
    dist.all_to_all_single(results, back, sizes, [sizes[rank]] * ranks)
    by_owner = [_cut(b, parts) for b, parts in zip(results.split(sizes), owned, strict=True)]
    return [by_owner[at % ranks][at // ranks] for at in range(len(shards))]


def _cut(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = buffer.split([part.numel() for part in like])
    return [part.view_as(one) for part, one in zip(parts, like, strict=True)]


def _orthogonal(matrix: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _timed(side: Side, gradients: dict[str, Tensor]) -> Callable[[], float]:
    def measure() -> float:
        for name, param in side.params.items():
            new = gradients[name].clone()
            param.grad = _like(param, new) if isinstance(param, DTensor) else new
        start = time.process_time()
        side.step()
        return time.process_time() - start

    return measure


def measure(over: str, blocks: int, width: int, pairs: int, warmup: int) -> None:
    """Steps both on every rank and prints the line of rank 0."""
    ours = _ours(_build(blocks, width))
    other = {"hand": _by_hand, "torch": _torchs}[over](_build(blocks, width))
    values = Gradients(list(ours.params.values())).values
    gradients = dict(zip(ours.params, values, strict=True))
    sides = [_timed(side, gradients) for side in (ours, other)]
    gc.collect()
    gc.freeze()
    shapes.paired_ratio(sides[0], sides[1], warmup)
    value = shapes.paired_ratio(sides[0], sides[1], pairs)
    gc.unfreeze()
    counts: list[int] = []
    for side in sides:
        with CommDebugMode() as made:
            side()
        counts.append(made.get_total_counts())
    with Sent() as sent:
        sides[0]()
    sides[1]()
    matrices = sum(param.numel() for name, param in ours.params.items() if _is_hidden(name))
    share = 1 - 1 / dist.get_world_size()
    # A rank sends its rows of matrices of other ranks, and the others' rows of its own.
    total = torch.tensor(float(sent.size_bytes))
    dist.all_reduce(total)
    pairs_of = [(_local(p), _local(other.params[name])) for name, p in ours.params.items()]
    difference = max((a - b).abs().max().item() for a, b in pairs_of)
    if dist.get_rank() == 0:
        told = {"over": over, "blocks": blocks, "width": width, "ranks": dist.get_world_size()}
        found = {
            "collectives": counts[0],
            "collectives_of_the_other": counts[1],
            "bytes_over_theory": total.item() / (2 * share * matrices * 4),
            "difference": difference,
        }
        shapes.emit("muon", {**told, **found, **value}, GOALS[over])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--over", choices=GOALS, default="hand")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    if options.over == "torch" and not hasattr(torch.optim, "Muon"):
        parser.error(f"torch {torch.__version__} has no Muon. Use --over hand, or torch 2.9.")
    wanted = (options.over, options.blocks, options.width, options.pairs, options.warmup)
    shapes.run_ranks(measure, 2, *wanted)


if __name__ == "__main__":
    main()
