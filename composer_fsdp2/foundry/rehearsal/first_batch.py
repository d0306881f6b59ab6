"""Mistakes that stop a run in its first batch: sizes, kernels and names that are read late."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from composer.algorithms import GradientClipping
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.core import Timestamp
from composer.utils import ensure_folder_has_no_conflicting_files, format_name_with_dist
from torch import nn

from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.foundry.rehearsal.data import is_remote
from composer_fsdp2.foundry.rehearsal.notes import Notes
from composer_fsdp2.foundry.rehearsal.trainer import Parts

__all__ = ["check_first_batch"]

_POSITIONS = ("wpe", "embed_positions", "position_embedding", "position_embeddings", "pos_emb")
"""names of tables with a row for each position, in the models of LLM Foundry and transformers"""
_SAVE_FILENAME = "ep{epoch}-ba{batch}-rank{rank}.pt"
"""LLM Foundry's"""


def check_first_batch(
    notes: Notes, config: Any, parts: Parts, model: nn.Module | None, loader: Any, run_name: str
) -> None:
    """Notes what the first batch would stop at, as far as it can be known without one.

    Args:
        notes: take what is found.
        config: the run, as LLM Foundry reads it.
        parts: what is handed to the Trainer.
        model: on meta; `None` if it could not be built.
        loader: of training; `None` if it was not built.
        run_name: in the names of folders.
    """
    loaders = dict(_loaders(config))
    for where, block in loaders.items():
        if any(one.what.startswith(f"{where}:") for one in notes.mistakes):
            continue  # building it has said so
        _check_dataset(notes, f"{where}.dataset", block.get("dataset") or {})
    _check_microbatch(notes, config.device_train_microbatch_size)
    for algorithm in parts.algorithms:
        if isinstance(algorithm, GradientClipping):
            with notes.step("algorithms.gradient_clipping"):
                _clip(algorithm)
    _check_names_of_files(notes, config, run_name)
    if model is not None:
        _check_lengths(notes, model, loaders, loader)
        _check_kernels(notes, model)


