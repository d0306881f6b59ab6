"""Memory and time of reading a Hugging Face folder, against what Composer does.

Method: two gloo ranks of this machine, one thread each, in fresh processes for every measurement.
Memory is the highest anonymous resident memory (`RssAnon`, sampled every millisecond) above what
the process held with everything imported and nothing loaded: pages of mapped files, which the
system takes back when it needs them, are not in it. Time is wall time from building the model to
its last shard, on the slower rank, the file cache warm; the CPU time of both ranks together, a
millisecond sampler included, is reported too, because wall time on a busy machine says little. Both
sides run in turn, the order swapped every time. That they end with the same weights is checked by
their sums.

Figure: a Llama-like folder of `--gigabytes` in several files, bf16 as on the hub (or `--dtype
float32`), read into fp32 shards; peak over the bytes of the rank's shards, goal <= 1.1 on every
rank; time over that of Composer's mixed initialisation (`from_pretrained` on rank 0, meta on the
other, then Composer's `parallelize_composer_model`), goal <= 0.5.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import resident
import shapes
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from composer.models import HuggingFaceModel

RANKS = 2


# --- pretrained ---


def write_folder(folder: Path, width: int, layers: int, dtype: str) -> None:
    """Random weights; a layer of width 1,536 has 28 million."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16000 if width > 64 else 64,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="500MB")


def _wrapped(model: Any) -> HuggingFaceModel:
    from composer.models import HuggingFaceModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model.fsdp_wrap_fn = lambda module: isinstance(module, LlamaDecoderLayer)
    return HuggingFaceModel(model)


def _on_meta(folder: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)


def _from_pretrained(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)


def _ours(folder: str) -> HuggingFaceModel:
    from composer_fsdp2 import prepare_fully_shard

    model = _wrapped(_on_meta(folder))
    prepare_fully_shard(model, None, {"pretrained_weights": folder}, "fp32")
    return model


def _composer(folder: str) -> HuggingFaceModel:
    from composer.core import Precision
    from composer.distributed.prepare_distributed import parallelize_composer_model
    from composer.utils.parallelism import FSDP2Config

    model = _wrapped((_from_pretrained if dist.get_rank() == 0 else _on_meta)(folder))
    parallelize_composer_model(model, None, FSDP2Config(), Precision.FP32)
    return model


PRETRAINED: dict[str, Callable[[str], HuggingFaceModel]] = {"ours": _ours, "composer": _composer}


def _load(side: str, folder: str, out: str) -> None:
    """On one rank: imports, loads, and writes down what it took."""
    import transformers.models.llama.modeling_llama

    import composer_fsdp2.prepare.model  # noqa: F401

    transformers.utils.logging.disable_progress_bar()
    PRETRAINED[side](f"{folder}/tiny")  # first-call set-up belongs to no side
    gc.collect()
    dist.barrier()
    with resident.Peak.watched() as peak:
        start, busy = time.perf_counter(), time.process_time()
        model = PRETRAINED[side](f"{folder}/large")
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - busy
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak.above,
        "shard_bytes": sum(shard.numel() * shard.element_size() for shard in shards),
        "sum": sum(shard.double().sum().item() for shard in shards),
    }
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


def _measure(side: str, folder: str) -> list[dict[str, float]]:
    """What every rank wrote down."""
    with tempfile.TemporaryDirectory() as out:
        shapes.run_ranks(_load, RANKS, side, folder, out)
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(RANKS)]


def pretrained(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        layer_bytes = 28.3e6 * getattr(torch, options.dtype).itemsize
        layers = max(1, round((options.gigabytes * 1e9 / layer_bytes) - 1.7))  # less the embeddings
        write_folder(Path(folder, "tiny"), 24, 1, options.dtype)
        write_folder(Path(folder, "large"), 1536, layers, options.dtype)
        _measure("ours", folder)  # the first one pays for reading from disk
        runs: dict[str, list[list[dict[str, float]]]] = {"ours": [], "composer": []}
        for index in range(options.pairs):
            for side in sorted(runs, reverse=index % 2 == 0):
                runs[side].append(_measure(side, folder))
    sums = [[rank["sum"] for rank in run] for side in runs.values() for run in side]
    assert all(found == sums[0] for found in sums), sums
    _emit_pretrained(runs, {"dtype": options.dtype, "pairs": options.pairs})


def _emit_pretrained(
    runs: dict[str, list[list[dict[str, float]]]], settings: dict[str, Any]
) -> None:
    def over_shard(side: str) -> list[float]:
        """The highest of all runs, by rank."""
        ranks = zip(*runs[side], strict=True)
        return [round(max(r["peak_bytes"] / r["shard_bytes"] for r in rank), 3) for rank in ranks]

    cpu = {
        side: statistics.median(sum(r["cpu_seconds"] for r in run) for run in found)
        for side, found in runs.items()
    }
    slower = {side: [max(r["seconds"] for r in run) for run in runs[side]] for side in runs}
    ratios = [a / b for a, b in zip(slower["ours"], slower["composer"], strict=True)]
    facts = {"ranks": RANKS, **settings, "shard_bytes": runs["ours"][0][0]["shard_bytes"]}
    memory = {
        "peak_over_shard": max(over_shard("ours")),
        "ours_by_rank": over_shard("ours"),
        "composer_by_rank": over_shard("composer"),
    }
    shapes.emit("checkpoint.pretrained.memory", {**facts, **memory}, 1.1)
    seconds = {
        "ratio": statistics.median(ratios),
        **shapes.spread(ratios),
        "ours_seconds": statistics.median(slower["ours"]),
        "composer_seconds": statistics.median(slower["composer"]),
        "cpu_ratio": cpu["ours"] / cpu["composer"],
    }
    shapes.emit("checkpoint.pretrained.time", {**facts, **seconds}, 0.5)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", help="where the temporary folder is made")
    options = parser.parse_args(arguments)
    pretrained(options)


if __name__ == "__main__":
    main()
