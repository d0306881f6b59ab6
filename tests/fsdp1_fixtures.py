"""The real checkpoints that Composer's FSDP1 wrote, which are kept beside the repository."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "shared" / "fixtures" / "fsdp1_checkpoints"

NAMES = (
    "ddp_2r",
    "full_2r",
    "full_actckpt_2r",
    "full_flatparam_2r",
    "full_weights_only_2r",
    "sharded_dtensor_2r",
    "sharded_dtensor_4r",
    "sharded_dtensor_actckpt_2r",
    "sharded_dtensor_dropout_2r",
    "sharded_dtensor_hsdp_2x2",
    "sharded_dtensor_weights_only_2r",
    "sharded_flatparam_2r",
    "sharded_flatparam_shardedtensor_2r",
    "sharded_legacy_optimizer_root_2r",
    "sharded_shardedtensor_2r",
    "sharded_shardedtensor_hsdp_2x2",
    "single_process",
)

needs_fixtures = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the FSDP1 checkpoints are not at {FOLDER}"
)


def path_of(name: str) -> Path:
    """The `load_path` of a fixture."""
    folder = FOLDER / name / "checkpoint"
    return folder if folder.is_dir() else FOLDER / name / "checkpoint.pt"


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """What the live model and optimizer were when the fixture was saved, and how it went on."""
    return json.loads((FOLDER / name / "expected.json").read_text())


@functools.cache
def tiny_model() -> ModuleType:
    """The model, data and optimizer all fixtures are of."""
    spec = importlib.util.spec_from_file_location("tiny_model", FOLDER / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a whole tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
