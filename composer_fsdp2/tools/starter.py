"""Writes a first training YAML from four answers. Pure: answers in, text out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError

__all__ = ["GOALS", "SHAPES", "Answers", "Goal", "check_answers", "starter_yaml"]

Goal = Literal["pretrain", "finetune", "lora"]
GOALS: tuple[Goal, ...] = ("pretrain", "finetune", "lora")
SHAPES = {
    "mpt-tiny": {"d_model": 128, "n_heads": 4, "n_layers": 4},
    "mpt-125m": {"d_model": 768, "n_heads": 12, "n_layers": 12},
    "mpt-1b": {"d_model": 2048, "n_heads": 16, "n_layers": 24},
    "mpt-7b": {"d_model": 4096, "n_heads": 32, "n_layers": 32},
}
"""shapes of LLM Foundry's own model, by the name that is the answer"""

_GPUS_PER_NODE = 8
_CPU_RANKS = 2
_HUB_TOKENIZER = "EleutherAI/gpt-neox-20b"
_HUB_VOCABULARY = 50368
_LONGEST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers that a first run needs."""

    model: str
    """one of `SHAPES`, a folder, or a name on the Hugging Face hub"""
    data: str
    """a folder, an address, or, to fine-tune, a data set's name on the hub"""
    gpus: int
    """0 for the CPU"""
    goal: Goal
    tokenizer: str | None = None
    """a folder or a name on the hub; `None` for the model's own"""
    max_seq_len: int | None = None

    @property
    def ranks(self) -> int:
        """Processes of the run; two on the CPU, the fewest that shard something."""
        return self.gpus or _CPU_RANKS

    @property
    def nodes(self) -> int:
        """Machines of at most 8 GPUs."""
        return -(-self.gpus // _GPUS_PER_NODE) if self.gpus else 1


def check_answers(answers: Mapping[str, Any]) -> None:
    """Refuses answers from which no run can be made.

    Args:
        answers: the answers by the names of `Answers`; what is `None` is not checked yet.

    Raises:
        ConfigError: a goal without weights to start from, or GPUs that fill no nodes.
    """
    model, gpus, goal = answers.get("model"), answers.get("gpus"), answers.get("goal")
    if goal is not None and goal not in GOALS:
        raise ConfigError(
            f"The goal {goal!r} is none that init knows.{nearest(goal, GOALS)} "
            "Without one there is no loss and no data format. Write one of "
            f"{', '.join(GOALS)}; for DPO and distillation see the recipes in docs/."
        )
    if model in SHAPES and goal not in (None, "pretrain"):
        raise ConfigError(
            f"The model {model} has random weights, and the goal is {goal}. There "
            "is nothing to start from. Write a folder or a name on the Hugging Face hub, or the "
            "goal pretrain."
        )
    if gpus is not None and (gpus < 0 or (gpus > _GPUS_PER_NODE and gpus % _GPUS_PER_NODE)):
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {_GPUS_PER_NODE}. Launchers start the same "
            f"number of ranks on each node. Write a multiple of {_GPUS_PER_NODE}."
        )


# --- The text. A word between two @ is filled in; see `starter_yaml`. ---

