"""Mixtures of experts, routed by force sample by sample, so that ranks use different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.support import models
from tests.support.models import WIDTH, Block, TinyLM

EXPERTS = 4


class Mixture(nn.Module):
    """Sends the tokens of each sample to one expert; one that gets none is not called."""

    def __init__(self, attribute: str = "experts") -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.attribute = attribute
        setattr(self, attribute, nn.ModuleList(Block() for _ in range(EXPERTS)))
        self.chosen: list[int] = []
        """by sample"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number in sorted(set(self.chosen)):
            rows = torch.tensor(
                [i for i, c in enumerate(self.chosen) if c == number], device=x.device
            )
            seen = getattr(self, self.attribute)[number](x[rows]) * weight[rows][..., number, None]
            out = out.index_add(0, rows, seen)
        return x + out


class Sparse(TinyLM):
    """Dense blocks and mixtures in turns."""

    def __init__(self, attribute: str = "experts") -> None:
        super().__init__()
        self.blocks[1] = Mixture(attribute)
        self.blocks.append(Mixture(attribute))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Mixture) or any(module is block for block in self.blocks)


def choose(model: nn.Module, chosen: list[int]) -> None:
    """Sets the expert of each sample of the next batch."""
    for module in model.modules():
        if hasattr(module, "chosen"):
            module.chosen = chosen  # pyright: ignore[reportAttributeAccessIssue]


SIZES = {**models.SIZES, "num_experts_per_tok": 1}


def _mixtral(experts: int = EXPERTS, **sizes: Any) -> nn.Module:
    config = transformers.MixtralConfig(**(SIZES | sizes), num_local_experts=experts)
    return transformers.MixtralForCausalLM(config)


def _qwen3(experts: int = EXPERTS, **sizes: Any) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **(SIZES | sizes),
        head_dim=6,
        num_experts=experts,
        moe_intermediate_size=16,
        mlp_only_layers=[],
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _olmoe(experts: int = EXPERTS) -> nn.Module:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SIZES, num_experts=experts))


def _deepseek(experts: int = EXPERTS) -> nn.Module:
    attention = {"kv_lora_rank": 4, "q_lora_rank": 4, "v_head_dim": 6}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 2}),
        **attention,
        **heads,
        **groups,
        n_routed_experts=experts,
        moe_intermediate_size=16,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss(experts: int = EXPERTS) -> nn.Module:
    library: Any = transformers  # 4.51 has none
    config = library.GptOssConfig(**SIZES, head_dim=6, num_local_experts=experts)
    model = library.GptOssForCausalLM(config)
    for name, param in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(param, std=0.02)
    return model


STACKED = hasattr(transformers.PreTrainedModel, "set_experts_implementation")
"""all experts of a layer are in one tensor: transformers 5"""
FAMILIES: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "Mixtral": (_mixtral, "MixtralBlockSparseTop2MLP"),
    "Qwen3-MoE": (_qwen3, "Qwen3MoeMLP"),
    "OLMoE": (_olmoe, "OlmoeMLP"),
    "DeepSeek-V3": (_deepseek, "DeepseekV3MLP"),
}
if hasattr(transformers, "GptOssConfig"):
    FAMILIES["GPT-OSS"] = _gpt_oss, "GptOssExperts"
"""and the class of one expert"""


def force(model: nn.Module) -> nn.Module:
    """Has the routers of a Hugging Face model listen to `choose`; their weights still count."""
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.chosen = []  # pyright: ignore[reportAttributeAccessIssue]
            module.register_forward_hook(_rerouted)
    return model


def _rerouted(gate: Any, _args: object, output: Any) -> Any:
    if isinstance(output, tuple) and len(output) == 3:  # logits, weights, indices: transformers 5
        logits, weights, indices = output
        return logits, weights, _by_token(gate.chosen, len(indices))[:, None]
    if isinstance(output, tuple):  # indices and weights of DeepSeek
        indices, weights = output
        return _by_token(gate.chosen, len(indices))[:, None], weights
    wanted = F.one_hot(_by_token(gate.chosen, len(output)), EXPERTS)
    return output + 5.0 * wanted


def _by_token(chosen: list[int], tokens: int) -> torch.Tensor:
    return torch.tensor(chosen).repeat_interleave(tokens // len(chosen))


# --- Checkpoints of the other transformers ---


def renamed_experts(values: dict[str, Any], family: str) -> dict[str, Any]:
    """Returns values by FQN as the other major version of transformers has them.

    Args:
        values: tensors of weights or moments, or values of which each expert has the same.
        family: "Mixtral" or "Qwen3-MoE".
    """
    names = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if ".mlp." not in name and ".block_sparse_moe." not in name:
            found[name] = value
            continue
        layer, _, inside = name.replace(".block_sparse_moe.", ".mlp.").partition(".mlp.")
        other = "block_sparse_moe" if STACKED and family == "Mixtral" else "mlp"
        if ".experts." not in name:
            found[f"{layer}.{other}.{inside}"] = value
        elif STACKED:
            found |= _matrices(f"{layer}.{other}.experts", name.rpartition(".")[2], value, names)
        else:
            block = name.partition(".experts.")[0]
            matrices = [
                [values[f"{block}.experts.{number}.{matrix}.weight"] for matrix in names]
                for number in range(EXPERTS)
            ]
            rows = [torch.cat(expert[:2]) if expert[0].ndim else expert[0] for expert in matrices]
            found[f"{layer}.{other}.experts.gate_up_proj"] = torch.stack(rows)
            found[f"{layer}.{other}.experts.down_proj"] = torch.stack([m[2] for m in matrices])
    for name, value in found.items():
        if not STACKED and ".experts." in name and value.ndim == 1:
            found[name] = value[0]  # one number of steps
    return found


def _matrices(
    experts: str, stack: str, value: torch.Tensor, names: tuple[str, str, str]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for number in range(EXPERTS):
        parts = (value,) * 2
        if value.ndim:
            parts = (value[number],) if stack == "down_proj" else value[number].chunk(2)
        chosen = names[2:] if stack == "down_proj" else names[:2]
        for matrix, part in zip(chosen, parts, strict=False):
            found[f"{experts}.{number}.{matrix}.weight"] = part.clone()
    return found
