"""A step that `composer-fsdp2 plan` predicts on fake tensors, against the same step on real ranks.

Method: every layout of `tests/support/plan_layouts.py` is predicted for the first and the last rank
in one process, then prepared and stepped on real gloo ranks of this machine, which count their
collectives and storages.

A line for each layout: bytes of every kind of collective on every axis, their number, bytes of
parameters, gradients and optimizer state, and FLOPs have to be equal (`differences` is empty);
`peak_ratio` is predicted over counted. Goal: no differences, 1 +- 0.10.

    PYTHONPATH=. python benchmarks/plan.py --layout HSDP --layout "FSDP on 8"

`--peak` is the memory alone, of a Llama in a few settings: the predicted peak over that of torch's
allocator in a step on as many ranks as there are GPUs. Without a GPU the model is small, on one
rank, and the allocator is that of the CPU. Goal: 1 +- 0.10.

    PYTHONPATH=. python benchmarks/plan.py --peak

`--seconds` runs the command itself on models of published shapes, whose `config.json` it writes to
folders: seconds on the clock and of the processor, and the most memory of the process. A line
`imports` has what importing LLM Foundry takes alone. Goals: 20 seconds, 2 GB. Files are compiled to
bytes by a first run, which is not shown.

    PYTHONPATH=. python benchmarks/plan.py --seconds
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shapes
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from composer_fsdp2.foundry.model_configs import CONFIGS
from tests.support.plan_layouts import (
    LAYOUTS,
    HuggingFace,
    Layout,
    allocated,
    allocated_on_gpu,
    counted,
    predicted,
)

GOAL = 0.10
SECONDS_GOALS = {"seconds": 20, "peak_gb": 2}
LLAMA, QWEN = "yamls/pretrain/llama-3.1-8b.yaml", "yamls/{}/qwen3-30b-a3b.yaml"
QWEN_235B = {
    **CONFIGS["Qwen/Qwen3-30B-A3B"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
SECONDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama 8B": (LLAMA, CONFIGS["meta-llama/Llama-3.1-8B"], 8),
    "Llama 70B": (LLAMA, CONFIGS["meta-llama/Llama-3.3-70B-Instruct"], 64),
    "Qwen3-235B-A22B": (QWEN.format("pretrain"), QWEN_235B, 512),
    "Qwen3-235B-A22B, ep 8": (QWEN.format("experts"), QWEN_235B, 512),
}
"""a run, the shape of its model, and ranks"""
MANY_RANKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama 8B": (LLAMA, CONFIGS["meta-llama/Llama-3.1-8B"], 16384),
    "Qwen3-235B-A22B": (QWEN.format("pretrain"), QWEN_235B, 1024),
}
"""for `scale.py`"""
PEAKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "recomputed": {"config": {"activation_checkpointing": True}},
    "bf16": {"precision": "amp_bf16"},
    "bf16, recomputed": {
        "config": {"activation_checkpointing": True},
        "precision": "amp_bf16",
    },
}


def measure(names: list[str], expected: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Steps several layouts in one process group, and prints their lines on the last rank."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    for name in names:
        found = counted(LAYOUTS[name], rank)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        if rank == 0:
            _report(name, everyone, expected[name])


def _report(name: str, found: list[dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    differences = [
        f"rank {rank}, {kind}: {of_rank[kind]} predicted, {found[rank][kind]} counted"
        for rank, of_rank in expected.items()
        for kind in ("held", "sent", "calls", "flops")
        if of_rank[kind] != found[rank][kind]
    ]
    ratios = [of_rank["peak"] / found[rank]["peak"] for rank, of_rank in expected.items()]
    value = {
        "layout": name,
        "ranks": len(found),
        "sent_bytes": expected[0]["sent"],
        **{f"{kind}_bytes": size for kind, size in expected[0]["held"].items()},
        "peak_bytes": expected[0]["peak"],
        "peak_ratio": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "differences": differences,
    }
    shapes.emit("plan", value, GOAL)


def _llama(width: int, layers: int) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=16 * width,
        tie_word_embeddings=False,
    )
    return HuggingFace(LlamaForCausalLM(config))


def _peak_layouts(on_gpu: bool) -> dict[str, Layout]:
    """The same on every rank."""
    width, length = (1024, 512) if on_gpu else (128, 128)
    ranks = shapes.ranks_on("cuda" if on_gpu else "cpu", 1)

    def build() -> torch.nn.Module:
        return _llama(width, 8 if on_gpu else 2)

    return {name: Layout(ranks, build=build, length=length, **how) for name, how in PEAKS.items()}


def measure_peaks(on_gpu: bool, expected: dict[str, int]) -> None:
    """Steps each layout, and prints its line on the first rank."""
    warnings.simplefilter("ignore")
    if on_gpu:
        shapes.warm_up()
    for name, layout in _peak_layouts(on_gpu).items():
        found = allocated_on_gpu(layout) if on_gpu else allocated(layout, dist.get_rank())
        value = {"layout": name, "device": "cuda" if on_gpu else "cpu", "ranks": layout.ranks}
        value |= {"predicted_bytes": expected[name], "peak_bytes": found}
        if dist.get_rank() == 0:
            shapes.emit("plan_peak", {**value, "ratio": expected[name] / found}, GOAL)
        gc.collect()


def peaks() -> None:
    """Predicts each layout in this process, and takes a step of it on ranks."""
    on_gpu = torch.cuda.is_available()
    layouts = _peak_layouts(on_gpu)
    expected = {
        name: predicted(layout, 0, on_gpus=on_gpu)["peak"] for name, layout in layouts.items()
    }
    ranks = next(iter(layouts.values())).ranks
    shapes.run_ranks(measure_peaks, ranks, on_gpu, expected, device="cuda" if on_gpu else "cpu")


def seconds(runs: Mapping[str, tuple[str, dict[str, Any], int]] = SECONDS) -> None:
    """Runs `composer-fsdp2 plan` in a process of its own for each model."""
    imports = ["-W", "ignore", "-c", "import llmfoundry"]
    _timed(imports)  # compiles files to bytes
    shapes.emit("plan_seconds", {"model": "imports", **_timed(imports)[0]})
    for name, (run, shape, ranks) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            words = ["plan", run, f"variables.model={folder}", f"--gpus={ranks}", "--gpu=H100"]
            words.append(f"global_train_batch_size={max(ranks, 512)}")
            took, shown = _timed(["-m", "composer_fsdp2.cli.main", *words])
        predicted = next((x for x in shown.splitlines() if x.startswith("  peak")), None)
        value = {"model": name, "ranks": ranks, **took, "predicted": predicted}
        shapes.emit("plan_seconds", {**value, "goal": SECONDS_GOALS})


def _timed(words: list[str]) -> tuple[dict[str, float], str]:
    """Returns what a process of Python takes, and its output."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = process.stdout.read()
    _, _, used = os.wait4(process.pid, 0)
    took = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_gb": used.ru_maxrss * 1024 / 1e9,
    }
    return took, shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append")
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--seconds", action="store_true")
    given = parser.parse_args()
    if given.seconds:
        seconds()
        return
    warnings.simplefilter("ignore")
    if given.peak:
        peaks()
        return
    names = given.layout or list(LAYOUTS)
    torch.set_num_threads(1)
    expected = {
        name: {rank: predicted(LAYOUTS[name], rank) for rank in {0, LAYOUTS[name].ranks - 1}}
        for name in names
    }
    for ranks in sorted({LAYOUTS[name].ranks for name in names}):
        together = [name for name in names if LAYOUTS[name].ranks == ranks]
        shapes.run_ranks(measure, ranks, together, {name: expected[name] for name in together})


if __name__ == "__main__":
    main()
