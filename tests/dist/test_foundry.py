"""LLM Foundry's training script under FSDP2, against the same run on one rank without sharding."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composer.models import ComposerModel
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.checkpoint.pickles import TRUST_VARIABLE
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.foundry.transform import parse_run_config, transform
from composer_fsdp2.patches import install_for_foundry, uninstall
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support.foundry import (
    FSDP2,
    MODEL,
    PRELOAD,
    Told,
    llama,
    loader_of,
    merged,
    plain_weights,
    run_of,
    tell,
    trained,
    write_assets,
)

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
__all__ = ["PRELOAD"]

TOLERANCE = 1e-6
"""relative for losses and for norms above one"""
README = (Path(__file__).parents[2] / "README.md").read_text()
FULL = {"parallelism_config": {"fsdp2": {"state_dict_type": "full"}}}
RECOMPUTED = {"parallelism_config": {"fsdp2": {"activation_checkpointing": True}}}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


def same(found: Told, expected: Told) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert found.metrics == pytest.approx(expected.metrics, rel=TOLERANCE)
    same_weights(found, expected)


def same_weights(found: Told, expected: Told) -> None:
    assert found.weights.keys() == expected.weights.keys()
    far = {k: (found.weights[k] - v).abs().max().item() for k, v in expected.weights.items()}
    assert max(far.values()) <= TOLERANCE, far


# --- What is trained on. ---


@pytest.mark.table("text")
@pytest.mark.parametrize("loader", ["text", "finetuning"])
def test_trains_as_without_sharding(loader: str, ranks, assets):
    (alone,) = ranks(1, tell, run_of(assets, loader=loader))
    run = run_of(assets, FSDP2, loader=loader)
    for found in (*ranks(1, tell, run), *ranks(2, tell, run)):
        assert found.sharded
        same(found, alone)


def test_on_one_rank_without_the_block_there_is_no_sharding(ranks, assets):
    (alone,) = ranks(1, tell, run_of(assets, {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}))
    assert not alone.sharded


def test_fsdp2_through_llm_foundrys_own_key(ranks, assets):
    for found in ranks(
        2, tell, run_of(assets, {"fsdp_config": {"version": 2}}, {"max_duration": "1ba"})
    ):
        assert found.sharded


@pytest.mark.matrix
def test_packing(ranks, assets):
    """Each rank packs what it is dealt, so the run to compare with has as many."""
    packing = {"train_loader.dataset.packing_ratio": 2.0}
    plain = ranks(2, tell, run_of(assets, packing, loader="finetuning"))
    found = ranks(2, tell, run_of(assets, FSDP2, packing, loader="finetuning"))
    assert not plain[0].sharded
    same(found[0], plain[0])


@pytest.mark.table
@pytest.mark.parametrize("on_tokens", [True, False])
def test_accumulation_on_tokens(on_tokens: bool, ranks, assets):
    """Without it, microbatches weigh the same: the unsharded run is cut as this one is."""
    weighting = {"accumulate_train_batch_on_tokens": on_tokens}
    plain, *_ = ranks(1 if on_tokens else 2, tell, run_of(assets, weighting, loader="finetuning"))
    found, _ = ranks(2, tell, run_of(assets, FSDP2, weighting, loader="finetuning"))
    assert not plain.sharded
    same(found, plain)


@pytest.mark.table
@pytest.mark.parametrize("model", ["mpt", "llama", "llama-tied"])
def test_the_loss_in_chunks(model: str, ranks, assets):
    """With the metrics of training, which read logits, and an evaluation."""
    kind = {} if model == "mpt" else llama(assets, model)
    evaluated = {"eval_interval": "2ba", "eval_loader": loader_of(assets, "val")}
    chunks = {"parallelism_config": {"fsdp2": {"chunked_loss": {"chunks": 3}}}}
    (alone,) = ranks(1, tell, run_of(assets, kind, evaluated))
    found, _ = ranks(2, tell, run_of(assets, kind, evaluated, chunks))
    same(found, alone)
    for name in ("LanguageCrossEntropy", "LanguagePerplexity", "TokenAccuracy"):
        reported = alone.logged[f"metrics/train/{name}"]
        assert found.logged[f"metrics/train/{name}"] == pytest.approx(reported, rel=TOLERANCE)


# --- How long. ---


@pytest.mark.table
@pytest.mark.parametrize("duration", ["1ep", "3ba", "24sp", "400tok", "2iter"])
def test_every_unit_of_duration(duration: str, ranks, assets):
    unit = duration.lstrip("0123456789")
    change = {"max_duration": duration, "scheduler.t_warmup": f"0{unit}"}
    if unit == "iter":
        change["callbacks"] = {"iterations": {"length": "300tok"}}
    (alone,) = ranks(1, tell, run_of(assets, change))
    found, other = ranks(2, tell, run_of(assets, FSDP2, change))
    assert found.batches == other.batches == alone.batches > 2
    same(found, alone)


# --- Evaluation. ---


def icl(assets: Path, kind: str = "language_modeling") -> dict[str, Any]:
    task = {
        "label": "questions",
        "dataset_uri": f"{assets}/questions.jsonl",
        "num_fewshot": [1],
        "icl_task_type": kind,
    }
    return {"icl_tasks": [task]}


def tell_in(folder: Path, cfg: dict[str, Any]) -> Told:
    """LLM Foundry copies the questions into the current folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return tell(cfg)
    finally:
        os.chdir(before)


