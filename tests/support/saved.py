"""Checkpoints for tests: the FSDP1 fixtures, and small ones that torch itself writes."""

from __future__ import annotations

import hashlib
import io
import pickle
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from composer_fsdp2.checkpoint.source import Checkpoint
from tests.support.fsdp1_fixtures import NAMES, expected
from tests.support.fsdp1_fixtures import path_of as fixture

__all__ = ["NAMES", "expected", "fixture"]


def expected_digests(name: str) -> dict[str, str]:
    """Key -> sha256 of the live tensors at the save; a weights-only save has the model's alone."""
    found = expected(name)
    state = found["at_save"]
    digests = {f"state.model.{key}": value["sha256"] for key, value in state["model"].items()}
    if not found["weights_only"]:
        for parameter, slots in state["optimizer_state"].items():
            for slot, value in slots.items():
                key = f"state.optimizers.AdamW.state.{parameter}.{slot}"
                digests[key] = value["sha256"]
    return digests


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Key -> sha256 of the model's and optimizer's tensors."""
    keys = [key for key in checkpoint.tensors if not key.startswith("rng")]
    return {key: digest(checkpoint.tensor(key)) for key in keys}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def small_state(seed: int = 0) -> dict[str, Any]:
    """What Composer saves, in small: a tied weight, an optimizer, random states."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {"model.embed.weight": values(40, 8), "model.norm.weight": values(8)}
    state = {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": values(*weight.shape),
            "exp_avg_sq": values(*weight.shape).abs(),
        }
        for name, weight in weights.items()
    }
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": list(weights)}
    model = {**weights, "model.head.weight": weights["model.embed.weight"]}
    return {
        "state": {
            "model": model,
            "optimizers": {"AdamW": {"state": state, "param_groups": [group]}},
            "timestamp": {"Timestamp": {"epoch": 1, "batch": 7}},
            "run_name": "small",
            "algorithms": [],
            "metadata": {"world_size": 2, "torch_version": torch.__version__},
        },
        "rng": [{"torch": torch.get_rng_state(), "cuda": values(3)} for _ in range(2)],
    }


def save_folder(path: Path, state: dict[str, Any]) -> Path:
    """As torch.distributed.checkpoint writes it, in one process."""
    with warnings.catch_warnings():
        # It remarks that there is only one process.
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.save(state, checkpoint_id=path)
    return path


def save_file(path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, path)
    return path


@contextmanager
def no_space(limit_bytes: int) -> Iterator[None]:
    """The system refuses to make files larger, as it does on a full disk, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_files(limit_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit_files(limit_bytes: int) -> None:
    """Does so until the limit is set back."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))


class _NewerPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is TensorProperties:
            return TensorProperties, (), (*obj.__getstate__(), None, None)
        return NotImplemented


def as_newer_torch(metadata: Metadata) -> bytes:
    """The metadata as a torch would write it whose tensors have two more properties."""
    file = io.BytesIO()
    _NewerPickler(file).dump(metadata)
    return file.getvalue()
