"""What many ranks cost: saving and reading sharded checkpoints, sockets, preparing a model, `plan`.

`python benchmarks/scale.py open read` shows some of it; by default all of it is shown.

Planning a save, from 64 ranks to 2,816, beside torch's planner.

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

Opening a checkpoint. Method: the metadata of a save over some ranks is written as torch writes it,
without the files.

- `rank0_s`: rank 0 reads and checks it;
- `torch_unpickle_s`: pickle reads the same file, as every rank does with torch;
- `sent_mb`: what rank 0 sends to the others, pickled in `rank0_send_s`;
- `rank_s`: another rank makes a checkpoint of that;
- `rank_plan_s`: a rank plans its load with torch's planner and looks up its pieces.

Goal: 8B at 2,816 ranks under 5 s a rank.

Reading it on another number of ranks. Method: the ranges that each rank reads, with what an archive
has beside values, computed by the functions of a load; `read` is the sum over ranks, over the bytes
of the values that they need, and `read_whole_pieces` that of a load of whole pieces. Goal: 1.1.

Preparing a model. Method: this process is one of many ranks of a fake group, models are on meta,
and `prepare_fully_shard` is compared with what a careful user writes, in turns, on `--many`
ranks; CPU seconds, the median of `--pairs`. Layouts:

- `fsdp`: 4 layers of Llama 8B;
- `hsdp`: 8 layers, replicas of 64 ranks;
- `hsdp_tp`: the same, replicas of 8 shards x 8 ranks that divide layers;
- `ep_64`: 12 layers of Qwen3-235B-A22B, whose 128 experts 64 ranks share; needs transformers 4.

Goals: 2 times by hand with `ep_64`, else by hand.

The plan of a run. `composer-fsdp2 plan` runs in a process of its own, Llama 8B on 16,384 GPUs and
Qwen3-235B-A22B on 1,024; goals: 10 and 20 CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import io
import math
import pickle
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plan as plan_command
import shapes
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from composer_fsdp2.checkpoint.contents import read_contents
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.ranges import plan_ranges
from composer_fsdp2.checkpoint.save_plan import ShardSavePlanner
from composer_fsdp2.checkpoint.source import FolderCheckpoint
from composer_fsdp2.step.agreement import neighbours
from tests.support.save_plans import local_plan, rows_of

MODELS = {
    "8b": (32, 4096, 14336, 1024, 128256),
    "70b": (80, 8192, 28672, 1024, 128256),
}
"""layers; widths of the model, of its MLP, and of keys and values; size of the vocabulary"""

FIGURES = ("save", "open", "read", "sockets", "prepare", "plan")
"""what is measured"""

Planner = Callable[[], DefaultSavePlanner]
Prepare = Callable[[nn.Module, int], object]


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


def saving(model: str, all_ranks: list[int], torch_ranks: list[int]) -> None:
    """Measures how a save is planned, by ours on some ranks and by torch's planner on fewer."""
    sizes = sizes_of(model)
    measured = []
    for ranks in sorted(torch_ranks):
        theirs = plan(lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True), sizes, ranks)
        measured.append((ranks, theirs["plan_s"]))
        power = {"exponent": exponent(*measured[-2:])} if measured[1:] else {}
        line = {"model": model, "planner": "torch", "ranks": ranks}
        shapes.emit("save_plan", line | theirs | power)
    power, before = exponent(*measured[-2:]), None
    for ranks in sorted(all_ranks):
        ours = plan(ShardSavePlanner, sizes, ranks)
        known = dict(measured).get(ranks)
        largest, seconds = measured[-1]
        theirs = seconds * (ranks / largest) ** power if known is None else known
        growth = {} if before is None else {"exponent": exponent(before, (ranks, ours["plan_s"]))}
        before = (ranks, ours["plan_s"])
        beside = {
            "torch_plan_s": theirs,
            "torch_extrapolated": known is None,
            "ratio": ours["plan_s"] / theirs,
        }
        line = {"model": model, "planner": "ours", "ranks": ranks}
        shapes.emit("save_plan", line | ours | growth | beside)


# --- Resuming on many ranks. ---

PAIRS = (
    (64, 63),
    (64, 96),
    (64, 512),
    (64, 2816),
    (512, 384),
    (512, 2816),
    (2816, 512),
    (2816, 2048),
)
"""ranks that saved, and ranks that load"""


