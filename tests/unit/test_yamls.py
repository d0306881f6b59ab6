"""Every YAML in the repository is a run that could start, and says truly what it needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.foundry.transform import parse_run_config, requests_fsdp2
from composer_fsdp2.plan.mesh_shape import MeshShape

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from llmfoundry import registry
from llmfoundry.data.finetuning.dataloader import _validate_config
from llmfoundry.data.text_data import StreamingTextDataset
from llmfoundry.utils import builders
from llmfoundry.utils.config_utils import (
    TRAIN_CONFIG_KEYS,
    TrainConfig,
    make_dataclass_and_log_config,
    update_batch_size_info,
)
from llmfoundry.utils.registry_utils import import_file

from composer_fsdp2 import prepare_fully_shard
from tests.support import yaml_memory, yaml_models
from tests.support.experts import STACKED
from tests.support.yaml_memory import ROOT, RUNS, Run, commands_of, memory_of, plain, runs_of

YAMLS = sorted((ROOT / "yamls").rglob("*.yaml"))
MODELS = (
    "gemma-3-4b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "mixtral-8x7b",
    "mpt-7b",
    "olmoe-1b-7b",
    "phi-4",
    "qwen3-30b-a3b",
    "qwen3-8b",
)
TIED = ("meta-llama/Llama-3.2-1B", "google/gemma-3-4b-pt")
LAYERS = {
    "Qwen/Qwen3-30B-A3B": 48,
    "Qwen/Qwen3-8B": 36,
    "allenai/OLMoE-1B-7B-0924": 16,
    "google/gemma-3-4b-pt": 34,
    "meta-llama/Llama-3.1-8B": 32,
    "meta-llama/Llama-3.2-1B": 16,
    "microsoft/phi-4": 40,
    "mistralai/Mixtral-8x7B-v0.1": 32,
    "mpt-7b": 32,
}
# LLM Foundry makes units of the parts of its own model.
_MPT = ["model", *(f"model.transformer.{name}" for name in ("wte", "wpe"))]
OTHER_UNITS = {"mpt-7b": _MPT}
ROOM = 0.8
"""of a GPU's memory that the stated part may take; activations need the rest"""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "yamls"))


every_yaml = pytest.mark.parametrize("path", YAMLS, ids=name_of)
every_run = pytest.mark.parametrize("path", RUNS, ids=name_of)
four_by_default = pytest.mark.table(
    "finetune/gemma-3-4b.yaml",
    "finetune/olmoe-1b-7b.yaml",
    "pretrain/llama-3.1-8b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
)
twelve_by_default = pytest.mark.table(
    "finetune/gemma-3-4b.yaml",
    "finetune/llama-3.2-1b.yaml",
    "finetune/mpt-7b.yaml",
    "finetune/phi-4.yaml",
    "finetune/qwen3-8b.yaml",
    "pretrain/llama-3.1-8b.yaml",
    "pretrain/mixtral-8x7b.yaml",
    "pretrain/mpt-7b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
    "pretrain/phi-4.yaml",
    "pretrain/qwen3-30b-a3b.yaml",
    "pretrain/qwen3-8b.yaml",
)


def _skip_lists_of_experts(path: Path) -> None:
    if STACKED and path.stem.startswith("mixtral"):
        pytest.skip("transformers has no lists of experts")  # its file says what to write


def load(path: Path) -> DictConfig:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def hub_name(run: Run) -> str:
    model = plain(run.config)["model"]
    return model.get("pretrained_model_name_or_path", "mpt-7b")


# --- Which there are. ---

_OTHERS = ("complete", "experts", "long", "newest", "tensor")
"""folders whose runs have tests of their own"""


def test_every_model_is_there():
    for task in ("finetune", "pretrain"):
        assert {path.stem for path in RUNS if path.parent.name == task} == set(MODELS)
    others = {path for path in YAMLS if path.parent.name in _OTHERS}
    assert {*RUNS, ROOT / "yamls" / "quickstart.yaml"} == set(YAMLS) - others


# --- What they say is understood. ---


def validate(config: DictConfig) -> TrainConfig:
    """LLM Foundry's own reading of a config, which ends with the keys it does not know."""
    transforms = [parse_run_config, update_batch_size_info]
    return make_dataclass_and_log_config(config, TrainConfig, TRAIN_CONFIG_KEYS, transforms)[1]


@pytest.mark.table(
    "finetune/llama-3.2-1b.yaml",
    "long/llama-3.1-8b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
    "tensor/llama-3.3-70b.yaml",
)
@every_yaml
def test_asks_for_fsdp2_with_settings_that_hold(path: Path):
    assert requests_fsdp2(parse_run_config(plain(load(path))))


@pytest.mark.table(
    "finetune/llama-3.2-1b.yaml",
    "long/llama-3.1-8b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
    "tensor/llama-3.3-70b.yaml",
)
@every_yaml
def test_llm_foundry_knows_its_keys(path: Path):
    parsed = validate(load(path))
    assert parsed.fsdp_config is not None
    assert parsed.fsdp_config["version"] == 2


