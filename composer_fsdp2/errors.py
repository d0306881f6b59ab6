"""Declares the exceptions that users may catch."""

from __future__ import annotations

__all__ = ["CheckpointError", "ConfigError", "PatchError", "PlanError", "ShardReadError"]


class ConfigError(ValueError):
    """A setting is unknown, has the wrong type, or cannot hold together with another one."""


class PlanError(ValueError):
    """The model cannot be divided into FSDP units as asked."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, written, or does not fit the run."""


class PatchError(RuntimeError):
    """A function of another package is not the one our replacement was written for."""


class ShardReadError(RuntimeError):
    """A shard of a tensor was about to be read as if it were the full tensor."""