def saved_metadata(sizes: dict[str, tuple[int, ...]], ranks: int) -> Metadata:
    """Returns the metadata of a save, with a file for each rank."""
    archive = archive_bytes()
    properties = TensorProperties(dtype=torch.float32)
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, Any] = {}
    ends = [0] * ranks
    layouts: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
    for name, size in sizes.items():
        for path in keys_of(name):
            key = ".".join(path)
            paths[key] = path
            if path[-1] == "step":
                entries[key] = TensorStorageMetadata(
                    properties, torch.Size(), [ChunkStorageMetadata(torch.Size(), torch.Size())]
                )
                pieces: list[Any] = [(torch.Size(), 4)]
            else:
                if size not in layouts:
                    shards = [rows_of(size, rank, ranks) for rank in range(ranks)]
                    boxes = [(torch.Size(s.offsets), torch.Size(s.sizes)) for s in shards]
                    layouts[size] = [ChunkStorageMetadata(*box) for box in dict(boxes).items()]
                entries[key] = TensorStorageMetadata(properties, torch.Size(size), layouts[size])
                pieces = [(c.offsets, 4 * math.prod(c.sizes)) for c in layouts[size]]
            for rank, (offsets, values) in enumerate(pieces):
                length = values + archive
                # Each rank sends texts of its own, which are written one by one.
                index = MetadataIndex(f"{key}", offsets)
                storage[index] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], length)
                ends[rank] += length
    return Metadata(entries, paths, storage)


def keys_of(name: str) -> list[tuple[str, ...]]:
    """Returns the paths of a parameter and of AdamW's state of it."""
    state = ("state", "optimizers", "AdamW", "state", name)
    return [("state", "model", name), *((*state, k) for k in ("exp_avg", "exp_avg_sq", "step"))]


def archive_bytes() -> int:
    """Returns what the archive of a piece has beside the values."""
    file = io.BytesIO()
    torch.save(torch.zeros(1024), file)
    return len(file.getvalue()) - 4096