@pytest.mark.matrix
def test_evaluation_is_that_of_the_unsharded_run(ranks, assets, tmp_path):
    both = {
        "eval_loader": loader_of(assets, "val"),
        "eval_interval": "2ba",
        "eval_first": True,
        **icl(assets),
    }
    (alone,) = ranks(1, tell_in, tmp_path, run_of(assets, both))
    found, other = ranks(2, tell_in, tmp_path, run_of(assets, FSDP2, both))
    assert any("questions" in name for name in alone.metrics)
    assert any("LanguageCrossEntropy" in name for name in alone.metrics)
    same(found, alone)
    same(other, alone)


# --- Where weights come from. ---


@pytest.mark.table
@pytest.mark.parametrize(
    ("model", "devices"), [("mpt", ["cpu", "mixed", "meta"]), ("llama-tied", ["mixed", "meta"])]
)
def test_every_init_device_loads_an_unsharded_checkpoint(
    model: str, devices: list[str], ranks, assets, tmp_path
):
    kind = {} if model == "mpt" else llama(assets, model, pretrained=False)
    saving = {"save_folder": f"{tmp_path}/saved", "save_interval": "2ba"}
    (alone,) = ranks(1, tell, run_of(assets, kind, saving))
    loading = {"load_path": f"{tmp_path}/saved/ep0-ba2-rank0.pt"}
    for device in devices:
        run = run_of(assets, FULL, kind, loading, {"model.init_device": device})
        found, _ = ranks(2, tell, run)
        assert found.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE), device
        same_weights(found, alone)


@pytest.mark.table("1-mixed")
@pytest.mark.parametrize(("world_size", "device"), [(1, "mixed"), (2, "meta")])
def test_pretrained_weights_of_a_folder(world_size: int, device: str, ranks, assets):
    (alone,) = ranks(1, tell, run_of(assets, llama(assets, "llama-tied")))
    run = run_of(assets, FSDP2, llama(assets, "llama-tied", init_device=device))
    found, *_ = ranks(world_size, tell, run)
    same(found, alone)


@pytest.mark.table
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_autoresume_goes_on_with_the_raw_text(kind: str, ranks, assets, tmp_path):
    """Tokenizing changes the tokenizer, which a checkpoint holds too."""
    saving = {
        "parallelism_config": {"fsdp2": {"state_dict_type": kind}},
        "save_folder": f"{tmp_path}/saved",
        "save_interval": "2ba",
        "autoresume": True,
    }
    (alone,) = ranks(1, tell, run_of(assets))
    ranks(2, tell, run_of(assets, saving, {"max_duration": "2ba"}))
    assert (
        tmp_path / "saved" / ("latest-rank0.pt" if kind == "full" else "latest-sharded-rank0")
    ).exists()
    found, _ = ranks(2, tell, run_of(assets, saving))
    assert found.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
    same_weights(found, alone)