@pytest.mark.table(
    "finetune/llama-3.2-1b.yaml",
    "long/llama-3.1-8b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
    "tensor/qwen3-32b.yaml",
)
@every_yaml
def test_llm_foundry_would_refuse_another_key(path: Path):
    """The test above could not fail otherwise."""
    config = load(path)
    config["max_durations"] = "1ep"
    with pytest.raises(ValueError, match="max_durations"):
        validate(config)


@pytest.mark.table(
    "complete/distillation.yaml",
    "finetune/mixtral-8x7b.yaml",
    "long/qwen3-8b.yaml",
    "pretrain/phi-4.yaml",
)
@every_yaml
def test_its_code_is_where_it_says(path: Path):
    for code in load(path).get("code_paths", []):
        assert (ROOT / code).is_file()


@pytest.mark.parametrize("file", ["quickstart_data.py", "complete/small_data.py"])
def test_the_code_of_one_run_leaves_the_next_alone(file: str, tmp_path: Path):
    """LLM Foundry keeps the transforms of a run for all later ones in the process."""
    code = import_file(ROOT / "yamls" / file)
    for other in ({"max_seq_len": 8}, {"code_paths": ["x.py"], "variables": {"data": "x"}}):
        assert code.prepare_data(copy.deepcopy(other)) == other
    variables = {"data": str(tmp_path / "data"), "text": {"vocab_size": 300, "megabytes": 0.1}}
    own = {"max_seq_len": 8, "code_paths": [f"yamls/{file}"], "variables": variables}
    code.prepare_data(own)
    assert (tmp_path / "data").is_dir()


@four_by_default
@every_run
def test_its_parts_are_built_by_llm_foundry(path: Path):
    """Optimizer, scheduler, algorithms and callbacks exist under these names with these keys."""
    config = plain(load(path))
    optimizer, scheduler = config["optimizer"], config["scheduler"]
    builders.build_optimizer(nn.Linear(2, 2), optimizer.pop("name"), optimizer)
    builders.build_scheduler(scheduler.pop("name"), scheduler)
    for name, settings in config["algorithms"].items():
        builders.build_algorithm(name, settings)
    assert set(config["callbacks"]) <= set(registry.callbacks.get_all())


@four_by_default
@every_run
def test_its_data_has_the_keys_of_its_loader(path: Path):
    config = plain(load(path))
    for loader in (config["train_loader"], config["eval_loader"]):
        assert loader["name"] == {"finetune": "finetuning", "pretrain": "text"}[path.parent.name]
        if loader["name"] == "finetuning":
            _validate_config(**loader["dataset"])
        else:
            dataset_keys = StreamingTextDataset.__init__.__annotations__
            assert loader["dataset"].keys() <= dataset_keys.keys()


@four_by_default
@every_run
def test_its_data_are_a_placeholder_in_this_folder(path: Path):
    data = load(path).variables.data
    assert data.startswith("./my-")
    assert not (ROOT / data).exists()


# --- What the comment says is true. ---


@twelve_by_default
@every_run
def test_its_commands_start_it(path: Path):
    """On one node, and on several as HSDP."""
    one, several = commands_of(path)
    name = f"yamls/{name_of(path)}"
    assert one == ["composer-fsdp2", "train", name]
    start = several.index("composer-fsdp2")
    assert several[start - 1] == "--no-python"
    assert several[start + 1 : start + 3] == ["train", name]
    assert all("=" in override for override in several[start + 3 :])


@pytest.mark.table("finetune/qwen3-8b.yaml", "pretrain/gemma-3-4b.yaml")
@every_run
def test_its_mesh_resolves(path: Path):
    one, several = runs_of(path)
    assert (one.gpus, one.mesh) == (8, MeshShape(shard=8))
    assert several.gpus == 32
    assert several.mesh.replicate in (2, 4)
    assert several.mesh.shard * several.mesh.replicate == 32


@twelve_by_default
@every_run
def test_its_batch_divides(path: Path):
    for run in runs_of(path):
        batch, micro = run.config.global_train_batch_size, run.config.device_train_microbatch_size
        assert batch % (run.gpus * micro) == 0


@pytest.mark.table(
    "finetune/mpt-7b.yaml",
    "pretrain/gemma-3-4b.yaml",
    "pretrain/mpt-7b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
)
@every_run
def test_its_table_is_computed(path: Path):
    _skip_lists_of_experts(path)
    assert yaml_memory.with_table(path) == path.read_text()


@pytest.mark.table(
    "finetune/mpt-7b.yaml",
    "pretrain/gemma-3-4b.yaml",
    "pretrain/mpt-7b.yaml",
    "pretrain/phi-4.yaml",
)
@every_run
def test_the_memory_it_states_is_enough(path: Path):
    _skip_lists_of_experts(path)
    for run in runs_of(path):
        assert memory_of(run).together <= ROOM * run.gpu_gb * yaml_memory.GB