def opening(model: str, ranks: int) -> None:
    """Measures how a checkpoint of some ranks is opened: on rank 0, and on any other one."""
    sizes = sizes_of(model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / METADATA).write_bytes(pickle.dumps(saved_metadata(sizes, ranks)))
        gc.collect()
        begun = time.process_time()
        theirs = pickle.loads((folder / METADATA).read_bytes())
        torch_s, pieces = time.process_time() - begun, len(theirs.storage_data)
        del theirs
        gc.collect()
        begun = time.process_time()
        contents = read_contents(folder)
        rank0_s = time.process_time() - begun
        begun = time.process_time()
        sent = pickle.dumps(contents)
        send_s = time.process_time() - begun
        size_mb = (folder / METADATA).stat().st_size / 1e6
        del contents
        gc.collect()
        begun = time.process_time()
        received = pickle.loads(sent)
        saved = FolderCheckpoint(
            folder, incomplete=True, contents=received, share=(ranks - 1, ranks)
        )
        rank_s = time.process_time() - begun
    begun = time.process_time()
    entries: Any = saved.metadata.state_dict_metadata
    for name, size in sizes.items():
        shard = rows_of(size, ranks // 3, ranks)
        chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
        for path in keys_of(name)[:3]:
            key = ".".join(path)
            for item in create_read_items_for_chunk_list(key, entries[key], [chunk]):
                assert saved.metadata.storage_data[item.storage_index].length > 0
    plan_s = time.process_time() - begun
    line = {"model": model, "ranks": ranks, "pieces": pieces, "metadata_mb": size_mb}
    line |= {"sent_mb": len(sent) / 1e6, "rank0_s": rank0_s, "rank0_send_s": send_s}
    line |= {"rank_s": rank_s, "rank_plan_s": plan_s, "torch_unpickle_s": torch_s}
    shapes.emit("open", line)


def reading(model: str, before: int, after: int) -> None:
    """Computes the bytes that ranks read of a checkpoint, over those that they need."""
    archive, needed, whole, read = archive_bytes(), 0, 0, 0
    for size, count in Counter(sizes_of(model).values()).items():
        step = rows_of(size, 0, before).sizes[0]
        row = 4 * math.prod(size[1:])
        for rank in range(after):
            shard = rows_of(size, rank, after)
            start, end = shard.offsets[0], shard.offsets[0] + shard.sizes[0]
            for first in range(start // step * step, end, step):
                rows = min(step, size[0] - first)
                begin, stop = max(start - first, 0), min(end - first, rows)
                stored = rows * row + archive
                spans = plan_ranges((rows, *size[1:]), 4, [lambda t: t[begin:stop]], stored)  # noqa: B023
                needed += 3 * count * (stop - begin) * row
                whole += 3 * count * stored
                part = stored if spans is None else archive + sum(b - a for a, b in spans)
                read += 3 * count * part
    line = {"model": model, "ranks_before": before, "ranks": after, "read": read / needed}
    shapes.emit("read", line | {"read_whole_pieces": whole / needed, "gb": read / 1e9})


def sockets(ranks: int) -> None:
    """Computes the sockets of a rank: gloo connects each rank of a group with each other.

    Channels are those of agreements, of the order check, and of a save beside training.
    """
    channels = ("agreements", "order_check", "async_save")
    line = {"ranks": ranks, **dict.fromkeys(channels, neighbours(ranks))}
    shapes.emit("sockets", line | {"one_group_of_all": ranks - 1})


# --- Preparing ---


def llama(layers: int) -> nn.Module:
    """Returns a model with the widths of Llama 8B, on meta."""
    with torch.device("meta"):
        return shapes.LlamaLike(layers, 4096, 128256, 14336, 32)


def mixture(layers: int) -> nn.Module:
    """Returns a model with the widths of Qwen3-235B-A22B and its 128 experts a layer, on meta."""
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def _by_hand(model: nn.Module, ranks: int, replicas: int) -> None:
    names = ("replicate", "shard")[replicas == 1 :]
    sizes = (replicas, ranks // replicas)[replicas == 1 :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    shapes.shard_by_hand(model, ("Block",), mesh)


def _experts_by_hand(model: Any, ranks: int, degree: int) -> None:
    """Keeps the experts of rank 0, and shards them over the ranks with the same ones."""
    mesh = init_device_mesh("cpu", (ranks,))
    experts_mesh = init_device_mesh("cpu", (ranks // degree, degree), mesh_dim_names=("s", "e"))
    for layer in model.model.layers:
        layer.mlp.experts = nn.Sequential(*layer.mlp.experts[: 128 // degree])
        fully_shard(layer.mlp.experts, mesh=experts_mesh["s"])
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


_BLOCK, _LAYER = ("Block",), ("Qwen3MoeDecoderLayer",)
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Prepare, Prepare, int]] = {
    "fsdp": (
        lambda: llama(4),
        lambda model, ranks: shapes.prepare(model, _BLOCK),
        lambda model, ranks: _by_hand(model, ranks, 1),
        8,
    ),
    "hsdp": (
        lambda: llama(8),
        lambda model, ranks: shapes.prepare(
            model, _BLOCK, data_parallel_replicate_degree=ranks // 64
        ),
        lambda model, ranks: _by_hand(model, ranks, ranks // 64),
        64,
    ),
    "hsdp_tp": (
        lambda: llama(8),
        lambda model, ranks: shapes.prepare(
            model,
            _BLOCK,
            data_parallel_replicate_degree=ranks // 64,
            tensor_parallel=shapes.tensor_setting(8),
        ),
        lambda model, ranks: shapes.divide_by_hand(model, 8, ranks // 64),
        128,
    ),
    "ep_64": (
        lambda: mixture(12),
        lambda model, ranks: shapes.prepare(model, _LAYER, expert_parallel=64),
        lambda model, ranks: _experts_by_hand(model, ranks, 64),
        64,
    ),
}
"""makes a model; prepares it, by this package and by hand; the least number of ranks"""


def preparing(layout: str, all_ranks: list[int], pairs: int) -> None:
    """Shows what one of many ranks pays to prepare a layout, ours and by hand."""
    make, ours, hand, least = LAYOUTS[layout]

    def seconds(prepare: Prepare, ranks: int) -> float:
        model = make()
        return shapes.cpu_seconds(lambda: prepare(model, ranks))

    before = None
    for ranks in sorted(ranks for ranks in all_ranks if ranks >= least):
        with shapes.fake_group(ranks):
            if before is None:  # imports and first calls are of no side
                seconds(ours, ranks), seconds(hand, ranks)
            value = shapes.paired_ratio(
                lambda ranks=ranks: seconds(ours, ranks),
                lambda ranks=ranks: seconds(hand, ranks),
                pairs,
            )
        now = ranks, value["ours_seconds"]
        growth = {} if before is None else {"exponent": exponent(before, now)}
        before = now
        shapes.emit("prepare", {"layout": layout, "ranks": ranks, **value, **growth})


def main() -> None:
    """A line for each number of ranks and planner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(FIGURES)}; all by default")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2816])
    parser.add_argument("--torch-ranks", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--many", type=int, nargs="+", default=[8, 64, 512, 2816, 16384])
    parser.add_argument("--pairs", type=int, default=3, help="of preparing, ours and by hand")
    args = parser.parse_args()
    if len({*args.torch_ranks}) < 2:
        parser.error("--torch-ranks: write two numbers or more, from which torch's is extrapolated")
    figures = args.figures or FIGURES
    for ranks in sorted({*args.ranks, 2819, 16384}) if "sockets" in figures else ():
        sockets(ranks)
    for model in args.models:
        for ranks in sorted(args.ranks) if "open" in figures else ():
            opening(model, ranks)
        for before, after in PAIRS if "read" in figures else ():
            reading(model, before, after)
    for layout in args.layouts if "prepare" in figures else ():
        preparing(layout, args.many, args.pairs)
    if "plan" in figures:
        plan_command.seconds(plan_command.MANY_RANKS)
    for model in args.models if "save" in figures else ():
        saving(model, args.ranks, args.torch_ranks)


if __name__ == "__main__":
    main()
