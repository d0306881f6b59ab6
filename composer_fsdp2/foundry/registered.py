"""Adds this package's parts to LLM Foundry's registries."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """LLM Foundry finds these by entry point, but not in a checkout that is not installed."""
    from llmfoundry import registry

    from composer_fsdp2.foundry.transform import transform
    from composer_fsdp2.trainer import monitor, patches, step_record

    registry.config_transforms.register(patches.TRANSFORM, func=transform)
    registry.callbacks.register(monitor.NAME, func=monitor.FSDP2Monitor)
    # `parity` writes its name into the configurations that it runs.
    registry.algorithms.register(step_record.NAME, func=step_record.Recorder)