# --- The model it trains. ---


@twelve_by_default
@every_run
def test_its_model_has_the_published_size(path: Path):
    run = runs_of(path)[0]
    elements = sum(unit.numel for unit in run.plan.units)
    assert elements == pytest.approx(yaml_models.PARAMETERS[hub_name(run)], rel=0.005)


@twelve_by_default
@every_run
def test_a_unit_is_a_decoder_layer_with_all_of_its_experts(path: Path):
    for run in runs_of(path):
        layers = [unit.module for unit in run.plan.units if unit.reason == "fsdp_wrap_fn"]
        assert len({name.rpartition(".")[0] for name in layers}) == 1
        numbers = [int(name.rpartition(".")[2]) for name in layers]
        assert numbers == list(range(LAYERS[hub_name(run)]))
        ends = {unit.module for unit in run.plan.units if unit.role is not None}
        apart = {"model.model.embed_tokens", "model.lm_head"}
        assert ends == (set() if run.plan.tied or path.stem in OTHER_UNITS else apart)
        others = {unit.module for unit in run.plan.units} - {*layers, *ends}
        assert others == {*OTHER_UNITS.get(path.stem, ["model"])}


@pytest.mark.parametrize("model", ["mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b"])
def test_pretraining_keeps_experts_evenly_used(model: str):
    run = runs_of(ROOT / "yamls" / "pretrain" / f"{model}.yaml")[0]
    assert run.model.config.output_router_logits is True


@four_by_default
@every_run
def test_every_parameter_is_owned_once(path: Path):
    for run in runs_of(path):
        owned = [name for unit in run.plan.units for name in unit.params]
        named = run.model.named_parameters(remove_duplicate=False)
        assert sorted(owned) == sorted(name for name, _ in named)
        assert run.plan.ignored == ()


@twelve_by_default
@every_run
def test_its_ties_are_those_of_the_model(path: Path):
    run = runs_of(path)[0]
    pair = ("model.model.embed_tokens.weight", "model.lm_head.weight")
    assert run.plan.tied == ((pair,) if hub_name(run) in TIED else ())


# --- The arithmetic. ---


@pytest.mark.table(
    "finetune/llama-3.2-1b.yaml",
    "finetune/olmoe-1b-7b.yaml",
    "pretrain/llama-3.1-8b.yaml",
    "pretrain/olmoe-1b-7b.yaml",
)
@every_run
def test_what_is_gathered_holds_the_largest_unit_and_its_gradient(path: Path):
    for run in runs_of(path):
        largest = max(unit.numel for unit in run.plan.units)
        assert memory_of(run).gathered >= 2 * largest * torch.bfloat16.itemsize


@pytest.fixture
def one_of_24_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=24)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_24_ranks")
def test_shards_are_as_large_as_fsdp2_makes_them():
    """24 does not divide the model's sizes, so there is padding."""
    path = ROOT / "yamls" / "finetune" / "llama-3.2-1b.yaml"
    run = runs_of(path)[0]
    shapes = {name: param.shape for name, param in run.model.named_parameters()}
    model = copy.deepcopy(run.model)
    prepare_fully_shard(model, None, {}, device="cpu")
    for name, param in model.named_parameters():
        assert param.to_local().numel() == yaml_memory.padded_shard(shapes[name], 24)


def test_gathered_bytes_by_hand():
    """Llama 3.2 1B: a kept unit of 262.7 million, and layers of 60.8 million."""
    run = runs_of(ROOT / "yamls" / "finetune" / "llama-3.2-1b.yaml")[0]
    kept, layer = 128256 * 2048 + 2048, 60821504
    in_a_layer = kept * (2 + 2) + layer * (2 + 2 + 2 + 4)
    at_the_end = kept * (2 + 4) + layer * 4
    assert memory_of(run).gathered == max(in_a_layer, at_the_end)


def test_gathered_bytes_of_ends_that_are_units_by_hand():
    """Llama 3.1 8B: ends of 525.3 million, and layers of 218.1 million."""
    run = runs_of(ROOT / "yamls" / "finetune" / "llama-3.1-8b.yaml")[0]
    end, layer, norm = 128256 * 4096, 218112000, 4096
    head = end * (2 + 4) + layer * 2
    embedding = end * (2 + 4) + layer * 4
    in_a_layer = end * 4 + layer * (2 + 2 + 2)
    assert memory_of(run).gathered == max(head, embedding, in_a_layer) + norm * (2 + 2)


# --- The quickstart. ---


def test_quickstart_shows_the_defaults():
    """It says so in a comment, and a newcomer copies from it."""
    cfg = load(ROOT / "yamls" / "quickstart.yaml")
    shown: Any = OmegaConf.to_container(cfg.parallelism_config.fsdp2)
    assert parse_config(shown) == FSDP2Config(verbose=True)