def _loaders(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "train_loader", config.train_loader
    if config.eval_loader:
        yield "eval_loader", config.eval_loader
    for number, block in enumerate(config.eval_loaders or []):
        yield f"eval_loader[{number}]", block


def _check_dataset(notes: Notes, where: str, dataset: Mapping[str, Any]) -> None:
    """Values that streaming and LLM Foundry read when the first batch is made."""
    from streaming.base.partition import algos as partitions
    from streaming.base.shuffle import algos as shuffles

    for key, known in (("shuffle_algo", shuffles), ("partition_algo", partitions)):
        name = dataset.get(key)
        unread = key == "shuffle_algo" and not dataset.get("shuffle")
        if name is not None and name not in known and not unread:
            notes.add(
                f"{where}.{key}: streaming has no {ascii_repr(name)}.{nearest(str(name), known)}",
                f"Write one of {', '.join(sorted(known))}.",
            )
    length = dataset.get("max_seq_len")
    if length is not None and (isinstance(length, bool | str) or length < 1):
        notes.add(
            f"{where}.max_seq_len: {ascii_repr(length)} is no number of tokens.",
            "Write one above 0.",
        )
    ahead = dataset.get("predownload")
    if ahead is not None and (isinstance(ahead, bool | str) or ahead < 0):
        notes.add(
            f"{where}.predownload: {ascii_repr(ahead)} is no number of samples. The loader would "
            "wait for its first one forever.",
            "Write a number from 0, or leave it out.",
        )
    ratio = dataset.get("packing_ratio")
    if ratio not in (None, "auto") and (isinstance(ratio, bool | str) or ratio < 1):
        notes.add(
            f"{where}.packing_ratio: {ascii_repr(ratio)} is no ratio of samples to rows.",
            "Write a number from 1, or auto.",
        )


def _check_microbatch(notes: Notes, size: Any) -> None:
    """No loader of LLM Foundry divides samples."""
    if isinstance(size, float):
        notes.add(
            f"device_train_microbatch_size: {size} is no whole number. Composer divides a batch "
            "of LLM Foundry between samples, and raises for a fraction.",
            "Write a whole number of samples, or auto.",
        )


def _clip(algorithm: GradientClipping) -> None:
    """Composer reads kind and threshold when there are gradients."""
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kind, threshold = algorithm.clipping_type, algorithm.clipping_threshold
    apply_gradient_clipping(model, kind, threshold, fsdp_enabled=False)
    if not threshold > 0:
        raise ValueError(f"a clipping_threshold of {threshold} turns gradients round, or to 0")


def _check_names_of_files(notes: Notes, config: Any, run_name: str) -> None:
    """Composer looks for later checkpoints under the names that it would give."""
    if config.save_folder is None or config.save_overwrite:
        return
    name = config.save_filename or _SAVE_FILENAME
    before = len(notes.mistakes)
    advice = "Write what Composer fills in there: {epoch}, {batch}, {rank}."
    with notes.step("save_filename", advice), tempfile.TemporaryDirectory() as empty:
        ensure_folder_has_no_conflicting_files(empty, name, Timestamp())
    resumes = config.load_path is not None or config.autoresume
    if resumes or len(notes.mistakes) > before or is_remote(config.save_folder):
        return
    folder = Path(format_name_with_dist(config.save_folder, run_name))
    advice = "Write another folder, save_overwrite: true, or autoresume: true."
    if folder.is_dir():
        with notes.step("save_folder", advice):
            ensure_folder_has_no_conflicting_files(folder, name, Timestamp())


# --- The model. ---


def _check_lengths(
    notes: Notes, model: nn.Module, loaders: Mapping[str, Mapping[str, Any]], loader: Any
) -> None:
    """Samples that a data set holds may be shorter than its max_seq_len, and are trained then."""
    limits = list(_limits(model))
    for where, block in loaders.items():
        dataset = block.get("dataset") or {}
        longest = dataset.get("max_seq_len")
        short = [limit for limit in limits if isinstance(longest, int) and limit[1] < longest]
        with notes.step(where):
            found = _first_length(loader) if short and where == "train_loader" else None
            padded = block.get("name") == "finetuning" and not dataset.get("allow_pad_trimming")
            for name, limit in short[:1]:
                if found is None or found > limit:
                    notes.add(
                        f"{where}.dataset.max_seq_len is {longest}, and {name} of the model ends "
                        f"at {limit}. A batch that is longer stops the run.",
                        f"Write a max_seq_len of {limit} or less there, or build the model for "
                        f"{longest}.",
                        "problem" if found or padded else "warning",
                    )


def _first_length(loader: Any) -> int | None:
    """Returns the number of tokens of the first sample; `None` where no data are here."""
    dataset = getattr(getattr(loader, "dataloader", None), "dataset", None)
    if dataset is None:
        return None
    sample = dataset[0]
    return len(sample["input_ids"] if isinstance(sample, Mapping) else sample)


def _limits(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Names of what limits the length, and the length."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        length = getattr(config, "max_seq_len", None)
        if isinstance(length, int) and not isinstance(length, bool):
            yield "max_seq_len", length  # LLM Foundry's own models refuse more
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            yield f"'{name}'", module.num_embeddings


def _check_kernels(notes: Notes, model: nn.Module) -> None:
    """LLM Foundry imports the kernels of `flash` when attention is computed."""
    from llmfoundry.models.layers.attention import is_flash_v1_installed, is_flash_v2_installed

    asks = any(getattr(module, "attn_impl", None) == "flash" for module in model.modules())
    if not asks or is_flash_v1_installed() or is_flash_v2_installed():
        return
    notes.add(
        "model.attn_config.attn_impl is flash (LLM Foundry's default), and the package flash_attn "
        "is not installed. The first batch would stop with a NameError.",
        "Write attn_impl: torch, or install flash-attn.",
        "problem" if notes.cluster.is_here else "warning",
    )
