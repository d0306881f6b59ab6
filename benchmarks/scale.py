"""What rank 0 pays to plan a sharded save, from 64 ranks to 2,816, beside torch's planner.

Method: every rank of a run is simulated in one process: a state dict of the weights of a
Llama-like model and the moments and steps of AdamW, each tensor cut into rows as FSDP2 cuts it.
A rank makes its local plan, which is pickled and read again, as a gather does; rank 0 plans for all
of them, and its answer goes back in the same way. Seconds are CPU seconds of one process:

- `local_s`: a rank makes its plan, the median of 3 ranks. Its shards are no DTensors, whose offsets
  torch computes, in the same way for both planners;
- `gather_s` and `gather_mb`: rank 0 reads the plans of all ranks, and their bytes;
- `global_s`: rank 0 plans for all of them;
- `finish_s`: a rank finishes its plan, the same 3 ranks;
- `plan_s`: the sum of the four, the planning of a save. No save leaves anything to the next one,
  so every save costs that.

torch's planner runs at `--torch-ranks` alone; its `plan_s` at the other numbers is extrapolated by
the exponent between the two largest of them, and the line says so. `exponent` is that of `plan_s`
between the number of ranks of the line before and of this line.

Goals: 8B at 2,816 ranks under 10 s, and under 2 s after the first save; 70B under 60 and 10 s.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import shapes
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from composer_fsdp2.checkpoint.save_plan import ShardSavePlanner
from tests.support.save_plans import local_plan, rows_of

MODELS = {
    "8b": (32, 4096, 14336, 1024, 128256),
    "70b": (80, 8192, 28672, 1024, 128256),
}
"""layers; widths of the model, of its MLP, and of keys and values; size of the vocabulary"""

Planner = Callable[[], DefaultSavePlanner]


def sizes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the FQN and the shape of every parameter."""
    layers, width, hidden, keys, vocabulary = MODELS[model]
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (hidden, width),
        "mlp.up_proj.weight": (hidden, width),
        "mlp.down_proj.weight": (width, hidden),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for number in range(layers):
        sizes |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    return sizes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def state_dict_of(sizes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> dict[str, Any]:
    """Returns what one rank saves."""
    shards = {name: rows_of(size, rank, ranks) for name, size in sizes.items()}
    step = torch.tensor(1.0)
    moments = {
        name: {"step": step, "exp_avg": shard, "exp_avg_sq": shard}
        for name, shard in shards.items()
    }
    return {"state": {"model": shards, "optimizers": {"AdamW": {"state": moments}}}}


def plan(planner: Planner, sizes: dict[str, tuple[int, ...]], ranks: int) -> dict[str, float]:
    """Plans a save; returns seconds and megabytes."""
    local, messages, kept = [], [], []
    gc.collect()
    gc.freeze()
    for rank in range(ranks):
        state_dict = state_dict_of(sizes, rank, ranks)
        begun, own = time.process_time(), planner()
        made = local_plan(own, state_dict, rank)
        taken = time.process_time() - begun
        messages.append(pickle.dumps(made))
        if rank in (0, ranks // 2, ranks - 1):
            local.append(taken)
            kept.append((rank, own))
    megabytes = sum(map(len, messages)) / 1e6
    begun = time.process_time()
    plans = [pickle.loads(message) for message in messages]
    gathered = time.process_time() - begun
    begun = time.process_time()
    answers, _ = kept[0][1].create_global_plan(plans)
    planned = time.process_time() - begun
    finish = []
    for rank, own in kept:
        answer = pickle.loads(pickle.dumps(answers[rank]))
        begun = time.process_time()
        own.finish_plan(answer)
        finish.append(time.process_time() - begun)
    figures = {
        "local_s": statistics.median(local),
        "gather_s": gathered,
        "global_s": planned,
        "finish_s": statistics.median(finish),
    }
    return {"gather_mb": megabytes, **figures, "plan_s": sum(figures.values())}


def exponent(before: tuple[int, float], now: tuple[int, float]) -> float:
    """Returns the power of the number of ranks that the seconds grow by."""
    return math.log(now[1] / before[1]) / math.log(now[0] / before[0])


def main() -> None:
    """A line for each number of ranks and planner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2816])
    parser.add_argument("--torch-ranks", type=int, nargs="+", default=[32, 64, 128])
    args = parser.parse_args()
    for model in args.models:
        sizes = sizes_of(model)
        measured = []
        for ranks in sorted(args.torch_ranks):
            theirs = plan(lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True), sizes, ranks)
            measured.append((ranks, theirs["plan_s"]))
            power = {"exponent": exponent(*measured[-2:])} if measured[1:] else {}
            line = {"model": model, "planner": "torch", "ranks": ranks}
            shapes.emit("save_plan", line | theirs | power)
        power, before = exponent(*measured[-2:]), None
        for ranks in sorted(args.ranks):
            ours = plan(ShardSavePlanner, sizes, ranks)
            known = dict(measured).get(ranks)
            largest, seconds = measured[-1]
            theirs = seconds * (ranks / largest) ** power if known is None else known
            growth = (
                {} if before is None else {"exponent": exponent(before, (ranks, ours["plan_s"]))}
            )
            before = (ranks, ours["plan_s"])
            beside = {
                "torch_plan_s": theirs,
                "torch_extrapolated": known is None,
                "ratio": ours["plan_s"] / theirs,
            }
            line = {"model": model, "planner": "ours", "ranks": ranks}
            shapes.emit("save_plan", line | ours | growth | beside)


if __name__ == "__main__":
    main()
