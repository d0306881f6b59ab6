"""Runs of LLM Foundry with one mistake each, at which they stop before the first batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.foundry import FSDP2, merged, run_of

GONE = object()
"""in place of a value: the key is taken out"""
FSDP2_KEY = "parallelism_config.fsdp2"
WITH_FSDP1 = {"parallelism_config": GONE, "fsdp_config": {"sharding_strategy": "FULL_SHARD"}}

# What is wrong -> (changes of a good run, words of the message).
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "top-level key": ({"max_durations": "1ep"}, ("max_durations", "'max_duration'")),
    "top-level fsdp2": ({"fsdp2": {}}, ("'fsdp2'", "parallelism_config: {fsdp2")),
    "missing key": ({"max_duration": GONE}, ("max_duration",)),
    "missing batch size": ({"global_train_batch_size": GONE}, ("global_train_batch_size",)),
    "missing microbatch": ({"device_train_microbatch_size": GONE}, ("device_train_microbatch",)),
    "missing block": ({"scheduler": GONE}, ("scheduler",)),
    "block that is a word": ({"optimizer": "adam"}, ("ValidationError", "optimizer")),
    "optimizer": ({"optimizer.name": "decoupled_adamv"}, ("optimizer.name", "decoupled_adamw")),
    "optimizer's key": (
        {"optimizer.lrr": 1e-3},
        ("optimizer: DecoupledAdamW has no argument 'lrr'", "'lr'"),
    ),
    "optimizer's value": ({"optimizer.lr": -1.0}, ("optimizer: ValueError", "-1.0")),
    "optimizer without name": ({"optimizer.name": GONE}, ("optimizer.name: null",)),
    "scheduler": ({"scheduler.name": "constant"}, ("scheduler.name", "constant_with_warmup")),
    "scheduler's key": (
        {"scheduler.warmup": "1ba"},
        ("scheduler: ", "no argument 'warmup'", "'t_warmup'"),
    ),
    "scheduler's time": ({"scheduler.t_warmup": "10xx"}, ("scheduler", "10xx")),
    "callback": ({"callbacks": {"speed_monitr": {}}}, ("callbacks", "'speed_monitor'")),
    "callback's key": (
        {"callbacks": {"speed_monitor": {"window": 3}}},
        ("callbacks.speed_monitor", "window"),
    ),
    "callback's interval": (
        {"callbacks": {"hf_checkpointer": {"save_folder": "x", "save_interval": "1xx"}}},
        ("callbacks.hf_checkpointer", "1xx"),
    ),
    "callback's key that it deletes": (
        {"callbacks": {"nan_monitor": {"every": 3}}},
        ("callbacks.nan_monitor: NaNMonitor has no argument 'every'", "Take it out"),
    ),
    "callback's key that its base deletes": (
        {"callbacks": {"eval_output_logging": {"log_token": True}}},
        ("callbacks.eval_output_logging", "Did you mean 'log_tokens'?"),
    ),
    "algorithm": ({"algorithms": {"gradient_cliping": {}}}, ("'gradient_clipping'",)),
    "algorithm's key": (
        {"algorithms": {"gradient_clipping": {"kind": "norm"}}},
        ("algorithms.gradient_clipping", "kind"),
    ),
    "compiled twice": (
        {f"{FSDP2_KEY}.compile": True, "compile_config": {}},
        ("fsdp2.compile is set, and compile_config is set",),
    ),
    "autoresume without a folder": ({"autoresume": True}, ("autoresume needs a save_folder",)),
    "logger": ({"loggers": {"wandbb": {}}}, ("loggers", "'wandb'")),
    "logger's key": (
        {"loggers": {"mlflow": {"experiment": "x"}}},
        ("loggers.mlflow", "experiment"),
    ),
    "loader": ({"train_loader.name": "texts"}, ("train_loader.name", "'text'")),
    "loader's key": ({"train_loader.workers": 1}, ("train_loader", "workers")),
    "no data": (
        {"train_loader.dataset.local": "no/where"},
        ("train_loader", "no/where/train"),
    ),
    "no split": ({"train_loader.dataset.split": "trein"}, ("train_loader", "/trein")),
    "no streams": (
        {
            "train_loader.dataset.local": GONE,
            "train_loader.dataset.streams": {"a": {"local": "no/where"}},
        },
        ("train_loader", "no/where"),
    ),
    "dataset's key": (
        {"train_loader.dataset.shufle": True},
        ("train_loader.dataset: text has no argument 'shufle'", "Did you mean 'shuffle'?"),
    ),
    "evaluation dataset's key": (
        {"eval_loader": [{"name": "text", "label": "a", "dataset": {"splitt": "val"}}]},
        ("eval_loader[0].dataset", "Did you mean 'split'?"),
    ),
    "value of a dataset": (
        {"train_loader.dataset.batching_method": "rnd"},
        ("train_loader", "rnd"),
    ),
    "evaluation data": (
        {
            "eval_loader": {
                "name": "text",
                "dataset": {"local": "no/eval", "split": "val", "max_seq_len": 24},
                "drop_last": False,
                "num_workers": 0,
            }
        },
        ("eval_loader", "no/eval/val"),
    ),
    "several evaluation data": (
        {"eval_loader": [{"name": "tekst", "label": "a", "dataset": {}}]},
        ("eval_loader[0].name", "'text'"),
    ),
    "workers of a loader": ({"train_loader.num_workers": -1}, ("train_loader", "num_workers")),
    "model": ({"model.name": "mpt_causal_lmm"}, ("model.name", "'mpt_causal_lm'")),
    "model's key": (
        {"model.n_layer": 1},
        ("has no argument 'n_layer'", "as if it were not there", "Did you mean 'n_layers'?"),
    ),
    "key of a model's block": (
        {"model.init_config": {"emb_init_stdd": 0.02}},
        ("model.init_config", "Did you mean 'emb_init_std'?"),
    ),
    "key of a model's attention": (
        {"model.attn_config": {"attn_impl": "torch", "kv_heads": 2}},
        ("model.attn_config", "no argument 'kv_heads'"),
    ),
    "tokenizer's key": (
        {"tokenizer.kwargs.padding_sied": "left"},
        ("tokenizer.kwargs: ", "Did you mean 'padding_side'?"),
    ),
    "model's value": ({"model.n_heads": 3}, ("model", "divisible")),
    "loss that is not installed": (
        {"model.loss_fn": "fused_crossentropy"},
        ("model", "Fused Cross Entropy is not installed"),
    ),
    "chunked_loss with such a loss": (
        {"model.loss_fn": "fused_crossentropy", f"{FSDP2_KEY}.chunked_loss": {"chunks": 2}},
        ("model", "Fused Cross Entropy is not installed"),
    ),
    "init_device": (
        {"model.init_device": "cuda"},
        ("model.init_device", "Write cpu, mixed or meta"),
    ),
    "a folder for a model": (
        {"model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "./no/model"}},
        ("pretrained_model_name_or_path", "./no/model"),
    ),
    "tokenizer's folder": (
        {"tokenizer.name": "no/such/folder"},
        ("tokenizer.name", "no such folder"),
    ),
    "duration": ({"max_duration": "10xx"}, ("max_duration", "10xx")),
    "interval of evaluation": ({"eval_interval": "1xx"}, ("eval_interval", "1xx")),
    "interval of saving": (
        {"save_folder": "runs", "save_interval": "1xx"},
        ("save_interval", "1xx"),
    ),
    "load_path": ({"load_path": "no/checkpoint"}, ("load_path", "no/checkpoint")),
    "save_folder": ({"save_folder": "README.md/x"}, ("save_folder", "README.md' cannot be")),
    "microbatch in words": ({"device_train_microbatch_size": "many"}, ("many",)),
    "type of a key": ({"seed": "seven"}, ("seven", "seed")),
    "code": ({"code_paths": ["no/code.py"]}, ("code_paths", "no/code.py")),
    "interpolation": ({"seed": "${nowhere}"}, ("InterpolationKeyError", "nowhere")),
    "compile_config": ({"compile_config": {"bakend": "x"}}, ("compile_config", "bakend")),
    "compile_config's mode": ({"compile_config": {"mode": "fast"}}, ("compile_config", "fast")),
    "compile_config's backend": ({"compile_config": {"backend": "x"}}, ("compile_config", "'x'")),
    "version of the block": ({f"{FSDP2_KEY}.version": 1}, ("fsdp2.version", "is 1")),
    "precision": ({"precision": "bf16"}, ("precision", "bf16")),
    "batch size": ({"global_train_batch_size": 7}, ("7 is not divisible",)),
    "classes": ({f"{FSDP2_KEY}.wrap_policy": {"classes": ["Blok"]}}, ("Blok",)),
    "names": ({f"{FSDP2_KEY}.wrap_policy": {"names": ["a.*"]}}, ("a.*",)),
    "ignored_params": ({f"{FSDP2_KEY}.ignored_params": ["no.*"]}, ("no.*",)),
    "forward_methods": ({f"{FSDP2_KEY}.forward_methods": ["model.nothing"]}, ("nothing",)),
    "keep_fp32": ({f"{FSDP2_KEY}.keep_fp32": ["no.*"]}, ("no.*",)),
    "cpu_offload": ({f"{FSDP2_KEY}.cpu_offload": True}, ("cpu_offload", "on the CPU")),
    "degrees": ({f"{FSDP2_KEY}.data_parallel_shard_degree": 3}, ("data_parallel_shard_degree 3",)),
    "weights": ({f"{FSDP2_KEY}.pretrained_weights": "no/where"}, ("no/where",)),
    "tensor parallelism": (
        {"tp_config": {"strategy": "ffn", "tensor_parallel_degree": 2}},
        ("Tensor parallelism",),
    ),
    "kind of clipping": (
        {"algorithms": {"gradient_clipping": {"clipping_type": "nrm", "clipping_threshold": 1}}},
        ("algorithms.gradient_clipping", "nrm"),
    ),
    "threshold of clipping": (
        {"algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": "x"}}},
        ("algorithms.gradient_clipping", "'x'"),
    ),
    "threshold below 0": (
        {"algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": -1}}},
        ("algorithms.gradient_clipping", "clipping_threshold of -1"),
    ),
    "vocabulary on meta": (
        {"model.vocab_size": 100, "model.init_device": "meta"},
        ("model: RuntimeError", "meta tensors", "init_device: cpu"),
    ),
    "save_folder on what is read only": ({"save_folder": "/proc/runs"}, ("'/proc' cannot be",)),
    "length of a dataset": (
        {"train_loader.dataset.max_seq_len": "long"},
        ("train_loader", "'long'"),
    ),
    "drop_last": ({"train_loader.drop_last": "no"}, ("train_loader", "drop_last")),
    "prefetch_factor": ({"train_loader.prefetch_factor": 4}, ("train_loader", "prefetch_factor")),
    "flash attention that is not installed": (
        {"model.attn_config.attn_impl": "flash"},
        ("attn_impl is flash", "not installed"),
    ),
    "without FSDP2: a name": ({**WITH_FSDP1, "optimizer.name": "sdg"}, ("optimizer.name",)),
    "without FSDP: a key": ({"parallelism_config": GONE, "optimizer.lrr": 1}, ("lrr",)),
}

TRIED = {
    "top-level key": "max_durations",
    "optimizer": "decoupled_adamv",
    "scheduler's time": "10xx",
    "callback's key": "'window'",
    "loader": "texts",
    "no data": "no/where/train",
    "model's value": "divisible",
    "tokenizer's folder": "no/such/folder",
    "save_folder": "README.md",
    "load_path": "no/checkpoint",
    "workers of a loader": "num_workers",
    "compile_config's mode": "fast",
    "version of the block": "fsdp2.version",
    "code": "no/code.py",
    "interpolation": "nowhere",
    "precision": "bf16",
    "forward_methods": "model.nothing",
    "degrees": "data_parallel_shard_degree 3",
    "weights": "no/where",
    "kind of clipping": "nrm",
    "flash attention that is not installed": "bert_padding",
}
"""of which it is shown that the run stops, with a word of what it says then"""


def changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings with the changes in them, and without what is `GONE`."""
    given = merged(settings, {k: v for k, v in changes.items() if v is not GONE})
    for key in (key for key, value in changes.items() if value is GONE):
        *path, last = key.split(".")
        block = given
        for part in path:
            block = block[part]
        del block[last]
    return given


def good(assets: Path, loader: str = "finetuning") -> dict[str, Any]:
    """Streaming keeps shared memory for every `text` that was built until the process ends."""
    return run_of(assets, FSDP2, {"loggers": {}, "run_name": "test"}, loader=loader)


def mistaken(assets: Path, wrong: str) -> dict[str, Any]:
    """The good run with one of the mistakes."""
    changes, _ = MISTAKES[wrong]
    loads = any(key.startswith(("train_loader", "scheduler.t")) for key in changes)
    return changed(good(assets, "text" if loads else "finetuning"), changes)
