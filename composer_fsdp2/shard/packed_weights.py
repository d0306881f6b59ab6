"""Prepares weights that bitsandbytes packs in 4 bits.

[Note: packed weights] `Params4bit` of bitsandbytes has two elements of a weight in each byte, and a
`quant_state` with the scale of every 64 elements. To be sharded, the bytes become a parameter of
`uint8`, which FSDP2 gathers without a cast; the scales, an eighth of the bytes or less, stay on
every rank. The layer looks for its `quant_state` at the weight, so a hook puts it at the gathered
one. State dicts have neither bytes nor scales: a run takes the base from where it took it before.

Source: the layer keeps a second reference for the loss of the first under FSDP,
https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L487
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from composer_fsdp2.plan.module_tree import ModuleTree, is_packed
from composer_fsdp2.plan.wrap_plan import ShardUnit
from composer_fsdp2.ranks import broadcast_from_rank0
from composer_fsdp2.shard.layout import slot_of

__all__ = ["prepare_packed_weights"]


def prepare_packed_weights(
    tree: ModuleTree, units: Iterable[ShardUnit], device: torch.device
) -> ModuleTree:
    """Makes packed weights ready to be sharded or replicated; returns the tree of the new model.

    Collective: yes, if there are any (broadcasts of the scales). See [Note: packed weights].

    Args:
        tree: the model, not sharded yet.
        units: of the plan; what is in none is replicated.
        device: of forward and backward.
    """
    packed = [ref for ref in tree.params if is_packed(ref.param)]
    sharded = {name for unit in units for name in unit.params}
    for ref in packed:
        layer: Any
        param: Any = ref.param
        layer, attribute = slot_of(tree, ref)
        layer.quant_state = param.quant_state
        layer.quant_state.to(device)
        for scales in _tensors_of(layer.quant_state):
            broadcast_from_rank0(scales, device)
        # An evaluation on a CPU would pack the bytes anew, for inference alone.
        layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_post_hook(_leave_out)
        if ref.name in sharded:
            data = param.detach().as_subclass(torch.Tensor).view(torch.uint8)
            layer._parameters[attribute] = nn.Parameter(data, requires_grad=False)
            layer.register_forward_pre_hook(_give_quant_state)
    if not packed:
        return tree
    tree.params.clear()  # the caller may keep the tree
    return ModuleTree.read(tree.root)


def _tensors_of(quant_state: Any) -> Iterator[torch.Tensor]:
    yield from (value for value in vars(quant_state).values() if isinstance(value, torch.Tensor))
    if quant_state.nested:
        yield from _tensors_of(quant_state.state2)


def _give_quant_state(layer: Any, _inputs: object) -> None:
    layer.weight.quant_state = layer.quant_state


def _leave_out(
    _layer: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, _metadata: object
) -> None:
    for name in [name for name in state_dict if name.startswith(f"{prefix}weight")]:
        del state_dict[name]