COMPLETE = Path(__file__).parents[2] / "yamls" / "complete" / "mpt-pretrain-mds.yaml"


def interrupted(cfg: dict[str, Any]) -> None:
    """Ends with an error in the sixth batch, on every rank."""
    with pytest.raises(InterruptedError):
        trained(cfg)


@pytest.mark.matrix
def test_a_complete_run_that_is_interrupted_ends_as_one_that_is_not(ranks, assets, tmp_path):
    """The whole of a file of `yamls/complete` but for its data and what it exports."""
    run = yaml.safe_load(COMPLETE.read_text())
    del run["code_paths"], run["callbacks"]
    data = {"variables.data": f"{assets}/mds", "tokenizer.name": f"{assets}/tokenizer"}
    sizes = {"max_seq_len": 24, "variables.text.vocab_size": 300, "max_duration": "8ba"}
    changes = {"eval_interval": "4ba", "save_interval": "4ba", "loggers": {"told": {}}}
    told = []
    for folder in ("undisturbed", "disturbed"):
        changes["variables.folder"] = f"{tmp_path}/{folder}"
        whole = merged(run, data, sizes, changes)
        if folder == "disturbed":
            ranks(2, interrupted, merged(whole, {"callbacks": {"interruption": {"batch": 6}}}))
        told.append(ranks(2, tell, whole)[0])
    undisturbed, disturbed = told
    assert disturbed.losses == undisturbed.losses[4:]
    assert disturbed.metrics == undisturbed.metrics
    assert disturbed.weights.keys() == undisturbed.weights.keys()
    for name, weight in undisturbed.weights.items():
        assert torch.equal(disturbed.weights[name], weight), name


# --- Optimizers. ---


@pytest.mark.table("adalr_lion")
@pytest.mark.parametrize("name", ["clip_lion", "adalr_lion", "decoupled_lionw"])
def test_lion_and_what_it_reports(name: str, ranks, assets):
    change = {
        # The gradient of a key's bias is 0 but for rounding, of which Lion takes the sign.
        "model.no_bias": True,
        "optimizer": {"name": name, "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "callbacks": {"optimizer_monitor": {"batch_log_interval": 1}},
    }
    (alone,) = ranks(1, tell, run_of(assets, change))
    found, _ = ranks(2, tell, run_of(assets, FSDP2, change))
    same(found, alone)
    kinds = ("l2_norm", "layerwise_lr", "clipped_batches")
    reported = {k: v for k, v in alone.logged.items() if k.startswith(kinds)}
    assert {k.rpartition("/")[0] for k in reported} >= {"l2_norm/moment", "l2_norm/update"}
    close = pytest.approx(reported, rel=TOLERANCE, abs=TOLERANCE)
    assert {k: found.logged[k] for k in reported} == close


def adaptive(name: str) -> dict[str, Any]:
    return {
        "model.no_bias": True,
        "optimizer": {"name": name, "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "callbacks": {"optimizer_monitor": {"batch_log_interval": 1}, "seasoning": {}},
    }


def outliers(told: Told) -> dict[str, float]:
    """What came of them, of which there have been some."""
    kinds = ("layerwise_lr", "clipped_batches")
    found = {name: value for name, value in told.logged.items() if name.startswith(kinds)}
    assert {*found.values()} - {0.0, 1e-3}
    return found


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "kind"), [("clip_lion", "sharded"), ("adalr_lion", "sharded"), ("adalr_lion", "full")]
)
def test_a_lion_resumes_with_what_it_knows_of_outliers(
    name: str, kind: str, ranks, assets, tmp_path
):
    change = adaptive(name)
    saving = {
        "parallelism_config": {"fsdp2": {"state_dict_type": kind}},
        "save_folder": f"{tmp_path}/saved",
        "save_interval": "2ba",
        "autoresume": True,
    }
    (alone,) = ranks(1, tell, run_of(assets, FSDP2, change))
    ranks(2, tell, run_of(assets, saving, change, {"max_duration": "2ba"}))
    found, _ = ranks(2, tell, run_of(assets, saving, change))
    assert found.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
    same_weights(found, alone)
    assert outliers(found) == outliers(alone)


