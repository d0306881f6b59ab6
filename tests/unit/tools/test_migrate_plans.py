"""YAMLs of LLM Foundry, migrated, give a plan for the model they train."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from composer_fsdp2.tools.migrate.engine import migrate
from tests.support.migrating import files
from tests.support.yaml_memory import plain, plan_values

# LLM Foundry 0.22 refuses MPT by its name on the hub; this is its shape.
MPT_7B = {"name": "mpt_causal_lm", "d_model": 4096, "n_heads": 32, "n_layers": 32}
MPT_7B |= {"vocab_size": 50432, "expansion_ratio": 4, "no_bias": True}


def without_flash(model: dict[str, Any]) -> dict[str, Any]:
    """The model with torch's attention and loss, which have the same parameters."""
    changed = copy.deepcopy(model)
    if str(model.get("pretrained_model_name_or_path")).startswith("mosaicml/mpt-7b"):
        return {**MPT_7B, "attn_config": {"attn_impl": "torch"}, "loss_fn": "torch_crossentropy"}
    if model["name"] == "mpt_causal_lm":
        changed.setdefault("attn_config", {})["attn_impl"] = "torch"
        changed["loss_fn"] = "torch_crossentropy"
    elif "use_flash_attention_2" in model:
        changed["use_flash_attention_2"] = False
    return changed


# MegaBlocks' experts are CUDA kernels, and such a model cannot be built without it.
BUILT = [file for file in files("foundry/*.yaml") if "mb_dmoe" not in file.read_text()]


# LLM Foundry says so of every model without learned positions.
@pytest.mark.table("llama-3.1-8b-continue")
@pytest.mark.filterwarnings("ignore:alibi or rope is turned on")
@pytest.mark.parametrize("file", BUILT, ids=lambda file: file.stem)
def test_migrated_yamls_plan(file: Path):
    config = OmegaConf.create(migrate(file.read_text()).text)
    assert isinstance(config, DictConfig)
    values = plain(config)
    model, _, plan = plan_values({**values, "model": without_flash(values["model"])})
    owned = [name for unit in plan.units for name in unit.params]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(owned) == sorted(names)
    inner = [unit for unit in plan.units if unit.role is None]
    layers = [unit for unit in inner if unit.module.rpartition(".")[2].isdigit()]
    assert len(layers) == layers_of(model)
    kept = values["parallelism_config"]["fsdp2"]["reshard_after_forward"] is False
    assert {bool(unit.reshard_after_forward) for unit in layers} == {not kept}


def layers_of(model: Any) -> int:
    config = model.model.config
    return getattr(config, "num_hidden_layers", None) or config.n_layers
