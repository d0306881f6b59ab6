"""Where tests find their files: always in the repository, so that a clone has all of them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CONFIGS", "FSDP1_CHECKPOINTS", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
_DATA = ROOT / "tests" / "data"
CONFIGS = _DATA / "configs"
FSDP1_CHECKPOINTS = _DATA / "fsdp1_checkpoints"