def tell_uninstalled(cfg: dict[str, Any]) -> Told:
    uninstall()
    return tell(cfg)


def tell_trusting(path: str, cfg: dict[str, Any]) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUST_VARIABLE, path)
        return tell(cfg)


def test_a_lion_resumes_from_a_checkpoint_with_its_objects(ranks, assets, tmp_path):
    change, saving = adaptive("adalr_lion"), {"save_folder": f"{tmp_path}", "save_interval": "2ba"}
    (alone,) = ranks(1, tell_uninstalled, run_of(assets, change, saving))
    loading = {"load_path": f"{tmp_path}/ep0-ba2-rank0.pt"}
    run = run_of(assets, FULL, change, loading)
    for message in ranks(2, refusal, run):
        assert "OutlierDetector', which is not data" in message
    found, _ = ranks(2, tell_trusting, loading["load_path"], run)
    assert found.losses == pytest.approx(alone.losses[2:], rel=TOLERANCE)
    same_weights(found, alone)
    assert outliers(found) == outliers(alone)


# --- Callbacks of LLM Foundry. ---


@pytest.mark.table("True")
@pytest.mark.parametrize("keep", [True, False])
def test_a_monolithic_checkpoint_is_that_of_an_unsharded_run(keep: bool, ranks, assets, tmp_path):
    saver = {"save_folder": f"{tmp_path}/whole", "batch_interval": 2, "keep_optimizers": keep}
    run = run_of(assets, FSDP2, {"callbacks": {"mono_checkpoint_saver": saver}})
    found, _ = ranks(2, tell, run)
    last = torch.load(tmp_path / "whole" / "ep0-ba4.pt", weights_only=False)
    assert ("optimizers" in last["state"]) == keep
    for name, weight in found.weights.items():
        assert torch.equal(last["state"]["model"][name], weight), name
    loading = {"load_path": f"{tmp_path}/whole/ep0-ba2.pt", "load_weights_only": not keep}
    (alone,) = ranks(1, tell, run_of(assets, loading))
    if keep:
        assert alone.losses == pytest.approx(found.losses[2:], rel=TOLERANCE)
        same_weights(alone, found)


def test_an_unwritable_monolithic_checkpoint_is_an_error_on_every_rank(ranks, assets, tmp_path):
    (tmp_path / "file").touch()
    saver = {"save_folder": f"{tmp_path}/file/inside", "batch_interval": 2}
    run = run_of(assets, FSDP2, {"callbacks": {"mono_checkpoint_saver": saver}})
    for message in ranks(2, refusal, run):
        assert "ep0-ba2.pt' could not be written" in message


def refusal(cfg: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, CheckpointError, ValueError)) as caught:
        trained(cfg)
    return str(caught.value)


@pytest.mark.matrix
def test_frozen_layers_have_plain_names_under_activation_checkpointing(ranks, assets):
    names = [f"model.transformer.blocks.{n}.ffn.up_proj.weight" for n in (0, 2)]
    freezing = {"callbacks": {"layer_freezing": {"layer_names": names}}}
    (alone,) = ranks(1, tell, run_of(assets, freezing))
    found, _ = ranks(2, tell, run_of(assets, RECOMPUTED, freezing))
    same(found, alone)


def test_a_layer_that_is_not_there_is_still_an_error(ranks, assets):
    freezing = {"callbacks": {"layer_freezing": {"layer_names": ["model.nothing"]}}}
    for message in ranks(2, layer_error, run_of(assets, RECOMPUTED, freezing)):
        assert "layer not found in model: model.nothing" in message


