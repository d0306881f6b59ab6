"""`composer-fsdp2 doctor RUN.yaml` finds what would make the run fail before its first batch."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from tests.support import foundry
from tests.support.foundry import FSDP2, merged, run_of
from tests.support.yaml_models import SHAPES

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

ROOT = Path(__file__).parents[3]
GONE = object()
"""in place of a value: the key is taken out"""
FSDP2_KEY = "parallelism_config.fsdp2"
GPUS = ("--ranks", "8", "--gpus-per-node", "8")
WITH_FSDP1 = {"parallelism_config": GONE, "fsdp_config": {"sharding_strategy": "FULL_SHARD"}}

# What is wrong -> (changes of a good run, words of the message).
MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "top-level key": ({"max_durations": "1ep"}, ("max_durations", "'max_duration'")),
    "top-level fsdp2": ({"fsdp2": {}}, ("'fsdp2'", "parallelism_config: {fsdp2")),
    "missing key": ({"max_duration": GONE}, ("'max_duration' is missing",)),
    "missing batch size": ({"global_train_batch_size": GONE}, ("global_train_batch_size",)),
    "missing microbatch": ({"device_train_microbatch_size": GONE}, ("device_train_microbatch",)),
    "missing block": ({"scheduler": GONE}, ("'scheduler' is missing",)),
    "block that is a word": ({"optimizer": "adam"}, ("optimizer: 'adam' is no mapping",)),
    "optimizer": ({"optimizer.name": "decoupled_adamv"}, ("optimizer.name", "decoupled_adamw")),
    "optimizer's key": ({"optimizer.lrr": 1e-3}, ("optimizer: TypeError", "lrr")),
    "optimizer's value": ({"optimizer.lr": -1.0}, ("optimizer: ValueError", "-1.0")),
    "optimizer without name": ({"optimizer.name": GONE}, ("optimizer.name: null",)),
    "scheduler": ({"scheduler.name": "constant"}, ("scheduler.name", "constant_with_warmup")),
    "scheduler's key": ({"scheduler.warmup": "1ba"}, ("scheduler: TypeError", "'warmup'")),
    "scheduler's time": ({"scheduler.t_warmup": "10xx"}, ("scheduler", "10xx")),
    "callback": ({"callbacks": {"speed_monitr": {}}}, ("callbacks", "'speed_monitor'")),
    "callback's key": (
        {"callbacks": {"speed_monitor": {"window": 3}}},
        ("callbacks.speed_monitor", "window"),
    ),
    "callback's interval": (
        {"callbacks": {"hf_checkpointer": {"save_folder": "x", "save_interval": "1xx"}}},
        ("callbacks.hf_checkpointer", "1xx"),
    ),
    "algorithm": ({"algorithms": {"gradient_cliping": {}}}, ("'gradient_clipping'",)),
    "algorithm's key": (
        {"algorithms": {"gradient_clipping": {"kind": "norm"}}},
        ("algorithms.gradient_clipping", "kind"),
    ),
    "logger": ({"loggers": {"wandbb": {}}}, ("loggers", "'wandb'")),
    "logger's key": (
        {"loggers": {"mlflow": {"experiment": "x"}}},
        ("loggers.mlflow", "experiment"),
    ),
    "loader": ({"train_loader.name": "texts"}, ("train_loader.name", "'text'")),
    "loader's key": ({"train_loader.workers": 1}, ("train_loader", "workers")),
    "no data": ({"train_loader.dataset.local": "no/where"}, ("train_loader", "no/where/train")),
    "no split": ({"train_loader.dataset.split": "trein"}, ("train_loader", "/trein")),
    "no streams": (
        {"train_loader.dataset.streams": {"a": {"local": "no/where"}}},
        ("streams.a.local", "no/where"),
    ),
    "value of a dataset": (
        {"train_loader.dataset.batching_method": "rnd"},
        ("train_loader", "rnd"),
    ),
    "evaluation data": (
        {"eval_loader": {"name": "text", "dataset": {"local": "no/eval", "split": "val"}}},
        ("eval_loader", "no/eval/val"),
    ),
    "several evaluation data": (
        {"eval_loader": [{"name": "tekst", "label": "a", "dataset": {}}]},
        ("eval_loader[0].name", "'text'"),
    ),
    "icl tasks": ({"icl_tasks": "no/tasks.yaml"}, ("icl_tasks", "no/tasks.yaml")),
    "model": ({"model.name": "mpt_causal_lmm"}, ("model.name", "'mpt_causal_lm'")),
    "model's value": ({"model.n_heads": 3}, ("model", "divisible")),
    "loss that is not installed": (
        {"model.loss_fn": "fused_crossentropy"},
        ("model", "Fused Cross Entropy is not installed"),
    ),
    "init_device": ({"model.init_device": "cuda"}, ("model.init_device", "'cuda'", "meta")),
    "a folder for a model": (
        {"model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "./no/model"}},
        ("pretrained_model_name_or_path", "./no/model"),
    ),
    "tokenizer": ({"tokenizer.name": "gtp2"}, ("tokenizer.name", "'gtp2'")),
    "tokenizer's folder": ({"tokenizer.name": "no/such/folder"}, ("tokenizer.name", "no folder")),
    "duration": ({"max_duration": "10xx"}, ("max_duration", "10xx")),
    "duration in seconds": ({"max_duration": "10sec"}, ("max_duration", "wall clock")),
    "interval of evaluation": ({"eval_interval": "1xx"}, ("eval_interval", "1xx")),
    "interval of saving": (
        {"save_folder": "runs", "save_interval": "1xx"},
        ("save_interval", "1xx"),
    ),
    "load_path": ({"load_path": "no/checkpoint"}, ("load_path", "no/checkpoint")),
    "save_folder": ({"save_folder": "README.md/x"}, ("save_folder", "README.md' is a file")),
    "resumption": ({"autoresume": True}, ("autoresume", "save_folder")),
    "microbatch": ({"device_train_microbatch_size": 0}, ("device_train_microbatch_size: 0",)),
    "microbatch in words": ({"device_train_microbatch_size": "many"}, ("many",)),
    "type of a key": ({"seed": "seven"}, ("seven", "seed")),
    "code": ({"code_paths": ["no/code.py"]}, ("code_paths", "no/code.py")),
    "interpolation": ({"seed": "${nowhere}"}, ("nowhere", "${")),
    "environment": ({"run_name": "${oc.env:HOME}"}, ("oc.env",)),
    "compile_config": ({"compile_config": {"bakend": "x"}}, ("compile_config", "bakend")),
    "precision": ({"precision": "bf16"}, ("precision", "bf16")),
    "batch size": ({"global_train_batch_size": 7}, ("7 cannot be divided",)),
    "classes": ({f"{FSDP2_KEY}.wrap_policy": {"classes": ["Blok"]}}, ("Blok",)),
    "names": ({f"{FSDP2_KEY}.wrap_policy": {"names": ["a.*"]}}, ("a.*",)),
    "ignored_params": ({f"{FSDP2_KEY}.ignored_params": ["no.*"]}, ("no.*",)),
    "forward_methods": ({f"{FSDP2_KEY}.forward_methods": ["model.nothing"]}, ("nothing",)),
    "keep_fp32": ({f"{FSDP2_KEY}.keep_fp32": ["no.*"]}, ("no.*",)),
    "cpu_offload": ({f"{FSDP2_KEY}.cpu_offload": True}, ("cpu_offload", "on the CPU")),
    "degrees": ({f"{FSDP2_KEY}.data_parallel_shard_degree": 3}, ("data_parallel_shard_degree 3",)),
    "weights": ({f"{FSDP2_KEY}.pretrained_weights": "no/where"}, ("no/where",)),
    "planner": ({f"{FSDP2_KEY}.load_planner": {"no_planner": {}}}, ("load_planner", "no_planner")),
    "tensor parallelism": (
        {"tp_config": {"strategy": "ffn", "tensor_parallel_degree": 2}},
        ("Tensor parallelism",),
    ),
    "without FSDP2: a name": ({**WITH_FSDP1, "optimizer.name": "sdg"}, ("optimizer.name",)),
    "without FSDP: a key": ({"parallelism_config": GONE, "optimizer.lrr": 1}, ("lrr",)),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    return folder


@pytest.fixture
def doctor(monkeypatch, tmp_path):
    """Runs `doctor` on settings; what it says as one line."""
    for name in ("RANK", "WORLD_SIZE", "FSDP_VERSION", "RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)

    def run(settings: dict[str, Any] | Path, *args: str) -> tuple[int, str]:
        path = settings
        if isinstance(settings, dict):
            path = tmp_path / "run.yaml"
            path.write_text(yaml.safe_dump(settings))
        result = CliRunner().invoke(main.app, ["doctor", str(path), *args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, " ".join(result.output.split())

    return run


def changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings with the changes in them, and without what is `GONE`."""
    given = merged(settings, {k: v for k, v in changes.items() if v is not GONE})
    for key in (key for key, value in changes.items() if value is GONE):
        *path, last = key.split(".")
        block = given
        for part in path:
            block = block[part]
        del block[last]
    return given


