"""Writes a first training YAML from four answers. Pure: answers in, text out."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from composer_fsdp2.config.messages import nearest
from composer_fsdp2.errors import ConfigError

__all__ = ["GOALS", "SHAPES", "Answers", "Goal", "check_answers", "read_gpus", "starter_yaml"]

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


def read_gpus(text: str) -> int:
    """Reads a number of GPUs.

    Raises:
        ConfigError: the text is no number.
    """
    if not text.strip().isdecimal():
        raise ConfigError(
            f"'{text}' is no number of GPUs. Ranks are counted from it. Write 0 for the CPU, or a "
            "whole number, for example 8."
        )
    return int(text)


def check_answers(given: Mapping[str, Any]) -> None:
    """Refuses answers from which no run can be made.

    Args:
        given: the answers by the names of `Answers`; what is `None` is not checked yet.

    Raises:
        ConfigError: a goal without weights to start from, or GPUs that fill no nodes.
    """
    model, gpus, goal = given.get("model"), given.get("gpus"), given.get("goal")
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
    if gpus is not None and gpus < 0:
        raise ConfigError(
            f"{gpus} is no number of GPUs. Ranks are counted from it. Write 0 for the CPU."
        )
    if gpus is not None and gpus > _GPUS_PER_NODE and gpus % _GPUS_PER_NODE:
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {_GPUS_PER_NODE}. Launchers start the same "
            f"number of ranks on each node. Write a multiple of {_GPUS_PER_NODE}."
        )


def starter_yaml(answers: Answers) -> str:
    """Returns the text of a run with comments.

    Raises:
        ConfigError: as `check_answers`.
    """
    check_answers(dataclasses.asdict(answers))
    length = answers.max_seq_len or _default_length(answers)
    settings: dict[str, Any] = {
        "parallelism_config": {"fsdp2": _fsdp2(answers)},
        "run_name": f"{answers.goal}-{Path(answers.model).name or 'run'}".lower(),
        "variables": {"model": answers.model, "data": answers.data},
        "max_seq_len": length,
        "model": _model(answers),
        "tokenizer": _tokenizer(answers),
        **_loaders(answers),
        **_training(answers),
        **_running(answers),
    }
    if answers.model in SHAPES:
        del settings["variables"]["model"]
    return _dump(settings, _COMMENTS | _comments(answers))


# --- The parts of a run. ---


def _fsdp2(answers: Answers) -> dict[str, Any]:
    settings: dict[str, Any] = {"activation_checkpointing": bool(answers.gpus)}
    if answers.nodes > 1:
        settings |= {
            "data_parallel_shard_degree": _GPUS_PER_NODE,
            "data_parallel_replicate_degree": -1,
        }
    return settings


def _model(answers: Answers) -> dict[str, Any]:
    if answers.model in SHAPES:
        return {
            "name": "mpt_causal_lm",
            "init_device": "meta",
            **SHAPES[answers.model],
            "expansion_ratio": 4,
            "max_seq_len": "${max_seq_len}",
            "vocab_size": _vocabulary(_tokenizer_name(answers)),
            "attn_config": {"attn_impl": "torch"},
            "loss_fn": "torch_crossentropy",
        }
    pretrained = answers.goal != "pretrain"
    model: dict[str, Any] = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": "${variables.model}",
        "pretrained": pretrained,
        "init_device": "mixed" if pretrained else "meta",
        "attn_implementation": "sdpa",
    }
    if answers.goal == "lora":
        model["peft_config"] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "target_modules": "all-linear",
        }
        model["should_save_peft_only"] = True
    return model


def _tokenizer(answers: Answers) -> dict[str, Any]:
    own = answers.tokenizer is None and answers.model not in SHAPES
    name = "${variables.model}" if own else _tokenizer_name(answers)
    return {"name": name, "kwargs": {"model_max_length": "${max_seq_len}"}}


def _tokenizer_name(answers: Answers) -> str:
    if answers.tokenizer is not None:
        return answers.tokenizer
    if answers.model not in SHAPES:
        return answers.model
    beside = Path(answers.data, "tokenizer")
    return str(beside) if beside.is_dir() else _HUB_TOKENIZER


def _vocabulary(tokenizer: str) -> int:
    """Rows of the embedding: a multiple of 64, which GPUs are quick with."""
    try:
        content = json.loads(Path(tokenizer, "tokenizer.json").read_text(encoding="utf-8"))
        tokens = len(content["model"]["vocab"]) + len(content.get("added_tokens", ()))
    except (OSError, ValueError, KeyError, TypeError):
        return _HUB_VOCABULARY
    return -(-tokens // 64) * 64


def _default_length(answers: Answers) -> int:
    """Returns the length the model was trained for, if its folder tells, at most 4096."""
    if answers.model in SHAPES:
        return 128 if answers.model == "mpt-tiny" else 2048
    try:
        config = json.loads(Path(answers.model, "config.json").read_text(encoding="utf-8"))
        known = config.get("max_position_embeddings") or config.get("n_positions")
    except (OSError, ValueError, AttributeError):
        known = None
    return min(known, _LONGEST) if isinstance(known, int) and known > 0 else _LONGEST


def _loaders(answers: Answers) -> dict[str, Any]:
    splits = _splits(answers)
    loaders = {"train_loader": _loader(answers, splits[0])}
    if len(splits) > 1:
        loaders["eval_loader"] = {**_loader(answers, splits[1]), "drop_last": False}
        loaders["eval_loader"]["dataset"]["shuffle"] = False
    return loaders


def _splits(answers: Answers) -> list[str]:
    """The split to train on, and one to evaluate on where a local folder has it."""
    folder = Path(answers.data)
    if answers.goal == "pretrain":
        held_out = [name for name in ("val", "test") if (folder / name / "index.json").is_file()]
    else:
        names = ("test", "validation", "val")
        held_out = [name for name in names if (folder / f"{name}.jsonl").is_file()]
    return ["train", *held_out[:1]]


def _loader(answers: Answers, split: str) -> dict[str, Any]:
    data = "${variables.data}"
    if answers.goal == "pretrain":
        place = {"local": data}
        if "://" in answers.data:
            place = {"remote": data, "local": f"/tmp/${{run_name}}/{split}"}
        kind: dict[str, Any] = {"name": "text", "dataset": place}
    elif _is_hub_data(answers):
        kind = {"name": "finetuning", "dataset": {"hf_name": data}}
    else:
        kind = {
            "name": "finetuning",
            "dataset": {"hf_name": "json", "hf_kwargs": {"data_dir": data}},
        }
    kind["dataset"] |= {"split": split, "max_seq_len": "${max_seq_len}", "shuffle": True}
    if answers.goal == "pretrain":
        kind["dataset"]["shuffle_seed"] = "${seed}"
    else:
        kind["dataset"] |= {"decoder_only_format": True, "allow_pad_trimming": False}
    workers = 8 if answers.gpus else 0
    return {
        **kind,
        "drop_last": True,
        "num_workers": workers,
        "pin_memory": bool(workers),
        "prefetch_factor": 2 if workers else None,
        "persistent_workers": bool(workers),
    }


def _is_hub_data(answers: Answers) -> bool:
    given = answers.data
    looks_local = given.startswith((".", "/", "~")) or Path(given).exists()
    return "/" in given and not looks_local


def _training(answers: Answers) -> dict[str, Any]:
    rate = {"pretrain": 6.0e-4, "finetune": 2.0e-5, "lora": 2.0e-4}[answers.goal]
    per_rank = {"pretrain": 16, "finetune": 8, "lora": 8}[answers.goal]
    return {
        "optimizer": {
            "name": "decoupled_adamw",
            "lr": rate,
            "betas": _flow([0.9, 0.95]),
            "weight_decay": 0.0,
        },
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "0.03dur", "alpha_f": 0.1},
        "algorithms": {
            "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
        },
        "max_duration": "1000ba" if answers.goal == "pretrain" else "1ep",
        "global_train_batch_size": per_rank * answers.ranks,
        "device_train_microbatch_size": 1,
        "device_eval_batch_size": 1,
        "eval_interval": "500ba" if answers.goal == "pretrain" else "1ep",
        "precision": "amp_bf16" if answers.gpus else "fp32",
        "seed": 17,
    }


def _running(answers: Answers) -> dict[str, Any]:
    return {
        "save_folder": "runs/${run_name}/checkpoints",
        "save_interval": "500ba",
        "save_num_checkpoints_to_keep": 2,
        "autoresume": True,
        "callbacks": {"speed_monitor": {"window_size": 10}},
        "progress_bar": False,
        "log_to_console": True,
        "console_log_interval": "10ba",
        "log_config": False,
        "python_log_level": "warning",
        "dist_timeout": 1800,
    }


# --- Text. ---

_COMMENTS = {
    "parallelism_config": "FSDP2: every rank holds a part of the weights, gradients and optimizer.",
    "parallelism_config.fsdp2.activation_checkpointing": (
        "true: activations are computed again in backward, which takes less memory and more time."
    ),
    "parallelism_config.fsdp2.data_parallel_shard_degree": (
        "HSDP: the model is sharded over the 8 GPUs of a node, and every node holds a copy."
    ),
    "run_name": "Also the name of the folder that checkpoints are in.",
    "model": "The model, as LLM Foundry builds it.",
    "model.init_device": (
        "meta: no rank builds the whole model. mixed: rank 0 reads it and hands it out."
    ),
    "model.peft_config": "LoRA: small adapters are trained, and the weights of the model are not.",
    "model.should_save_peft_only": "Checkpoints hold the adapters alone.",
    "model.vocab_size": "At least the size of the tokenizer's vocabulary.",
    "model.attn_config": "flash is quicker where flash-attn is installed.",
    "tokenizer": "The tokenizer that made the data, or the model's own.",
    "optimizer.lr": "The first value to change when the loss does not fall.",
    "max_duration": "ba counts steps of the optimizer, ep passes over the data.",
    "global_train_batch_size": "Sequences of one step, over all ranks; a multiple of their number.",
    "device_train_microbatch_size": (
        "Sequences that one rank takes at a time: raise it while the memory lasts. On GPUs auto "
        "finds the largest."
    ),
    "save_folder": "Checkpoints. With autoresume the same command goes on from the newest one.",
    "progress_bar": "One line every console_log_interval; true shows a bar instead.",
}
"""comments before a key; a dot leads into a block"""


def _comments(answers: Answers) -> dict[str, str]:
    """Comments that depend on the answers, the first of them at the top of the file."""
    said = {
        "pretrain": f"Trains a model of the shape of {answers.model} from random weights",
        "finetune": f"Fine-tunes {answers.model}",
        "lora": f"Trains LoRA adapters of {answers.model}",
    }
    where = f"{answers.gpus} GPUs" if answers.gpus else "two processes of the CPU"
    data = {
        "pretrain": "A folder with the split train, and val if there is one, as MDS shards.",
    }.get(
        answers.goal,
        'A folder with train.jsonl; every line is {"prompt": "...", "response": "..."}.',
    )
    precision = "bf16, with weights and gradients in fp32." if answers.gpus else ""
    return {
        "": f"{said[answers.goal]} on {where}. Written by composer-fsdp2 init.",
        "variables.data": data,
        "precision": precision or "The CPU trains in fp32 alone; GPUs in amp_bf16.",
    }


def _dump(settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    top = _commented(settings, comments, "", 0)
    top.yaml_set_start_comment(f"{comments['']}\n")
    writer = YAML()
    writer.indent(mapping=2, sequence=2, offset=0)
    writer.width = 120
    # ruamel leaves null empty, which reads like a mistake.
    writer.representer.add_representer(type(None), _null)
    writer.representer.add_representer(float, _float)
    stream = io.StringIO()
    writer.dump(top, stream)
    return stream.getvalue()


def _null(representer: Any, _value: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _float(representer: Any, value: float) -> Any:
    """2.0e-05 and not 2e-05, which is text to a reader of YAML 1.1."""
    text = f"{value:.1e}" if abs(value) < 1e-3 and value else repr(value)
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _commented(
    settings: Mapping[str, Any], comments: Mapping[str, str], prefix: str, depth: int
) -> CommentedMap:
    """The settings with the comments before their keys, and an empty line before each block."""
    found = CommentedMap()
    for key, value in settings.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, Mapping)
        found[key] = _commented(value, comments, f"{name}.", depth + 1) if inner else value
        text = comments.get(name)
        gap = "\n" if depth == 0 and (inner or text) else ""
        if text or gap:
            before = gap + (text or "")
            found.yaml_set_comment_before_after_key(key, before=before, indent=2 * depth)
    return found


def _flow(values: list[Any]) -> CommentedSeq:
    sequence = CommentedSeq(values)
    sequence.fa.set_flow_style()
    return sequence