def layer_error(cfg: dict[str, Any]) -> str:
    with pytest.raises(Exception, match="freeze") as caught:
        trained(cfg)
    return str(caught.value)


def tables(folder: Path) -> dict[str, list[list[float]]]:
    """What LLM Foundry wrote to MLflow of each metric: a row for every batch."""
    files = folder.glob("*/*/artifacts/metrics/train/LossPerpVLenTable/*.json")
    return {file.stem: json.loads(file.read_text())["data"] for file in files}


@pytest.mark.matrix
def test_loss_by_length_of_context(ranks, assets, tmp_path):
    logging = {"synchronous": True, "log_system_metrics": False, "experiment_name": "losses"}
    change = {
        "callbacks": {"loss_perp_v_len": {"log_batch_interval": 1, "compute_batch_interval": 1}}
    }
    found = []
    for number, block in ((1, {}), (2, FSDP2)):
        folder = tmp_path / str(number)
        change["loggers"] = {"told": {}, "mlflow": {**logging, "tracking_uri": str(folder)}}
        ranks(number, tell, run_of(assets, block, change))
        found.append(tables(folder))
    alone, sharded = found
    assert len(alone["mean_loss_v_len"]) == 4
    assert len(alone["mean_loss_v_len"][0]) == 25
    assert sharded.keys() == alone.keys()
    for name, rows in alone.items():
        for row, expected in zip(sharded[name], rows, strict=True):
            assert row == pytest.approx(expected, rel=TOLERANCE), name


@pytest.mark.matrix
def test_the_learning_rate_is_scaled_on_resumption(ranks, assets, tmp_path):
    saving = {"save_folder": f"{tmp_path}/saved", "save_interval": "2ba"}
    ranks(1, tell, run_of(assets, saving, {"max_duration": "2ba"}))
    scaling = {
        "callbacks": {"global_lr_scaling": {"lr_scale": 0.5, "wd_pct": 0.1}},
        "load_path": f"{tmp_path}/saved/ep0-ba2-rank0.pt",
    }
    (alone,) = ranks(1, tell, run_of(assets, scaling))
    found, _ = ranks(2, tell, run_of(assets, FULL, scaling))
    same(found, alone)


CALLBACKS = {
    "async_eval": "test_asynchronous_evaluation_is_told_of_fsdp2",
    "curriculum_learning": "test_resumes_in_the_middle_of_a_curriculum",
    "dataset_swap": "test_callbacks_that_change_nothing",
    "env_logging": "test_callbacks_that_change_nothing",
    "eval_output_logging": "test_callbacks_that_change_nothing",
    "fdiff_metrics": "test_callbacks_that_change_nothing",
    "global_lr_scaling": "test_the_learning_rate_is_scaled_on_resumption",
    "hf_checkpointer": "test_export",
    "kill_loss_spike": "test_callbacks_that_change_nothing",
    "layer_freezing": "test_frozen_layers_have_plain_names_under_activation_checkpointing",
    "loss_perp_v_len": "test_loss_by_length_of_context",
    "mbmoe_tok_per_expert": "",
    "mono_checkpoint_saver": "test_a_monolithic_checkpoint_is_that_of_an_unsharded_run",
    "run_timeout": "test_callbacks_that_change_nothing",
    "scheduled_gc": "test_callbacks_that_change_nothing",
}
"""LLM Foundry's own, and the tests that run them; one needs megablocks."""


def registered() -> set[str]:
    from llmfoundry import registry

    found = {**registry.callbacks.get_all(), **registry.callbacks_with_config.get_all()}
    return {name for name, item in found.items() if item.__module__.startswith("llmfoundry.")}


def test_every_callback_of_llm_foundry_is_listed(ranks):
    (found,) = ranks(1, registered)
    assert found == CALLBACKS.keys()
    assert all(name in globals() for name in CALLBACKS.values() if name)