def good(assets: Path, loader: str = "finetuning") -> dict[str, Any]:
    """Streaming keeps shared memory for every `text` that was built until the process ends."""
    return run_of(assets, FSDP2, {"loggers": {}, "run_name": "test"}, loader=loader)


@pytest.mark.parametrize("kind", ["text", "finetuning"])
def test_a_good_run_passes(doctor, assets: Path, kind: str):
    settings = run_of(
        assets,
        FSDP2,
        {
            "loggers": {"in_memory_logger": {}},
            "callbacks": {"speed_monitor": {"window_size": 3}, "lr_monitor": {}},
            "algorithms": {
                "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}
            },
            "eval_loader": foundry.loader_of(assets, "val", kind),
            "save_folder": "runs/{run_name}/checkpoints",
            "load_path": str(assets),
        },
        loader=kind,
    )
    before = copy.deepcopy(settings), dict(os.environ)
    code, said = doctor(settings)
    assert code == 0, said
    assert "problem" not in said
    assert (settings, dict(os.environ)) == before


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_is_exit_code_1(doctor, assets: Path, wrong: str):
    changes, words = MISTAKES[wrong]
    loads = any(key.startswith(("train_loader", "scheduler.t")) for key in changes)
    code, said = doctor(changed(good(assets, "text" if loads else "finetuning"), changes))
    assert code == 1, said
    assert "problem: " in said
    for word in words:
        assert word in said
    assert "Traceback" not in said


