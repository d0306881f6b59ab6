"""`composer-fsdp2 doctor RUN.yaml` finds what would make the run fail before its first batch."""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.foundry.model_configs import CONFIGS
from composer_fsdp2.patches import install_for_foundry
from tests.support import foundry
from tests.support.foundry import FSDP2, run_of
from tests.support.run_mistakes import GONE, MISTAKES, changed, good, mistaken

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

ROOT = Path(__file__).parents[3]
TWO_PROBLEMS = ("without FSDP2: a name",)
DATASET = {"split": "train", "max_seq_len": foundry.LENGTH, "decoder_only_format": True}
FSDP2_KEY = "parallelism_config.fsdp2"
GPUS = ("--ranks", "8", "--gpus-per-node", "8")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    _write_checkpoint(folder / "checkpoint.pt")
    return folder


def _write_checkpoint(file: Path) -> None:
    from llmfoundry.models.mpt import ComposerMPTCausalLM

    install_for_foundry()

    block = {key: value for key, value in foundry.MODEL.items() if key != "name"}
    state = {
        "model": ComposerMPTCausalLM(tokenizer=None, **block).state_dict(),
        "optimizers": {"DecoupledAdamW": {"param_groups": []}},
        "timestamp": {"Timestamp": {"batch": 4}},
    }
    torch.save({"state": state, "rng": []}, file)


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


@pytest.mark.table("finetuning")
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
            "load_path": f"{assets}/checkpoint.pt",
        },
        loader=kind,
    )
    before = copy.deepcopy(settings), dict(os.environ)
    code, said = doctor(settings)
    assert code == 0, said
    assert "problem" not in said
    assert (settings, dict(os.environ)) == before


def test_a_run_that_begins_anew_over_checkpoints(doctor, assets: Path, tmp_path: Path):
    (tmp_path / "old" / "ep0-ba10").mkdir(parents=True)
    settings = run_of(assets, FSDP2, {"loggers": {}, "run_name": "old"}, loader="text")
    settings["save_folder"] = str(tmp_path / "{run_name}")
    code, said = doctor(settings)
    assert code == 1, said
    assert len(re.findall(r"(?<!\d )problem: ", said)) == 1
    assert f"problem: '{tmp_path}/old' has a checkpoint of a later time" in said
    assert "Write autoresume: true" in said
    load = f"load_path={assets}/checkpoint.pt"
    ways = ("autoresume=true", "save_overwrite=true", load, "run_name=new")
    for way in (*ways, "parallelism_config.fsdp2.sharded_ckpt_prefix_dir=step{batch}"):
        code, said = doctor(settings, way)
        assert code == 0, said


def test_a_run_that_resumes_by_itself_needs_its_load_path_no_more(
    doctor, assets: Path, tmp_path: Path
):
    settings = run_of(assets, FSDP2, {"loggers": {}, "run_name": "r"}, loader="text")
    settings |= {"save_folder": str(tmp_path / "{run_name}"), "autoresume": True}
    settings["load_path"] = str(tmp_path / "gone")
    code, said = doctor(settings)
    assert code == 1
    assert "load_path: There is no checkpoint at" in said
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "latest-sharded-rank0").symlink_to(f"{assets}/checkpoint.pt")
    code, said = doctor(settings)
    assert code == 0, said


def test_an_interpolation_that_the_train_script_switches_off(doctor, assets: Path):
    settings = run_of(assets, FSDP2, {"loggers": {}}, loader="text")
    settings["run_name"] = "${oc.env:HOME,r}"
    code, said = doctor(settings)
    assert code == 1
    assert "run_name is ${oc.env:HOME,r}, and LLM Foundry's train script switches oc.env" in said
    code, said = doctor(settings, "run_name=r")
    assert code == 0, said


def test_ranks_that_read_one_batch_pass(doctor, assets: Path):
    """One process cannot divide by them what it reads."""
    settings = run_of(assets, FSDP2, {"loggers": {}}, loader="text")
    code, said = doctor(settings, f"{FSDP2_KEY}.tensor_parallel.degree=2", "--ranks", "2")
    assert code == 0, said
    assert "problem" not in said


