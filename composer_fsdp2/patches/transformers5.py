"""Rows that let LLM Foundry run with transformers 5, each where transformers here needs it."""

from __future__ import annotations

import functools
import importlib.util
import inspect

from composer_fsdp2.patches.engine import Feature, PatchPoint, always

__all__ = ["TRANSFORMERS5_ROWS"]

_UPSTREAM = "https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/models"
_PACKAGE = "llmfoundry.models"
_MPT = f"{_PACKAGE}.mpt.modeling_mpt:MPTForCausalLM"
_INSTEAD = "Install transformers 4.51."
_PRETRAINED = Feature("use_auth_token or load_in_8bit with transformers 5", _INSTEAD)
_META = Feature("LLM Foundry's init_empty_weights with transformers 5", _INSTEAD)
_MODEL = Feature("LLM Foundry's MPT with transformers 5", _INSTEAD)
_row = functools.partial(PatchPoint, versions="llm-foundry 0.22.0")


def _old_arguments_are_unknown() -> bool:
    from transformers.modeling_utils import PreTrainedModel

    code = inspect.unwrap(PreTrainedModel.from_pretrained).__code__
    return "use_auth_token" not in code.co_consts


def _token_ids_are_missing() -> bool:
    from transformers.configuration_utils import PretrainedConfig

    return not hasattr(PretrainedConfig(), "pad_token_id")


def _ties_are_a_mapping() -> bool:
    from transformers.modeling_utils import PreTrainedModel

    return hasattr(PreTrainedModel, "get_expanded_tied_weights_keys")


def _generation_is_a_mixin() -> bool:
    from transformers.modeling_utils import PreTrainedModel

    return not hasattr(PreTrainedModel, "generate")


def _rotation_takes_no_positions() -> bool:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return "position_ids" not in inspect.signature(apply_rotary_pos_emb).parameters


TRANSFORMERS5_ROWS: tuple[PatchPoint, ...] = (
    PatchPoint(
        target="transformers.modeling_utils:PreTrainedModel.from_pretrained",
        replacement="trainer.transformers5:load_pretrained",
        feature=_PRETRAINED,
        why="hands use_auth_token and load_in_8bit, which LLM Foundry passes, to the model",
        upstream="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/modeling_utils.py#L3902",
        takes={"token", "kwargs"},
        versions="transformers 5.24.0",
        asks=lambda *_args, **kwargs: "use_auth_token" in kwargs or "load_in_8bit" in kwargs,
        needed=_old_arguments_are_unknown,
    ),
    _row(
        target=f"{_PACKAGE}.utils.meta_init_context:init_on_device",
        replacement="trainer.transformers5:build_on_device",
        feature=_META,
        why="hands all attributes of a parameter to its class, also the marks of transformers",
        upstream=f"{_UPSTREAM}/utils/meta_init_context.py#L67",
        fingerprints={"3afc86da55cad32e"},
        asks=always,
        needed=lambda: importlib.util.find_spec("transformers.initialization") is not None,
    ),
    _row(
        target=f"{_PACKAGE}.mpt.configuration_mpt:MPTConfig.__init__",
        replacement="trainer.transformers5:build_mpt_config",
        feature=_MODEL,
        why="leaves token ids to a base class that no longer has them",
        upstream=f"{_UPSTREAM}/mpt/configuration_mpt.py#L28",
        takes={"d_model", "kwargs"},
        asks=always,
        needed=_token_ids_are_missing,
    ),
    _row(
        target=f"{_PACKAGE}.mpt.modeling_mpt:PartialLlamaConfig",
        replacement="trainer.transformers5:build_rope_config",
        feature=_MODEL,
        why="refuses keys that the rotary embedding of transformers 5 reads",
        upstream=f"{_UPSTREAM}/mpt/modeling_mpt.py#L115",
        fingerprints={"b288fdadf943faa3"},
        needed=_rotation_takes_no_positions,
    ),
    PatchPoint(
        target=f"{_PACKAGE}.layers.attention:apply_rotary_pos_emb",
        replacement="trainer.transformers5:rotate",
        feature=_MODEL,
        why="no longer takes the positions that LLM Foundry passes as None",
        upstream="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/llama/modeling_llama.py#L126",
        takes={"q", "k", "cos", "sin", "unsqueeze_dim"},
        versions="transformers 5.24.0",
        needed=_rotation_takes_no_positions,
    ),
    _row(
        target=f"{_MPT}.__init__",
        replacement="trainer.transformers5:build_mpt",
        feature=_MODEL,
        why="lists tied weights where save_pretrained and from_pretrained want a mapping",
        upstream=f"{_UPSTREAM}/mpt/modeling_mpt.py#L1132",
        fingerprints={"95d15e68e3a834e6"},
        needed=_ties_are_a_mapping,
    ),
    _row(
        target=f"{_MPT}.tie_weights",
        replacement="trainer.transformers5:tie_mpt",
        feature=_MODEL,
        why="takes none of the arguments with which from_pretrained calls it",
        upstream=f"{_UPSTREAM}/mpt/modeling_mpt.py#L1209",
        fingerprints={"f16e54e30160f714"},
        needed=_ties_are_a_mapping,
    ),
    _row(
        target=f"{_MPT}.__bases__",
        replacement="trainer.transformers5:add_generation",
        feature=_MODEL,
        why="has generate from PreTrainedModel, which no longer has it",
        upstream=f"{_UPSTREAM}/mpt/modeling_mpt.py#L401",
        fingerprints={"f00f549463532b66"},
        source=f"{_PACKAGE}.mpt.modeling_mpt:MPTPreTrainedModel",
        needed=_generation_is_a_mixin,
    ),
    _row(
        target=f"{_MPT}.prepare_inputs_for_generation",
        replacement="trainer.transformers5:prepare_mpt_inputs",
        feature=_MODEL,
        why="needs a mask, and knows keys and values by a name that is no longer passed",
        upstream=f"{_UPSTREAM}/mpt/modeling_mpt.py#L1367",
        fingerprints={"4b4fe5737a81512c"},
        needed=_generation_is_a_mixin,
    ),
)
