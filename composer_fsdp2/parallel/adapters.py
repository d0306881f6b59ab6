"""Low-rank adapters of PEFT beside layers that are divided between ranks.

[Note: adapters] An adapter adds `up(down(x))` to what a layer returns. Beside a layer divided by
columns, `down` is whole and `up` is divided by columns, as the layer is. Beside one divided by
rows, `down` is divided by rows and `up` is whole. So what is added is divided like the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from composer_fsdp2.parallel.cuts import Cut, is_adapted
from composer_fsdp2.plan.module_tree import ModuleTree

__all__ = ["adapter_cuts", "home_of", "unknown_adapter"]

_DOWN, _UP = "lora_A", "lora_B"


def adapter_cuts(module: nn.Module, cut: Cut) -> Iterator[tuple[str, Cut | None]]:
    """Returns how a layer and its adapters are divided, `None` for whole; see [Note: adapters].

    Collective: no.

    Args:
        module: a layer with adapters.
        cut: of the layer.
    """
    yield "base_layer", cut
    columns = cut.kind == "columns"
    up = Cut(kind="columns", gathers=cut.gathers, blocks=cut.blocks)
    for name in module.get_submodule(_DOWN)._modules:
        yield f"{_DOWN}.{name}", None if columns else Cut(kind="rows")
    for name in module.get_submodule(_UP)._modules:
        yield f"{_UP}.{name}", up if columns else None


def home_of(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, bool]:
    """Returns the attention or MLP that a layer is in, and whether it belongs to an adapter.

    Collective: no.
    """
    parent, _, child = name.rpartition(".")
    outer = parent.rpartition(".")[0]
    if parent and is_adapted(modules[parent]):
        return outer, child != "base_layer"
    if outer and is_adapted(modules[outer]):
        return outer.rpartition(".")[0], True
    return parent, False


def unknown_adapter(tree: ModuleTree) -> str | None:
    """Returns why an adapter of a model does not go with divided layers, if one does not.

    Collective: no.
    """
    modules = dict(tree.modules())
    known = {name for name, module in modules.items() if is_adapted(module)}
    for ref in tree.params:
        if "lora_" in ref.name:
            layer = ref.name.partition(".lora_")[0]
            if layer not in known or ".lora_magnitude" in ref.name:
                return f"'{ref.name}' is of an adapter that is not a plain LoRA of a linear layer"
    for name in known:
        if any(part.p > 0 for part in modules[name].modules() if isinstance(part, nn.Dropout)):
            return f"adapters of '{name}' have dropout, whose numbers ranks would not draw alike"
    return None