_RUN = """\
# @what@. Written by composer-fsdp2 init.

# FSDP2: every rank holds a part of the weights, gradients and optimizer.
parallelism_config:
  fsdp2:
    # true: activations are computed again in backward, which takes less memory and more time.
    activation_checkpointing: @on_gpus@
@hsdp@
# Also the name of the folder that checkpoints are in.
run_name: @run_name@

variables:
@model_variable@  # @data_about@
  data: @data@
max_seq_len: @length@

# The model, as LLM Foundry builds it.
@model@
# The tokenizer that made the data, or the model's own.
tokenizer:
  name: @tokenizer@
  kwargs:
    model_max_length: ${max_seq_len}

@loaders@optimizer:
  name: decoupled_adamw
  # The first value to change when the loss does not fall.
  lr: @rate@
  betas: [0.9, 0.95]
  weight_decay: 0.0

scheduler:
  name: cosine_with_warmup
  t_warmup: 0.03dur
  alpha_f: 0.1

algorithms:
  gradient_clipping:
    clipping_type: norm
    clipping_threshold: 1.0

# ba counts steps of the optimizer, ep passes over the data.
max_duration: @duration@

# Sequences of one step, over all ranks; a multiple of their number.
global_train_batch_size: @batch@

# Sequences that one rank takes at a time: raise it while the memory lasts. On GPUs auto finds the
# largest.
device_train_microbatch_size: 1
device_eval_batch_size: 1
eval_interval: @eval_interval@

# @precision_about@
precision: @precision@
seed: 17

# Checkpoints. With autoresume the same command goes on from the newest one.
save_folder: runs/${run_name}/checkpoints
save_interval: 500ba
save_num_checkpoints_to_keep: 2
autoresume: true

callbacks:
  speed_monitor:
    window_size: 10

# One line every console_log_interval; true shows a bar instead.
progress_bar: false
log_to_console: true
console_log_interval: 10ba
log_config: false
python_log_level: warning
dist_timeout: 1800
"""

_PROMPTS = 'A folder with train.jsonl; every line is {"prompt": "...", "response": "..."}.'
_SHARDS = "A folder with the split train, and val if there is one, as MDS shards."

_HSDP = f"""\
    # HSDP: the model is sharded over the 8 GPUs of a node, and every node holds a copy.
    data_parallel_shard_degree: {_GPUS_PER_NODE}
    data_parallel_replicate_degree: -1
"""

_MPT = """\
model:
  name: mpt_causal_lm
  # meta: no rank builds the whole model. mixed: rank 0 reads it and hands it out.
  init_device: meta
  d_model: @d_model@
  n_heads: @n_heads@
  n_layers: @n_layers@
  expansion_ratio: 4
  max_seq_len: ${max_seq_len}
  # At least the size of the tokenizer's vocabulary.
  vocab_size: @vocabulary@
  # flash is quicker where flash-attn is installed.
  attn_config:
    attn_impl: torch
  loss_fn: torch_crossentropy
"""

_HUGGING_FACE = """\
model:
  name: hf_causal_lm
  pretrained_model_name_or_path: ${variables.model}
  pretrained: @pretrained@
  # meta: no rank builds the whole model. mixed: rank 0 reads it and hands it out.
  init_device: @init_device@
  attn_implementation: sdpa
"""

_LORA = """\
  # LoRA: small adapters are trained, and the weights of the model are not.
  peft_config:
    peft_type: LORA
    task_type: CAUSAL_LM
    r: 16
    lora_alpha: 32
    lora_dropout: 0.05
    target_modules: all-linear
  # Checkpoints hold the adapters alone.
  should_save_peft_only: true
"""

_LOADER = """\
@loader@:
  name: @kind@
  dataset:
    @place@
    split: @split@
    max_seq_len: ${max_seq_len}
    shuffle: @training@
    @format@
  drop_last: @training@
  num_workers: @workers@
  pin_memory: @on_gpus@
  prefetch_factor: @prefetch@
  persistent_workers: @on_gpus@

"""