def test_all_mistakes_are_said_at_once(doctor, assets: Path):
    changes = {"optimizer.name": "adm", "max_durations": 1, "callbacks": {"x": {}}, "seeds": 1}
    code, said = doctor(changed(good(assets), changes))
    assert code == 1
    for word in ("'adm'", "'max_durations'", "'x'", "'seeds'"):
        assert word in said


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_precision_for_gpus(doctor, assets: Path, precision: str):
    settings = changed(good(assets), {"precision": precision, "global_train_batch_size": 16})
    code, said = doctor(settings, *GPUS)
    assert code == 1
    assert f"'{precision}'" in said
    assert "amp_bf16" in said
    assert doctor({**settings, "precision": "amp_bf16"}, *GPUS)[0] == 0


# --- Runs of this repository. ---

RUNS = sorted((ROOT / "yamls").glob("*/*.yaml"))
PLACEHOLDERS = [path for path in RUNS if path.parent.name != "complete"]
COMPLETE = [path for path in RUNS if path.parent.name == "complete"]


@pytest.mark.parametrize("path", PLACEHOLDERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_run_to_start_from_wants_its_data_alone(doctor, assets: Path, path: Path):
    kind = "mds" if path.parent.name == "pretrain" else "finetuning"
    start = [f"variables.checkpoint={assets}"] if path.stem == "mpt-7b" else []
    code, said = doctor(path, *GPUS, *start)
    assert code == 1
    assert "/my-" in said or "'my-" in said
    if kind == "finetuning":
        start.append("eval_loader.dataset.split=val")
    code, said = doctor(path, *GPUS, *start, f"variables.data={assets}/{kind}")
    assert code == 0, said


@pytest.mark.parametrize("model", ["llama-3.2-1b", "olmoe-1b-7b"])
def test_a_large_model_is_planned_on_meta(doctor, assets: Path, tmp_path: Path, model: str):
    path = ROOT / "yamls" / "pretrain" / f"{model}.yaml"
    name = yaml.safe_load(path.read_text())["variables"]["model"]
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    given = [
        f"variables.data={assets}/mds",
        f"model.pretrained_model_name_or_path={tmp_path}",
        f"tokenizer.name={assets}/tokenizer",
    ]
    assert doctor(path, *GPUS, *given)[0] == 0
    wrong = f"{FSDP2_KEY}.wrap_policy.classes=[LlamaDecoderLayers]"
    code, said = doctor(path, *GPUS, *given, wrong)
    assert code == 1
    assert "LlamaDecoderLayers" in said


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_a_complete_run_passes(doctor, tmp_path: Path, path: Path):
    """Its data are written by its own transform, as in the run."""
    given = [f"variables.folder={tmp_path}"]
    if path.stem.startswith("mpt"):
        given.append("variables.text.megabytes=0.1")
    code, said = doctor(path, *given)
    assert code == 0, said
    assert "init_device: meta" not in said or path.stem != "distillation"


def test_a_pretrained_teacher_cannot_be_on_meta(doctor, tmp_path: Path):
    path = ROOT / "yamls" / "complete" / "distillation.yaml"
    code, said = doctor(path, f"variables.folder={tmp_path}", "model.init_device=meta")
    assert code == 1
    assert "pretrained=True is not supported" in said
