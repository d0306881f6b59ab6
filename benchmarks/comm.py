"""Bytes on the wire in one training step, against the least the chosen units allow.

Method: a step of a Llama-like model (8 blocks, d=256, vocabulary 2048, fp32) runs under a dispatch
mode that sees every collective; the second step is counted, so agreements made once are not in it.
`--backend fake` is one process of an 8-rank group; `--backend gloo` is real ranks (2, or 4 where a
case needs a second axis). The counts are exact and do not depend on the hardware.

The theory follows from the plan: every unit is gathered once for the forward; once more for the
backward if it gave its parameters up and a gradient passes through it (over the smaller group if it
resharded to an int); the gradients of its trainable parameters are reduce-scattered once, and with
replicas their shards are all-reduced once. All of that happens in each of `microbatches`, but for
what `gradient_sync` puts off to the last one: with `last` the reductions, and gathers of units that
keep their parameters anyway; with `reduce_scatter_only` the all-reduce.

Goal: ratio <= 1.005 in every case. `--over composer` prints instead what a case sends over what
Composer's own `prepare_fully_shard` sends for the same microbatches, all of which it reduces.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import shapes
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

GOAL = 1.005
_CONTROL = {"wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd"}


@dataclass
class Traffic:
    """Bytes of one rank in one step, un-sharded side."""

    gathered: int = 0
    reduced: int = 0
    averaged: int = 0
    exchanged: int = 0
    """rows that go to other ranks and those that stay, in `wire` neither"""
    wire: float = 0.0
    """what a ring sends: (n-1)/n of a gather or a scatter, twice that of an all-reduce"""
    calls: Counter[str] = field(default_factory=Counter)

    def gather(self, nbytes: int, ranks: int) -> None:
        self.gathered += nbytes
        self.wire += nbytes * (ranks - 1) / ranks
        self.calls["all_gather"] += 1

    def scatter(self, nbytes: int, ranks: int) -> None:
        self.reduced += nbytes
        self.wire += nbytes * (ranks - 1) / ranks
        self.calls["reduce_scatter"] += 1

    def average(self, nbytes: int, ranks: int) -> None:
        self.averaged += nbytes
        self.wire += 2 * nbytes * (ranks - 1) / ranks
        self.calls["all_reduce"] += 1


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class CountTraffic(TorchDispatchMode):
    """Adds up every collective that reaches the dispatcher, in place or functional."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls again, with what it sends
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        if name == "_allgather_base_":
            self.traffic.gather(_nbytes(args[0]), args[0].numel() // args[1].numel())
        elif name == "_reduce_scatter_base_":
            self.traffic.scatter(_nbytes(args[1]), args[1].numel() // args[0].numel())
        elif name == "allreduce_":
            self.traffic.average(
                sum(map(_nbytes, args[0])), dist.ProcessGroup.unbox(args[1]).size()
            )
        elif name.startswith("all_gather_into_tensor"):
            self.traffic.gather(_nbytes(result), args[1])
        elif name == "reduce_scatter_tensor":
            self.traffic.scatter(_nbytes(args[0]), args[2])
        elif name in ("all_reduce", "all_reduce_"):
            group = torch._C._distributed_c10d._resolve_process_group(args[2])
            self.traffic.average(_nbytes(args[0]), group.size())
        elif name == "alltoall_base_":
            self.traffic.exchanged += _nbytes(args[1])
        elif name not in _CONTROL:
            self.traffic.calls[f"other:{name}"] += 1


def minimum(
    model: nn.Module,
    units: Sequence[Any],
    shard: int,
    replicate: int = 1,
    microbatches: int = 1,
    sync: str = "every",
    tensor: int = 1,
    is_divided: Callable[[str], bool] | None = None,
) -> Traffic:
    """The least traffic of one step for these units; call it before the model is sharded.

    With `tensor`, of what each rank of a tensor group holds of them: a part of the parameters that
    `is_divided` names.
    """
    is_divided = is_divided or _is_divided
    scatters = 1 if sync == "last" else microbatches
    averages = microbatches if sync == "every" else 1
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    params = dict(model.named_parameters())
    # Registration order is forward order here, so a gradient reaches everything from here on.
    first_trainable = min(order[name] for name, param in params.items() if param.requires_grad)
    least = Traffic()
    for unit in units:
        own = {name: params[name] for name in unit.params if name in params}
        parts = {name: tensor if is_divided(name) else 1 for name in own}
        nbytes = sum(_nbytes(param) // parts[name] for name, param in own.items())
        kept = unit.reshard_after_forward is False
        for _ in range(1 if kept and sync == "last" else microbatches):
            least.gather(nbytes, shard)
        reached = max(order[name] for name in own) >= first_trainable
        if not kept and reached and not _only_embeddings(model, own):
            again = unit.reshard_after_forward
            for _ in range(microbatches):
                least.gather(nbytes, shard if again is True else again)
        trained = [(name, param) for name, param in own.items() if param.requires_grad]
        if trainable := sum(_nbytes(param) // parts[name] for name, param in trained):
            for _ in range(scatters):
                least.scatter(trainable, shard)
            for _ in range(averages if replicate > 1 else 0):
                least.average(trainable // shard, replicate)
    return least


def _is_divided(name: str) -> bool:
    return any(f".{layer}." in f".{name}" for layer in (*shapes.COLUMNS, *shapes.ROWS, "head"))


def add_exchanges(
    least: Traffic, model: nn.Module, tokens: int, shard: int, tensor: int, *, whole_logits: bool
) -> None:
    """Adds the least that the ranks of a tensor group send each other in one step, fp32.

    The outputs of each attention and MLP are added up in forward, the gradients of their inputs and
    of the head's in backward. Logits are put together, or four numbers a token are. What is whole
    on each rank has its gradient averaged.
    """
    head: Any = model.get_submodule("head")
    activations = tokens * head.in_features * 4
    for _ in range(4 * len(model.get_submodule("blocks")._modules) + 1):
        least.average(activations, tensor)
    least.gather(tokens * 4 * (head.out_features if whole_logits else 4 * tensor), tensor)
    for name, param in model.named_parameters():
        if not _is_divided(name):
            least.average(_nbytes(param) // shard, tensor)


def _only_embeddings(model: nn.Module, names: Sequence[str] | dict[str, Any]) -> bool:
    """An embedding's backward reads the indices, never the weight."""
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    return all(isinstance(owner, nn.Embedding) for owner in owners)


# --- cases ---


def _frozen_middle() -> nn.Module:
    model = shapes.LlamaLike()
    model.blocks[2:6].requires_grad_(False)
    return model


def _frozen_prefix() -> nn.Module:
    model = shapes.LlamaLike()
    model.embed.requires_grad_(False)
    model.blocks[:4].requires_grad_(False)
    return model


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module] = shapes.LlamaLike
    reshard: bool | int | str = "auto"
    replicate: int | None = None
    classes: tuple[str, ...] = ("Block",)
    gloo_ranks: int = 2
    microbatches: int = 1
    sync: str = "every"
    tensor: int = 1
    """ranks that divide a layer"""

    @property
    def config(self) -> dict[str, Any]:
        """What stands under `fsdp2` in a YAML besides the choice of units."""
        degrees = {} if self.replicate is None else {"data_parallel_replicate_degree": 2}
        return {
            "reshard_after_forward": self.reshard,
            "gradient_sync": self.sync,
            **self.extra,
            **degrees,
            **({} if self.tensor == 1 else {"tensor_parallel": shapes.tensor_setting(self.tensor)}),
        }

    extra: dict[str, Any] = field(default_factory=dict)


_ONE_CHUNK = {"chunked_loss": {"chunks": 1}}
CASES = {
    "plain": Case(),
    "kept": Case(reshard=False),
    "tied": Case(lambda: shapes.LlamaLike(tied=True)),
    "frozen_middle": Case(_frozen_middle),
    "frozen_prefix": Case(_frozen_prefix),
    "lora": Case(lambda: shapes.add_lora(shapes.LlamaLike())),
    "int_reshard": Case(reshard=2, gloo_ranks=4),
    "hsdp": Case(replicate=2, gloo_ranks=4),
    "embedding_unit": Case(classes=("Block", "Embedding")),
    "prefetch": Case(extra={"forward_prefetch": 2, "backward_prefetch": 2}),
    "accumulate_every": Case(microbatches=4),
    "accumulate_last": Case(microbatches=4, sync="last"),
    "accumulate_last_freed": Case(microbatches=4, sync="last", reshard=True),
    "accumulate_last_kept": Case(microbatches=4, sync="last", reshard=False),
    "accumulate_last_int": Case(microbatches=4, sync="last", reshard=2, gloo_ranks=4),
    "hsdp_every": Case(microbatches=4, replicate=2, gloo_ranks=4),
    "hsdp_last": Case(microbatches=4, sync="last", replicate=2, gloo_ranks=4),
    "hsdp_reduce_scatter_only": Case(
        microbatches=4, sync="reduce_scatter_only", replicate=2, gloo_ranks=4
    ),
    "tensor_2": Case(partial(shapes.with_heads_of, 2), tensor=2, gloo_ranks=4),
    "tensor_4": Case(partial(shapes.with_heads_of, 4), tensor=4, gloo_ranks=4),
    "tensor_2_hsdp": Case(partial(shapes.with_heads_of, 2), replicate=2, tensor=2, gloo_ranks=4),
    "tensor_2_loss": Case(
        partial(shapes.with_heads_of, 2), tensor=2, gloo_ranks=4, extra=_ONE_CHUNK
    ),
    "tensor_4_loss": Case(
        partial(shapes.with_heads_of, 4), tensor=4, gloo_ranks=4, extra=_ONE_CHUNK
    ),
}


def _units_by_hand(
    model: nn.Module, classes: tuple[str, ...], reshard: bool | int
) -> list[SimpleNamespace]:
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    names = [name for name, _ in model.named_parameters()]
    units = [
        SimpleNamespace(
            params=[n for n in names if n.startswith(f"{block}.")], reshard_after_forward=reshard
        )
        for block in blocks
    ]
    inside = {name for unit in units for name in unit.params}
    rest = [name for name in names if name not in inside]
    return [*units, SimpleNamespace(params=rest, reshard_after_forward=False)]


def _shard_hand(model: nn.Module, case: Case, world: int) -> Sequence[Any]:
    reshard = True if case.reshard == "auto" else case.reshard
    units = _units_by_hand(model, case.classes, reshard)
    if case.tensor > 1:
        shapes.divide_by_hand(model, case.tensor, case.replicate or 1)
        return units
    shapes.shard_by_hand(model, case.classes, _mesh_by_hand(case, world), reshard)
    return units


def _mesh_by_hand(case: Case, world: int) -> DeviceMesh:
    if case.replicate is None:
        return init_device_mesh("cpu", (world,))
    shape = (case.replicate, world // case.replicate)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _shard_ours(model: nn.Module, case: Case, world: int) -> Sequence[Any]:
    plan = shapes.plan(model, case.classes, reshard_after_forward=case.reshard)
    made = shapes.prepare(model, case.classes, **case.config)
    assert list(made) == [unit.module for unit in plan.units]
    return plan.units


def _step_ours(model: nn.Module, tokens: torch.Tensor, case: Case) -> None:
    shapes.accumulate(model, [tokens] * case.microbatches)


def _step_hand(model: nn.Module, tokens: torch.Tensor, case: Case) -> None:
    kept = case.sync == "last" and case.reshard is False
    shapes.accumulate_by_hand(model, [tokens] * case.microbatches, case.sync, kept=kept)


def _shard_composer(model: nn.Module, case: Case, world: int) -> Sequence[Any]:
    units = _units_by_hand(model, case.classes, True)
    shapes.shard_by_composer(model, case.classes, _mesh_by_hand(case, world))
    return units


PEERS = {"ours": _shard_ours, "hand": _shard_hand, "composer": _shard_composer}
STEPS = {"ours": _step_ours, "hand": _step_hand, "composer": _step_hand}


def measure_all(names: Sequence[str], peer: str, backend: str, over: str | None) -> None:
    """Counts several cases in one process group: starting ranks costs more than the steps."""
    for name in names:
        seen, least = _counted(CASES[name], peer)
        if over is not None:
            other, _ = _counted(CASES[name], over)
        if dist.get_rank() > 0:
            continue
        if over is None:
            _report(name, peer, backend, seen, least)
        else:
            _report_over(name, peer, backend, seen, over, other)


def _counted(case: Case, peer: str) -> tuple[Traffic, Traffic]:
    """What one step sends, and the least that it could, in a process group that exists."""
    world = dist.get_world_size()
    if peer == "composer":
        case = replace(case, sync="every")  # it knows no other
    torch.manual_seed(0)
    model = case.build()
    twin = case.build()
    units = PEERS[peer](model, case, world)
    copies = case.replicate or 1
    shard = world // copies // case.tensor
    least = minimum(twin, units, shard, copies, case.microbatches, case.sync, case.tensor)
    tokens = torch.randint(0, 2048, (2, 17), generator=torch.Generator().manual_seed(0))
    if case.tensor > 1:
        whole = peer == "hand" or "chunked_loss" not in case.extra
        add_exchanges(least, twin, 32, shard, case.tensor, whole_logits=whole)
    steps = 3 if case.extra else 2  # prefetching starts in the second
    for _ in range(steps):
        with CountTraffic() as counter:
            STEPS[peer](model, tokens, case)
        model.zero_grad()
    return counter.traffic, least


def _report_over(
    name: str, peer: str, backend: str, seen: Traffic, over: str, other: Traffic
) -> None:
    value = {
        "case": name,
        "peer": peer,
        "over": over,
        "backend": backend,
        "ranks": dist.get_world_size(),
        "wire_ratio": seen.wire / other.wire,
        "reduced_ratio": seen.reduced / other.reduced,
        "wire_bytes": [round(seen.wire), round(other.wire)],
        "reduced_bytes": [seen.reduced, other.reduced],
        "calls": [dict(seen.calls), dict(other.calls)],
    }
    shapes.emit("comm_over", value)


def _report(name: str, peer: str, backend: str, seen: Traffic, least: Traffic) -> None:
    pairs = {
        "wire": (seen.wire, least.wire),
        "gathered": (seen.gathered, least.gathered),
        "reduced": (seen.reduced, least.reduced),
        "averaged": (seen.averaged, least.averaged),
    }
    value = {
        "case": name,
        "peer": peer,
        "backend": backend,
        "ranks": dist.get_world_size(),
        # The worst kind counts: a gather too many must not hide behind a reduction too few. A kind
        # that the theory has none of, as the numbers the ranks agree on, counts in what is sent.
        "ratio": max(actual / best for actual, best in pairs.values() if best),
        **{f"{kind}_bytes": [round(a), round(b)] for kind, (a, b) in pairs.items()},
        "calls": dict(seen.calls),
        "minimum_calls": dict(least.calls),
    }
    shapes.emit("comm", value, GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=["all", *CASES], default="all")
    parser.add_argument("--backend", choices=["fake", "gloo"], default="fake")
    parser.add_argument("--peer", choices=list(PEERS), default="ours")
    parser.add_argument("--over", choices=list(PEERS))
    options = parser.parse_args()
    names = list(CASES) if options.case == "all" else [options.case]
    if options.backend == "fake":
        with shapes.fake_group(8):
            measure_all(names, options.peer, "fake", options.over)
        return
    for ranks in sorted({CASES[name].gloo_ranks for name in names}):
        together = [name for name in names if CASES[name].gloo_ranks == ranks]
        shapes.run_ranks(measure_all, ranks, together, options.peer, "gloo", options.over)


if __name__ == "__main__":
    main()