@pytest.mark.matrix
def test_callbacks_that_change_nothing(ranks, assets, tmp_path):
    change = {
        "callbacks": {
            "dataset_swap": {"dataset_index": 0},
            "env_logging": {"log_git": False, "log_nvidia": False},
            "eval_output_logging": {},
            "fdiff_metrics": {"diff_train_metrics": True},
            "kill_loss_spike": {"log_only": True},
            "run_timeout": {"timeout": 100_000},
            "scheduled_gc": {"batch_interval": 2},
        },
        "eval_loader": loader_of(assets, "val"),
        "eval_interval": "2ba",
        **icl(assets),
    }
    (alone,) = ranks(1, tell_in, tmp_path, run_of(assets, change))
    found, _ = ranks(2, tell_in, tmp_path, run_of(assets, FSDP2, change))
    same(found, alone)
    assert "loss/train/total_fdiff" in found.logged


# --- Export. ---


def exported(cfg: dict[str, Any], folder: Path) -> None:
    """Trains, reads the export and compares to the bit. Collective: yes."""
    from transformers import AutoModelForCausalLM

    model = trained(cfg).state.model
    expected = plain_weights(model)
    attention = model.model.config._attn_implementation
    read = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype="auto", attn_implementation=attention
    )
    found = read.state_dict()
    dtype = getattr(torch, cfg["callbacks"]["hf_checkpointer"]["precision"])
    assert {f"model.{name}" for name in found} == set(expected)
    for name, weight in found.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, expected[f"model.{name}"].to(dtype)), name
    assert read.config.tie_word_embeddings == (
        read.lm_head.weight is read.model.embed_tokens.weight
    )
    if dtype == torch.float32:
        ids = torch.arange(20).reshape(2, 10)
        with torch.no_grad():
            same_logits = torch.equal(read(input_ids=ids).logits, model.eval().model(ids).logits)
        assert same_logits


@pytest.mark.table
@pytest.mark.parametrize(
    ("model", "fsdp2", "precision"),
    [("llama-tied", RECOMPUTED, "float32"), ("llama", FSDP2, "bfloat16")],
)
def test_export(model: str, fsdp2: dict[str, Any], precision: str, ranks, assets, tmp_path):
    export = {"save_folder": str(tmp_path), "save_interval": "1dur", "precision": precision}
    run = run_of(
        assets,
        fsdp2,
        llama(assets, model, init_device="meta"),
        {"max_duration": "2ba", "callbacks": {"hf_checkpointer": export}},
    )
    ranks(2, exported, run, tmp_path / "huggingface" / "ba2")


# --- Activation checkpointing by LLM Foundry's grammar. ---

BLOCKS = "model.transformer.blocks"
TARGETS: dict[str, tuple[Any, dict[str, list[int]]]] = {
    "nothing": (None, {"": [0, 1, 2, 3, 4]}),
    "a list": (["grouped_query_attention"], {".attn": [0, 1, 2, 3, 4]}),
    "a number": ({"mptblock": 2}, {"": [0, 1]}),
    "first and last": ({"mptblock": "first-1, last-1"}, {"": [0, 4]}),
    "middle": ({"mptblock": "middle-3"}, {"": [1, 2, 3]}),
    "range": ({"mptblock": "range-1-3"}, {"": [1, 2]}),
    "ids": ({"mptblock": [1, 4]}, {"": [1, 4]}),
    "mixed": ({"mptblock": [0, "last-2"]}, {"": [0, 3, 4]}),
    "two kinds": (
        {"mptblock": "first-2", "grouped_query_attention": "last-3"},
        {"": [0, 1], ".attn": [2, 3, 4]},
    ),
}


CLASSES = {"mptblock": "MPTBlock", "grouped_query_attention": "MultiheadAttention"}


def mpt(target: Any, layers: int = 5) -> ComposerModel:
    from llmfoundry import registry

    settings = {key: value for key, value in MODEL.items() if key != "name"}
    settings |= {"n_layers": layers, "activation_checkpointing_target": target}
    torch.manual_seed(0)
    return registry.models.get(MODEL["name"])(tokenizer=None, **settings)


