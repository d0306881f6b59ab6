"""Keys, names and arguments that nobody reads are refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from composer_fsdp2 import ConfigError
from tests.support.foundry import FSDP2, run_of, write_assets

ROOT = Path(__file__).parents[3]

pytest.importorskip("llmfoundry", reason="needs the extra foundry")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return run_of(folder, FSDP2, {"callbacks": {"lr_monitor": {}}, "loggers": None})


def check(cfg: dict[str, Any]) -> dict[str, Any]:
    from llmfoundry.utils.registry_utils import save_registry

    from composer_fsdp2.foundry.names import refuse_unknown
    from composer_fsdp2.foundry.registered import register, register_names

    error = None
    with save_registry():  # restores nothing when an error passes through it
        register()
        register_names()
        try:
            cfg = refuse_unknown(cfg)
        except ConfigError as failed:
            error = failed
    if error is not None:
        raise error
    return cfg


ADAMW = {"name": "decoupled_adamw", "lr": 1e-3}


def test_known_names_pass(good: dict[str, Any]):
    assert check(good) == good


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "mpt_causal_lmm"}}, "model.name: 'mpt_causal_lmm'.*'mpt_causal_lm'"),
        ({"optimizer": {"name": "muonn"}}, "optimizer.name: 'muonn'.*Did you mean 'muon'"),
        ({"scheduler": {"name": None}}, "scheduler.name: null is in no registry of schedulers"),
        ({"train_loader": {"name": "texts"}}, "train_loader.name: 'texts'.*'text'"),
        ({"callbacks": {"lr_monitr": {}}}, "callbacks.lr_monitr: .*'lr_monitor'"),
        ({"loggers": {"wandbb": {}}}, "loggers.wandbb: 'wandbb' is.*'wandb'"),
    ],
)
def test_an_unknown_name_is_refused(good: dict[str, Any], changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        check({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optimizer": {"name": "muon", "betas": [0.9, 0.95]}},
            r"optimizer: Muon has no argument 'betas'. Did you mean 'adamw_betas'\? Write one of",
        ),
        (
            {"scheduler": {"name": "cosine_with_warmup", "t_warmpu": "1ba"}},
            r"scheduler: \w+ has no argument 't_warmpu'. Did you mean 't_warmup'\?",
        ),
        (
            {"callbacks": {"speed_monitor": {"windowsize": 3}}},
            r"callbacks.speed_monitor: SpeedMonitor has no argument 'windowsize'. "
            r"Did you mean 'window_size'\?",
        ),
        ({"callbacks": {"scheduled_gc": {1: 2}}}, "ScheduledGarbageCollector has no argument 1"),
        (
            {"algorithms": {"gradient_clipping": {"threshold": 1}}},
            "GradientClipping has no argument 'threshold'.*'clipping_threshold'",
        ),
        ({"loggers": {"tensorboard": {"log_folder": "x"}}}, "no argument 'log_folder'.*'log_dir'"),
    ],
)
def test_an_unknown_argument_is_refused(good: dict[str, Any], changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        check({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"callbacks": {"nan_monitor": {"every": 3}}},
            "NaNMonitor has no argument 'every'.*Take it out",
        ),
        (
            {"callbacks": {"eval_output_logging": {"log_token": True}}},
            "EvalOutputLogging has no argument 'log_token'.*'log_tokens'",
        ),
        (
            {"train_loader": {"name": "finetuning", "dataset": {"splitt": "train"}}},
            "train_loader.dataset: finetuning has no argument 'splitt'.*'split'",
        ),
        (
            {"eval_loader": {"name": "text", "num_worker": 2}},
            "eval_loader: build_text_dataloader has no argument 'num_worker'.*'num_workers'",
        ),
        (
            {"eval_loaders": [{"name": "text", "label": "a", "dataset": {"shufle": True}}]},
            r"eval_loader\[0\].dataset: text has no argument 'shufle'.*were not there.*'shuffle'",
        ),
        (
            {"model": {"name": "mpt_causal_lm", "n_layer": 2}},
            "model: ComposerMPTCausalLM has no argument 'n_layer'.*as if it were not.*'n_layers'",
        ),
        (
            {"model": {"name": "mpt_causal_lm", "init_config": {"init_stdd": 1.0}}},
            "model.init_config: .* has no argument 'init_stdd'.*'init_std'",
        ),
        (
            {"model": {"name": "contrastive_lm", "d_modell": 2}},
            "model: ContrastiveModel has no argument 'd_modell'.*'d_model'",
        ),
        (
            {"model": {"name": "hf_causal_lm", "pretraned": True}},
            "model: ComposerHFCausalLM has no argument 'pretraned'.*'pretrained'",
        ),
    ],
)
def test_an_argument_that_would_be_left_out_is_refused(
    good: dict[str, Any], changes: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        check({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train_loader": {"name": "text", "dataset": {"local": "a", "num_workers": 4}}},
            "dataset: 'num_workers' is an argument of the loader.*as train_loader.num_workers",
        ),
        (
            {"eval_loaders": [{"name": "finetuning", "label": "a", "dataset": {"name": "b"}}]},
            r"dataset: 'name' is an argument of the loader.*as eval_loader\[0\].name",
        ),
        (
            {"optimizer": {**ADAMW, "param_groups": [{"param_str_match": "a", "weight_decy": 0}]}},
            r"param_groups\[0\]: DecoupledAdamW has no argument 'weight_decy'.*'weight_decay'",
        ),
        (
            {"optimizer": {**ADAMW, "param_groups": [{"param_str_match": "a", "lr": "1e-5"}]}},
            r"optimizer.param_groups\[0\].lr.*'1e-5'",
        ),
        (
            {"tokenizer": {"name": "a", "kwrags": {}}},
            "tokenizer: 'kwrags' is neither .* Did you mean 'kwargs'",
        ),
        (
            {"tokenizer": {"name": "a", "kwargs": {}, "model_max_length": 3}},
            "tokenizer: 'model_max_length' is neither 'name' nor 'kwargs'.*under tokenizer.kwargs",
        ),
    ],
    ids=["num_workers", "name", "group_key", "group_value", "kwrags", "model_max_length"],
)
def test_a_key_that_a_part_of_a_block_would_leave_out(
    good: dict[str, Any], changes: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        check({**good, **changes})


@pytest.mark.table("changes0", "changes2", "changes5", "changes9", "changes12", "changes13")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "optimizer": {
                "name": "decoupled_lionw",
                "lr": 1,
                "disable_grad": "a",
                "param_groups": [],
            }
        },
        {"optimizer": {"name": "adalr_lion", "lr": 1, "outlier_threshold": 2.0}},
        {
            "optimizer": {
                "name": "muon",
                "param_groups": [
                    {"param_str_match": "a", "algorithm": "muon", "blocks": None, "lr": 1e-3}
                ],
            }
        },
        {"loggers": {"wandb": {"project": "a", "init_kwargs": {"anything": 1}}}},
        {"callbacks": {"hf_checkpointer": {"save_folder": "a", "save_interval": "1ba"}}},
        {"callbacks": {"run_timeout": {"timeout": 3}, "curriculum_learning": {"schedule": []}}},
        {"callbacks": {"lr_monitor": None}, "scheduler": {"name": "constant_with_warmup"}},
        {"callbacks": {"generate_callback": {"prompts": [], "interval": "1ba", "top_k": 3}}},
        {
            "model": {
                "name": "mpt_causal_lm",
                "fuse_norm_attn_norm": True,
                "activation_checkpointing_target": "mptblock",
                "master_weights_dtype": "bf16",
                "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2},
                "init_config": {"name": "baseline_", "init_std": 0.02},
                "bos_token_id": 0,
                "output_hidden_states": True,
                "num_labels": 2,
            }
        },
        {"model": {"name": "hf_causal_lm", "config_overrides": {"anything": 1}}},
        {"model": {"name": "mpt_causal_lm", "attn_config": "torch"}, "eval_loaders": 3},
        {"model": {"name": "contrastive_lm", "pretrained_model_name_or_path": "a", "any": 1}},
        {
            "train_loader": {
                "name": "text",
                "dataset": {
                    "max_seq_len": 2,
                    "eos_token_id": 0,
                    "mlm_probability": 0.1,
                    "override_eos_token_id_mismatch_error": True,
                    "token_encoding_type": "int64",
                    "streams": {},
                    "cache_limit": "1gb",
                },
                "timeout": 1,
            }
        },
        {
            "eval_loaders": [
                {
                    "name": "finetuning",
                    "label": "a",
                    "dataset": {
                        "hf_name": "a",
                        "shuffle_seed": 3,
                        "safe_load": True,
                        "pad_to_longest": True,
                        "max_leftover_bins_to_keep": 1,
                        "target_prompts": "none",
                        "preprocessing_fn": None,
                    },
                }
            ]
        },
    ],
)
def test_arguments_of_every_kind_pass(good: dict[str, Any], changes: dict[str, Any]):
    cfg = {**good, **changes}
    assert check(cfg) == cfg


def tokenizer(good: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return {**good, "tokenizer": {**good["tokenizer"], "kwargs": kwargs}}


@pytest.mark.parametrize(("key", "meant"), [("padding_sied", "padding_side"), ("add_bos", "")])
def test_an_argument_that_a_tokenizer_does_not_read(good: dict[str, Any], key: str, meant: str):
    with pytest.raises(ConfigError, match=f"tokenizer.kwargs: .* no argument '{key}'.*{meant}"):
        check(tokenizer(good, **{key: "left"}))


def test_arguments_that_a_tokenizer_reads(good: dict[str, Any]):
    told = {"model_max_length": 3, "padding_side": "left", "use_fast": True, "revision": "a"}
    told |= {"trust_remote_code": False, "pad_token": "a", "add_prefix_space": True, "token": "a"}
    check(tokenizer(good, **told))
    unknown_class = {"name": "no/such/tokenizer", "kwargs": {"anything": 1}}
    check({**good, "tokenizer": unknown_class})


class OwnMPT:
    """Stands for nothing but its arguments."""

    def __init__(self, own: int = 1, **kwargs: Any) -> None:
        self.kept = {"own": own, **kwargs}


def test_a_part_that_keeps_its_arguments_may_take_any(good: dict[str, Any]):
    from llmfoundry.registry import models
    from llmfoundry.utils.registry_utils import save_registry

    with save_registry():
        models.register("own", func=OwnMPT)  # pyright: ignore[reportArgumentType]
        check({**good, "model": {"name": "own", "anything": 1}})


@pytest.mark.matrix
def test_every_run_of_the_repository_passes():
    from composer_fsdp2.foundry.names import unknown_parts

    runs = sorted((ROOT / "yamls").rglob("*.yaml"))
    found = [one for run in runs for one in unknown_parts(yaml.safe_load(run.read_text()))]
    assert runs
    # Files of code_paths register the others.
    assert [one for one in found if "in no registry" not in one] == []


def test_a_word_for_a_number_that_may_be_a_tensor_or_nothing():
    from composer_fsdp2.foundry.names import wrong_kinds

    def step(eps: float | torch.Tensor | None) -> None: ...

    (said,) = wrong_kinds("optimizer.", step, {"eps": "small"})
    assert said.startswith("optimizer.eps: 'small' is invalid. Expected a number")


def test_all_are_named_at_once(good: dict[str, Any]):
    wrong = {**good, "optimizer": {"name": "a"}, "model": {"name": "b"}}
    with pytest.raises(ConfigError, match=r"model.name: 'b'(.|\n)*optimizer.name: 'a'"):
        check(wrong)


def test_a_transform_that_comes_later_may_still_change_names(good: dict[str, Any]):
    from llmfoundry.registry import config_transforms
    from llmfoundry.utils.registry_utils import save_registry

    from composer_fsdp2.foundry.names import refuse_unknown
    from composer_fsdp2.foundry.registered import register_names

    wrong = {**good, "model": {"name": "b"}}
    with save_registry():
        register_names()
        with pytest.raises(ConfigError, match=r"model.name: 'b'"):
            refuse_unknown(wrong)
        config_transforms.register("own", func=dict)
        assert refuse_unknown(wrong) == wrong


# --- Top-level keys. ---


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("optimiser", "'optimiser' is not a key.*Did you mean 'optimizer'.*`variables`"),
        ("max_duratoin", "Did you mean 'max_duration'"),
        ("fsdp2", "parallelism_config: {fsdp2: ...}"),
        ("my_own", "'my_own' is not a key of LLM Foundry's training. It would stop the run."),
    ],
)
def test_a_misspelt_key_is_refused(good: dict[str, Any], key: str, said: str):
    with pytest.raises(ConfigError, match=said):
        check({**good, key: {}})


def test_variables_are_the_users(good: dict[str, Any]):
    check({**good, "variables": {"anything": 1}})


def test_keys_of_an_evaluation():
    from composer_fsdp2.foundry.names import check_eval_keys

    known = ("model", "tokenizer", "load_path", "model_name", "models", "parallelism_config")
    check_eval_keys(dict.fromkeys(known))
    with pytest.raises(ConfigError, match=r"evaluation. It would stop.*Did you mean 'precision'"):
        check_eval_keys({"precisio": "fp32"})