@pytest.mark.table(
    "block that is a word",
    "no streams",
    "dataset's key",
    "callback's key that it deletes",
    "threshold below 0",
    "save_folder on what is read only",
)
@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_is_exit_code_1(doctor, assets: Path, wrong: str):
    code, said = doctor(mistaken(assets, wrong))
    assert code == 1, said
    assert "problem: " in said
    for word in MISTAKES[wrong][1]:
        assert word in said
    assert "Traceback" not in said
    assert len(re.findall(r"(?<!\d )problem: ", said)) == 1 or wrong in TWO_PROBLEMS


def test_all_mistakes_are_said_at_once(doctor, assets: Path):
    changes = {"optimizer.name": "adm", "max_durations": 1, "callbacks": {"x": {}}, "seeds": 1}
    code, said = doctor(changed(good(assets), changes))
    assert code == 1
    for word in ("'adm'", "'max_durations'", "'x'", "'seeds'"):
        assert word in said


def test_all_missing_keys_are_said_at_once(doctor, assets: Path):
    missing = ("model", "tokenizer", "max_seq_len", "train_loader", "max_duration", "scheduler")
    code, said = doctor(changed(good(assets), {**dict.fromkeys(missing, GONE), "do_train": True}))
    assert code == 1
    assert all(f"The run has no `{key}`" in said and f"Write `{key}: " in said for key in missing)
    assert "'do_train'" in said
    assert len(re.findall(r"(?<!\d )problem: ", said)) == len(missing) + 1


def test_a_mistake_in_fsdp2_and_words_for_numbers_hide_nothing(doctor, assets: Path):
    changes = {
        f"{FSDP2_KEY}.verbos": True,
        "global_train_batch_size": "eight",
        "optimizer.lr": "6e-4x",
        "callbacks": {"x": {}},
    }
    code, said = doctor(changed(good(assets), changes))
    assert code == 1
    for words in ("'verbos'", "global_train_batch_size: 'eight'", "lr: '6e-4x'", "'x' is in no"):
        assert words in said
    assert len(re.findall(r"(?<!\d )problem: ", said)) == len(changes)


