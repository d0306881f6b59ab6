"""Computes experts that lie in tensors with all experts of a layer: transformers 5, `torch_dmoe`.

Classes of transformers take tokens, the experts of each and their weights, and transformers can
exchange the forward of any of these classes for a function that goes by their attributes. So tokens
can travel before the forward, and the class computes the experts of a rank as if the layer had no
others: biases, transposed weights, gates with limits and grouped products are the class's own. LLM
Foundry's class goes through its experts one after the other, with the same result.

Source: https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/integrations/moe.py
https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/models/layers/dmoe.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from composer_fsdp2.parallel.expert.experts import ExpertLayer
from composer_fsdp2.parallel.expert.routers import code_of
from composer_fsdp2.parallel.expert.views import show_all_experts
from composer_fsdp2.parallel.form import ExpertForm, ExpertMesh, set_form
from composer_fsdp2.parallel.parallelism import set_experts
from composer_fsdp2.plan.module_tree import own_parameters

__all__ = ["StackedExperts", "holds_stack", "stack_size"]

_FOUNDRY = {
    "DroplessMLP": "b867609e321e19fe",
    "GLU": "edea7a985d72818c",
    "MLP": "dc511ea5b0992159",
}
"""class of `torch_dmoe` -> fingerprint of its forward"""


def holds_stack(name: str, module: nn.Module) -> bool:
    """Says whether a module seems to have experts in a 3-D tensor. Collective: no."""
    params = own_parameters(module)
    return "expert" in name.rpartition(".")[2].lower() and any(p.ndim == 3 for p in params)


def stack_size(experts: Any) -> int | None:
    """Returns how many experts each parameter of a module has; `None` if that is not known.

    Collective: no. A class with a forward of its own is not known, though it inherits from a known
    class.
    """
    if "forward" in vars(experts):
        return None
    if _is_of_foundry(experts):
        return experts.moe_num_experts
    if not (hasattr(type(experts).forward, "__wrapped__") and hasattr(experts, "is_transposed")):
        return None
    count, named = getattr(experts, "num_experts", None), dict(experts.named_parameters())
    stacks = [param.ndim > 1 and param.shape[0] == count for param in named.values()]
    return count if stacks and all(stacks) and not any("." in name for name in named) else None


def _is_of_foundry(experts: Any) -> bool:
    if type(experts).__module__ != "llmfoundry.models.layers.dmoe":
        return False
    fingerprints = {type(part).__name__: code_of(type(part).forward) for part in experts.modules()}
    return fingerprints.items() <= _FOUNDRY.items() and "DroplessMLP" in fingerprints


class StackedExperts(ExpertLayer):
    """Sends the tokens of a module to the ranks of its experts.

    The module keeps its class and its names. It is the unit, so its parameters are gathered while
    tokens travel.

    Args:
        experts: a module whose `stack_size` is known.
        mesh: the ranks that share the experts.
        count: experts of the layer, over all ranks.
    """

    def __init__(self, experts: Any, mesh: ExpertMesh, count: int) -> None:
        self.mesh, self.count = mesh, count
        self._experts, self._compute = experts, experts.forward
        self._is_of_foundry = _is_of_foundry(experts)
        set_experts(experts, self)
        experts.forward = self._forward_of_foundry if self._is_of_foundry else self._forward
        for part in experts.modules():
            for name in {"num_experts", "moe_num_experts"} & vars(part).keys():
                setattr(part, name, self.share)
        self._forms: dict[str, ExpertForm] = {}
        for name, param in experts.named_parameters():
            sizes = (param.shape[0] // mesh.degree, *param.shape[1:])
            even = (dim for dim, size in enumerate(sizes) if size % mesh.shards.size(-1) == 0)
            self._forms[name] = ExpertForm(mesh, mesh.group_rank, next(even, 0))
            set_form(param, self._forms[name])
        show_all_experts(experts)

    def drop_remote(self) -> None:
        """Cuts this rank's slice out of each parameter; see [Note: stacks]."""
        for name, form in self._forms.items():
            param = self._experts.get_parameter(name)
            slice_ = nn.Parameter(form.slice_of(param.detach()), param.requires_grad)
            set_form(slice_, form)
            path, _, attribute = name.rpartition(".")
            self._experts.get_submodule(path)._parameters[attribute] = slice_

    def _forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Replaces the module's forward. Collective: yes, as `compute`."""
        chosen = self.recall(top_k_index)
        return self.compute(hidden_states, chosen, top_k_weights, hidden_states.dtype)

    def _forward_of_foundry(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        expert_weights: torch.Tensor,
        top_experts: torch.Tensor,
    ) -> torch.Tensor:
        return self._forward(x.view(-1, x.shape[-1]), top_experts, expert_weights).view(x.shape)

    def made_of(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Has the class compute each row for one expert, with a weight of one."""
        count, numbers = len(rows), torch.arange(self.share, device=rows.device)
        chosen = numbers.repeat_interleave(torch.tensor(sizes, device=rows.device))
        if not count:
            # One process has a gradient of zeros for experts without a token: here a row that
            # nobody gets makes it.
            rows, chosen = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), numbers[:1]
        chosen, weights = chosen[:, None], rows.new_ones(len(rows), 1)
        arguments = (None, weights, chosen) if self._is_of_foundry else (chosen, weights)
        made: torch.Tensor = self._compute(rows, *arguments)
        return made[:count]

    def is_trained(self) -> bool:
        """Says whether a parameter is trained."""
        return any(param.requires_grad for param in self._experts.parameters())