def starter_yaml(answers: Answers) -> str:
    """Returns the text of a run with comments.

    Raises:
        ConfigError: as `check_answers`.
    """
    check_answers(dataclasses.asdict(answers))
    goal, model, shape = answers.goal, answers.model, SHAPES.get(answers.model)
    tokenizer = answers.tokenizer
    if tokenizer is None and shape is not None:
        beside = Path(answers.data, "tokenizer")
        tokenizer = str(beside) if beside.is_dir() else _HUB_TOKENIZER
    # The length that the model was trained for, if its folder tells.
    config = _read_json(model, "config.json")
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    length = min(positions, _LONGEST) if isinstance(positions, int) and positions > 0 else _LONGEST
    if shape is not None:
        length = 128 if model == "mpt-tiny" else 2048
    on_gpus, pretrained = answers.gpus > 0, goal != "pretrain"
    purpose, rate = {
        "pretrain": (f"Trains a model of the shape of {model} from random weights", "6.0e-04"),
        "finetune": (f"Fine-tunes {model}", "2.0e-05"),
        "lora": (f"Trains LoRA adapters of {model}", "2.0e-04"),
    }[goal]
    where = f"{answers.gpus} GPUs" if on_gpus else "two processes of the CPU"
    values = {
        "what": " ".join(f"{purpose} on {where}".split()),
        "on_gpus": json.dumps(on_gpus),
        "hsdp": _HSDP if answers.nodes > 1 else "",
        "run_name": _quoted(f"{goal}-{Path(model).name or 'run'}".lower()),
        "model_variable": "" if shape else f"  model: {_quoted(model)}\n",
        "data": _quoted(answers.data),
        "data_about": _PROMPTS if pretrained else _SHARDS,
        "length": str(answers.max_seq_len or length),
        "tokenizer": "${variables.model}" if tokenizer is None else _quoted(tokenizer),
        "rate": rate,
        "batch": str((8 if pretrained else 16) * answers.ranks),
        "duration": "1ep" if pretrained else "1000ba",
        "eval_interval": "1ep" if pretrained else "500ba",
        "precision": "amp_bf16" if on_gpus else "fp32",
        "precision_about": "bf16, with weights and gradients in fp32."
        if on_gpus
        else "The CPU trains in fp32 alone; GPUs in amp_bf16.",
        "workers": "8" if on_gpus else "0",
        "prefetch": "2" if on_gpus else "null",
    }
    if shape is not None:
        content = _read_json(tokenizer or _HUB_TOKENIZER, "tokenizer.json")
        tokens = len(content.get("model", {}).get("vocab", ()))
        tokens += len(content.get("added_tokens", ()))
        sizes = {name: str(size) for name, size in shape.items()}
        # GPUs are quick with an embedding of a multiple of 64 rows.
        sizes["vocabulary"] = str(-(-tokens // 64) * 64 or _HUB_VOCABULARY)
        values["model"] = _filled(_MPT, sizes)
    else:
        values["pretrained"] = json.dumps(pretrained)
        values["init_device"] = "mixed" if pretrained else "meta"
        values["model"] = _filled(_HUGGING_FACE, values) + (_LORA if goal == "lora" else "")
    values["loaders"] = _filled(_loaders(answers), values)
    return _filled(_RUN, values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: values.get(match[1], match[0]), template)


def _quoted(text: str) -> str:
    """Returns a text in quotes, which no reader of YAML takes for a number or a comment."""
    return json.dumps(text, ensure_ascii=False)


def _loaders(answers: Answers) -> str:
    """Returns the loader to train on, and one to evaluate on where a local folder has a split."""
    folder, data = Path(answers.data), answers.data
    looks_local = data.startswith((".", "/", "~")) or folder.exists()
    if answers.goal == "pretrain":
        held_out = [name for name in ("val", "test") if (folder / name / "index.json").is_file()]
        kind, form = "text", "shuffle_seed: ${seed}"
        place = "local: ${variables.data}"
        if "://" in data:
            place = "remote: ${variables.data}\n    local: /tmp/${run_name}/@split@"
    else:
        names = ("test", "validation", "val")
        held_out = [name for name in names if (folder / f"{name}.jsonl").is_file()]
        kind, form = "finetuning", "decoder_only_format: true\n    allow_pad_trimming: false"
        place = "hf_name: ${variables.data}"
        if looks_local or "/" not in data:
            place = "hf_name: json\n    hf_kwargs:\n      data_dir: ${variables.data}"
    text = ""
    for name, split in zip(("train_loader", "eval_loader"), ["train", *held_out], strict=False):
        values = {"loader": name, "kind": kind, "place": place, "format": form}
        values["training"] = json.dumps(name == "train_loader")
        text += _filled(_LOADER, values).replace("@split@", split)
    return text


def _read_json(folder: str, name: str) -> dict[str, Any]:
    """Returns the mapping in a file; without such a file an empty one."""
    try:
        content = json.loads(Path(folder, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