CHECKPOINTS = {
    "folder above": ("", {}, "load_path: '{}' is no checkpoint"),
    "another model": ("checkpoint.pt", {"model.n_layers": 4}, "blocks.3.attn.Wqkv.weight"),
    "another size": (
        "checkpoint.pt",
        {"model.d_model": 32},
        "(300, 16), run (300, 32)",
    ),
    "another optimizer": ("checkpoint.pt", {"optimizer.name": "decoupled_lionw"}, "DecoupledAdamW"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_a_problem(doctor, assets: Path, case: str):
    file, changes, words = CHECKPOINTS[case]
    settings = changed(good(assets), {"load_path": f"{assets}/{file}", **changes})
    if case == "another optimizer":
        settings["optimizer"].pop("eps")
    code, said = doctor(settings)
    assert code == 1, said
    assert words.format(assets) in said
    assert len(re.findall(r"(?<!\d )problem: ", said)) == 1
    if case == "another optimizer":
        assert doctor({**settings, "load_weights_only": True})[0] == 0


@pytest.mark.parametrize(
    ("name", "misspelt", "meant"),
    [("muon", "adam_lr", "adamw_lr"), ("decoupled_adamw", "wieght_decay", "weight_decay")],
)
def test_a_misspelt_argument_is_said_with_those_there_are(
    doctor, assets: Path, name: str, misspelt: str, meant: str
):
    settings = good(assets)
    settings["optimizer"] = {"name": name, "lr": 1e-3, misspelt: 0.1}
    code, said = doctor(settings)
    assert code == 1
    assert f"has no argument '{misspelt}'. do: Did you mean '{meant}'? Write one of" in said


@pytest.mark.matrix
def test_a_key_that_a_config_transform_takes_out_is_no_mistake(doctor, assets: Path, tmp_path):
    code = tmp_path / "own.py"
    code.write_text(
        "from llmfoundry import registry\n"
        "@registry.config_transforms.register('own')\n"
        "def take(cfg):\n"
        "    cfg['seed'] = cfg.pop('my_own', 1)\n"
        "    return cfg\n"
    )
    settings = {**good(assets), "my_own": 3}
    exit_code, said = doctor({**settings, "code_paths": [str(code)]})
    assert exit_code == 0, said
    exit_code, said = doctor({**settings, "code_paths": [str(code)], "my_others": 3})
    assert exit_code == 1
    assert "'my_others' is not a key" in said
    assert "'my_own'" not in said
    assert "'my_own' is not a key" in doctor(settings)[1]


def test_a_small_vocabulary_is_enlarged_where_weights_have_values(doctor, assets: Path):
    code, said = doctor(changed(good(assets), {"model.vocab_size": 100}))
    assert code == 0, said
    assert "warning: model: it cannot be built here, where weights have no values" in said


def test_a_duration_without_unit_is_said(doctor, assets: Path):
    code, said = doctor(changed(good(assets), {"max_duration": 300}))
    assert code == 0, said
    assert "warning: max_duration is 300 without a unit" in said
    assert "300 epochs" in said
    assert "Write 300ep, or 300ba for batches." in said


def test_a_model_that_cannot_be_on_meta(doctor, assets: Path, tmp_path: Path):
    code = tmp_path / "own_model.py"
    code.write_text(
        "from llmfoundry import registry\n"
        "from llmfoundry.models.mpt import ComposerMPTCausalLM\n"
        "@registry.models.register('own')\n"
        "class Own(ComposerMPTCausalLM):\n"
        "    def __init__(self, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "        self.norm = next(self.parameters()).detach().numpy().max()\n"
    )
    changes = {"code_paths": [str(code)], "model.name": "own"}
    exit_code, said = doctor(changed(good(assets), changes))
    assert exit_code == 0, said
    assert "warning: model: it cannot be built here, where weights have no values" in said
    assert doctor(changed(good(assets), {**changes, "model.init_device": "meta"}))[0] == 1


def test_a_loader_without_a_length_and_no_tokenizer(doctor, assets: Path, tmp_path: Path):
    code = tmp_path / "own_loader.py"
    code.write_text(
        "import torch\n"
        "from composer.core import DataSpec\n"
        "from llmfoundry import registry\n"
        "from torch.utils.data import DataLoader, IterableDataset\n"
        "class Endless(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        while True:\n"
        "            yield {'input_ids': torch.ones(8, dtype=torch.long)}\n"
        "def build(tokenizer, device_batch_size, dataset):\n"
        "    return DataSpec(DataLoader(Endless(), batch_size=device_batch_size))\n"
        "registry.dataloaders.register('endless', func=build)\n"
    )
    loader = {"name": "endless", "dataset": {"any": 1}}
    changes = {"code_paths": [str(code)], "train_loader": loader}
    exit_code, said = doctor(changed(good(assets), changes))
    assert exit_code == 0, said
    exit_code, said = doctor(changed(good(assets), {**changes, "tokenizer": {}}))
    assert exit_code == 0, said


@pytest.mark.table("fp64")
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_precision_for_gpus(doctor, assets: Path, precision: str):
    settings = changed(good(assets), {"precision": precision, "global_train_batch_size": 16})
    code, said = doctor(settings, *GPUS)
    assert code == 1
    assert precision in said
    assert "amp_bf16" in said
    assert doctor({**settings, "precision": "amp_bf16"}, *GPUS)[0] == 0


def test_a_mixed_precision_that_llm_foundry_replaces(doctor, assets: Path):
    changes = {f"{FSDP2_KEY}.mixed_precision": "DEFAULT", "model.master_weights_dtype": "bf16"}
    code, said = doctor(changed(good(assets), changes))
    assert code == 0, said
    assert "mixed_precision of parallelism_config.fsdp2 is 'DEFAULT'" in said
    assert "Take mixed_precision out, or model.master_weights_dtype." in said


def test_fp8_without_its_package(doctor, assets: Path, monkeypatch):
    pytest.importorskip("torchao.float8", reason="needs the extra fp8")
    changes = {f"{FSDP2_KEY}.fp8": True, "precision": "amp_bf16", "global_train_batch_size": 16}
    settings = changed(good(assets), changes)
    assert "torchao" not in doctor(settings, *GPUS)[1]
    monkeypatch.setitem(sys.modules, "torchao", None)
    code, said = doctor(settings, *GPUS)
    assert code == 1
    assert "torchao is not installed" in said


def test_a_name_that_is_not_here_is_a_warning(doctor, assets: Path, monkeypatch):
    """The network is not asked."""
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail(f"connects: {args}"))
    changes = {"tokenizer.name": "gtp2", "model": {"name": "hf_causal_lm"}}
    changes["model"]["pretrained_model_name_or_path"] = "nobody/nothing"
    code, said = doctor(changed(good(assets), changes))
    assert code == 0, said
    assert "warning: tokenizer.name: 'gtp2' is no folder" in said
    assert "model.pretrained_model_name_or_path: 'nobody/nothing' is no folder" in said


def test_data_of_a_file_that_is_missing(doctor, assets: Path):
    dataset = {"hf_name": "json", "hf_kwargs": {"data_files": {"train": "no/x.jsonl"}}}
    code, said = doctor(changed(good(assets), {"train_loader.dataset": {**DATASET, **dataset}}))
    assert code == 1
    assert "train_loader: FileNotFoundError" in said
    assert "no/x.jsonl" in said


def test_a_batch_that_cannot_be_divided_hides_nothing(doctor, assets: Path):
    code, said = doctor(changed(good(assets), {"global_train_batch_size": 7, "optimizer.lr": -1.0}))
    assert code == 1
    assert "7 is not divisible" in said
    assert "Invalid learning rate" in said


def test_a_key_that_is_missing_because_it_is_misspelt(doctor, assets: Path):
    changes = {"global_train_batch_size": GONE, "global_train_batch_sise": 8}
    code, said = doctor(changed(good(assets), changes))
    assert code == 1
    assert "'global_train_batch_size' is missing" in said
    assert "'global_train_batch_sise' is not a key" in said
    assert "Did you mean 'global_train_batch_size'?" in said


# --- Runs of this repository. ---

RUNS = sorted((ROOT / "yamls").glob("*/*.yaml"))
PLACEHOLDERS = [path for path in RUNS if path.parent.name != "complete"]
COMPLETE = [path for path in RUNS if path.parent.name == "complete"]


@pytest.mark.table("finetune/mpt-7b", "long/llama-3.1-8b")
@pytest.mark.parametrize("path", PLACEHOLDERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_run_to_start_from_wants_its_data_alone(doctor, assets: Path, path: Path):
    streams = "local" in yaml.safe_load(path.read_text())["train_loader"]["dataset"]
    kind = "mds" if streams else "finetuning"
    start = ["variables.checkpoint=s3://bucket/ep0-ba50000"] if path.stem == "mpt-7b" else []
    code, said = doctor(path, *GPUS, *start)
    assert code == 1
    assert "/my-" in said or "'my-" in said
    if kind == "finetuning":
        start.append("eval_loader.dataset.split=val")
    code, said = doctor(path, *GPUS, *start, f"variables.data={assets}/{kind}")
    assert code == 0, said


@pytest.mark.table
@pytest.mark.parametrize("model", ["llama-3.2-1b", "olmoe-1b-7b"])
def test_a_large_model_is_planned_on_meta(doctor, assets: Path, tmp_path: Path, model: str):
    path = ROOT / "yamls" / "pretrain" / f"{model}.yaml"
    name = yaml.safe_load(path.read_text())["variables"]["model"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
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


@pytest.mark.table("distillation", "llama-lora")
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
