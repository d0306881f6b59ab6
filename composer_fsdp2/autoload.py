"""Lets plain `llmfoundry eval` know `parallelism_config`.

LLM Foundry asks plugins about a training run, and nobody about an evaluation before it refuses keys
that it does not know. torch, which it imports, does ask: it calls every entry point of the group
`torch.backends` (unless TORCH_DEVICE_BACKEND_AUTOLOAD=0). That is every process that imports torch,
so all that happens there is one look at each import that follows, until LLM Foundry's evaluation is
imported. A config without `parallelism_config` goes the way it always did.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["watch_for_evaluation"]

_EVALUATION = "llmfoundry.command_utils.eval"


def watch_for_evaluation() -> None:
    """Has the module extended when it is imported; does nothing when it is there already."""
    if _EVALUATION not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _EVALUATION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Extending(spec.loader)
        return spec


class _Extending(Loader):
    """Loads a module as its own loader does, which it gets back."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from composer_fsdp2.trainer import patches

        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        patches.ask_for_install(module)