def recomputed(model: torch.nn.Module) -> set[str]:
    """Plain names of the modules that are computed again in backward."""
    names = [name for name, m in model.named_modules() if isinstance(m, CheckpointWrapper)]
    return {name.replace("_checkpoint_wrapped_module.", "") for name in names}


def compare_targets() -> None:
    """With the rule of Composer's FSDP1: what the function of the direct child says."""
    for name, (target, expected) in TARGETS.items():
        old, new = mpt(target), mpt(target)
        child: Any = old.model
        apply_activation_checkpointing(old, check_fn=child.activation_checkpointing_fn)
        prepare_fully_shard(new, None, {"activation_checkpointing": True})
        assert recomputed(new) == recomputed(old), name
        written = {f"{BLOCKS}.{n}{part}" for part, ids in expected.items() for n in ids}
        assert recomputed(new) == written, name
        for kind, blocks in target.items() if isinstance(target, dict) else ():
            anywhere = mpt(None)
            spec = {"classes": [CLASSES[kind]], "target": blocks}
            prepare_fully_shard(anywhere, None, {"activation_checkpointing": spec})
            attention = kind == "grouped_query_attention"
            assert recomputed(anywhere) == {n for n in written if n.endswith(".attn") == attention}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_every_form_of_a_target_means_what_it_did(ranks):
    ranks(1, compare_targets)


def overlap() -> str:
    target = {"mptblock": "first-2", "grouped_query_attention": [1]}
    with pytest.raises(ValueError, match="assigned to both") as caught:
        prepare_fully_shard(mpt(target), None, {"activation_checkpointing": True})
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_overlapping_targets_are_an_error_on_every_rank(ranks):
    assert all("Block 1 is assigned to both" in message for message in ranks(2, overlap))


# --- LLM Foundry's evaluation script. ---


def evaluated(cfg: dict[str, Any], folder: Path) -> tuple[bool, dict[str, float]]:
    """Whether the model was sharded, and its metrics, as `llmfoundry eval` has them.

    The configuration names in `code_paths` what calls `install()`, if anything does.

    Collective: yes.
    """
    from llmfoundry import registry
    from llmfoundry.command_utils import eval_from_yaml

    # Found by entry point where this package is installed.
    registry.config_transforms.register("composer_fsdp2", func=transform)
    file = folder / f"evaluation{dist.get_rank()}.yaml"
    file.write_text(yaml.safe_dump(cfg))
    uninstall()  # a user's process has nothing installed yet, but for transformers 5
    install_for_foundry()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (trainer,), _ = eval_from_yaml(str(file), None)
    finally:
        os.chdir(before)
    metrics = {
        f"{loader}/{name}": float(metric.compute())
        for loader, found in trainer.state.eval_metrics.items()
        for name, metric in found.items()
    }
    # Its last forward leaves some units gathered.
    return any(isinstance(p, DTensor) for p in trainer.state.model.parameters()), metrics


@pytest.fixture
def evaluation(assets, tmp_path) -> dict[str, Any]:
    """Settings of an evaluation, with the file that the README says to write."""
    (call,) = re.findall(r"`(composer_fsdp2.install\(\))` in a file of `code_paths`", README)
    (tmp_path / "fsdp2.py").write_text(f"import composer_fsdp2\n\n{call}\n")
    settings = run_of(assets, FSDP2, {"eval_loader": loader_of(assets, "val"), **icl(assets)})
    shared = ("tokenizer", "max_seq_len", "device_eval_batch_size", "precision", "dist_timeout")
    shared += ("python_log_level", "eval_loader", "icl_tasks", "parallelism_config")
    return {
        "model": MODEL,
        "model_name": "test",
        "code_paths": ["fsdp2.py"],
        **{key: settings[key] for key in shared},
    }


