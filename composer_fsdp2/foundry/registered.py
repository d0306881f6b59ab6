"""Adds this package's parts to LLM Foundry's registries."""

from __future__ import annotations

__all__ = ["register", "register_console", "register_names"]


def register() -> None:
    """Registers what LLM Foundry finds by entry points of an installed package.

    Runs without FSDP2 that our programs start get what transformers 5 lacks, too.
    """
    from llmfoundry import registry

    from composer_fsdp2 import patches
    from composer_fsdp2.foundry.transform import transform
    from composer_fsdp2.optim.muon.optimizer import Muon
    from composer_fsdp2.prepare.measured_step import MONITOR
    from composer_fsdp2.trainer import config
    from composer_fsdp2.trainer.extensions import step_record
    from composer_fsdp2.trainer.extensions.monitor import FSDP2Monitor

    patches.install_for_foundry()
    registry.config_transforms.register(config.TRANSFORM, func=transform)
    registry.callbacks.register(MONITOR, func=FSDP2Monitor)
    registry.optimizers.register("muon", func=Muon)
    # `parity` writes its name into the configurations that it runs.
    registry.algorithms.register(step_record.NAME, func=step_record.Recorder)


def register_console() -> None:
    """Has every run that this process starts print one line an interval."""
    from llmfoundry import registry

    from composer_fsdp2.foundry import console

    registry.config_transforms.register(console.NAME, func=console.one_line_console)
    registry.loggers.register(console.NAME, func=console.LineConsole)


def register_names() -> None:
    """Has every run that this process starts refuse unknown names before it builds anything.

    Call it last: what is registered later may change names.
    """
    from llmfoundry.registry import config_transforms

    from composer_fsdp2.foundry.names import NAME, refuse_unknown

    config_transforms.register(NAME, func=refuse_unknown)
