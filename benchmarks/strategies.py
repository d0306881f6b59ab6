"""The strategies of FSDP1 as FSDP2 writes them: bytes on the wire, peak and time of a step.

Method: a Llama of four blocks (d=128, vocabulary 1024, fp32, AdamW) trains on two and on four real
gloo ranks of this machine, under each of FSDP1's strategies as `migrate` converts it. A node is two
ranks. The peak is the most that torch's allocator gave out at one moment of the second step; beside
it is what `plan` predicts. The bytes reach the dispatcher in the third. The time is the median of
ten steps on the clock, over that of FULL_SHARD on as many ranks. FSDP1 of torch is measured in the
same way, with Composer's `BACKWARD_POST`.

    PYTHONPATH=. python benchmarks/strategies.py
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import shapes
import torch
import torch.distributed as dist
from comm import CountTraffic
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.config.fsdp1 import FSDP1_STRATEGIES, convert_fsdp1
from composer_fsdp2.step.run import run_of
from tests.support.plan_layouts import MODELS, Layout, most_allocated, predicted

NODE, STEPS, ROWS, TOKENS = 2, 10, 4, 128
Step = Callable[[], None]


class Count(CountTraffic):
    """Counts gathers of FSDP1 on CPUs too, which come as a list of parts."""

    def _count(self, name: str, args: Any, result: Any) -> None:
        if name != "allgather_":
            super()._count(name, args, result)
            return
        for parts in args[0]:
            self.traffic.gather(sum(part.nbytes for part in parts), len(parts))


def settings_of(strategy: str, ranks: int) -> dict[str, Any]:
    """Settings of FSDP2 that `migrate` writes for a strategy."""
    settings = convert_fsdp1(
        {"sharding_strategy": strategy}, world_size=ranks, local_world_size=NODE
    ).settings
    return {key: value for key, value in settings.items() if key != "state_dict_type"}


def _batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 1024, (ROWS, TOKENS), generator=generator)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _fsdp2(strategy: str) -> Step:
    model = MODELS["Llama"]()
    optimizer = _adamw(model)
    prepare_fully_shard(
        model, optimizer, settings_of(strategy, dist.get_world_size()), "fp32", "cpu"
    )
    run, ids = run_of(model), _batch()
    assert run is not None

    def step() -> None:
        optimizer.zero_grad()
        with run.accumulation.batch(), run.accumulation.microbatch(last=True):
            model(ids).backward()
        optimizer.step()

    return step


def _fsdp1(strategy: str) -> Step:
    model: Any = MODELS["Llama"]()
    world = dist.get_world_size()
    per_node = (world // NODE, NODE) if "HYBRID" in strategy else (world,)
    names = ("replicate", "shard")[-len(per_node) :]
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.model.layers[0])}),
        device_mesh=init_device_mesh("cpu", per_node, mesh_dim_names=names),
        device_id=torch.device("cpu"),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        use_orig_params=True,
    )
    optimizer, ids = _adamw(wrapped), _batch()

    def step() -> None:
        optimizer.zero_grad()
        wrapped(ids).backward()
        optimizer.step()

    return step


KINDS: Mapping[str, Callable[[str], Step]] = {"FSDP2": _fsdp2, "FSDP1": _fsdp1}


def measure(expected: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line for each strategy and kind, on rank 0. Collective: yes."""
    warnings.simplefilter("ignore")
    world, full = dist.get_world_size(), 1.0
    for kind, make in KINDS.items():
        for strategy in expected:
            torch.manual_seed(0)
            step, peak = most_allocated(functools.partial(make, strategy))
            with Count() as counter:
                step()
            seconds: list[float] = []
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
            median = statistics.median(seconds)
            full = median if (kind, strategy) == ("FSDP2", "FULL_SHARD") else full
            value: dict[str, Any] = {
                "kind": kind,
                "strategy": strategy,
                "ranks": world,
                "settings": settings_of(strategy, world) if kind == "FSDP2" else {},
                "wire_bytes": int(counter.traffic.wire),
                "sent_bytes": sum(
                    getattr(counter.traffic, name) for name in ("gathered", "reduced", "averaged")
                ),
                "peak_bytes": peak,
                "seconds": median,
                **shapes.spread(seconds),
                "time": median / full,
            }
            if kind == "FSDP2":
                sent, held = expected[strategy]["sent"], expected[strategy]["peak"]
                value |= {"predicted_sent_bytes": sum(sent.values()), "predicted_peak_bytes": held}
                value["ratio"] = held / peak
            if dist.get_rank() == 0:
                shapes.emit("strategies", value)


def main() -> None:
    torch.set_num_threads(1)
    for ranks in (2, 4):
        expected = {
            strategy: predicted(
                Layout(ranks, settings_of(strategy, ranks), build=MODELS["Llama"], length=TOKENS), 0
            )
            for strategy in FSDP1_STRATEGIES
        }
        shapes.run_ranks(measure, ranks, expected)


if __name__ == "__main__":
    main()