@pytest.mark.matrix
def test_evaluation_of_a_checkpoint(ranks, assets, tmp_path, evaluation):
    saving = {"save_folder": f"{tmp_path}/saved", "save_interval": "2ba", "max_duration": "2ba"}
    questions = {key: evaluation[key] for key in ("eval_loader", "icl_tasks")}
    run = run_of(assets, FSDP2, saving, questions, {"eval_interval": "2ba"})
    trained_on, _ = ranks(2, tell_in, tmp_path, run)
    evaluation["load_path"] = f"{tmp_path}/saved/ep0-ba2"
    for sharded, metrics in ranks(2, evaluated, evaluation, tmp_path):
        assert sharded
        assert metrics == pytest.approx(trained_on.metrics, rel=TOLERANCE)


def test_evaluation_of_a_folder_is_that_without_sharding(ranks, assets, tmp_path, evaluation):
    evaluation |= llama(assets, "llama-tied", init_device="mixed")
    ours = ("parallelism_config", "code_paths")
    alone = {k: v for k, v in evaluation.items() if k not in ours}
    ((sharded, expected),) = ranks(1, evaluated, alone | llama(assets, "llama-tied"), tmp_path)
    assert not sharded
    for sharded, metrics in ranks(2, evaluated, evaluation, tmp_path):
        assert sharded
        assert metrics == pytest.approx(expected, rel=TOLERANCE)


def refused_evaluation(cfg: dict[str, Any], folder: Path) -> str:
    with pytest.raises(ValueError, match="Unused parameters") as caught:
        evaluated(cfg, folder)
    return str(caught.value)


def test_an_evaluation_that_installs_nothing_is_refused(ranks, assets, tmp_path, evaluation):
    """Installing the package alone changes nothing in a process that imports torch."""
    evaluation |= llama(assets, "llama-tied", init_device="mixed")
    del evaluation["code_paths"]
    (said,) = re.findall(r"`(Unused parameters .*?)`", README, re.DOTALL)
    for message in ranks(2, refused_evaluation, evaluation, tmp_path):
        assert message.startswith(" ".join(said.split()))


def asynchronous(cfg: dict[str, Any]) -> Any:
    from llmfoundry.callbacks.async_eval_callback import get_eval_parameters

    logged = parse_run_config({**cfg, "icl_tasks": "tasks.yaml"})
    copied = get_eval_parameters(logged, "checkpoint", "run-name")
    return parse_parallelism_config({"fsdp": copied["fsdp_config"]})


def test_asynchronous_evaluation_is_told_of_fsdp2(ranks, assets):
    (parsed,) = ranks(1, asynchronous, run_of(assets, RECOMPUTED))
    assert parsed.fsdp is None
    assert parsed.fsdp2.activation_checkpointing is True


# --- What checkpoints hold besides tensors. ---


def curriculum(assets: Path) -> dict[str, Any]:
    """Two batches of the training text, then two of the other."""
    second = {"local": f"{assets}/mds", "split": "val", "max_seq_len": 24, "shuffle": False}
    schedule = [{"duration": "384tok", "dataset": second}]
    return {
        "max_duration": "768tok",
        "scheduler.t_warmup": "0tok",
        "callbacks": {"curriculum_learning": {"duration": "384tok", "schedule": schedule}},
    }


@pytest.mark.matrix
def test_resumes_in_the_middle_of_a_curriculum(ranks, assets, tmp_path):
    """Composer goes on with the first data there, with sharding or without."""
    change = curriculum(assets)
    saving = {"save_folder": f"{tmp_path}/saved", "save_interval": "3ba"}
    loading = {"load_path": f"{tmp_path}/saved/ep0-ba3-rank0.pt"}
    (alone,) = ranks(1, tell, run_of(assets, change, saving))
    (resumed,) = ranks(1, tell, run_of(assets, change, loading))
    saving["save_folder"] = f"{tmp_path}/sharded"
    found, _ = ranks(2, tell, run_of(assets, FSDP2, change, saving))
    same(found, alone)
    loading["load_path"] = f"{tmp_path}/sharded/ep0-ba3"
    found, _ = ranks(2, tell, run_of(assets, FSDP2, change, loading))
    same(found, resumed)
