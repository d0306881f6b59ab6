"""Weights of DeepSpeed's checkpoints, written as the format says, and by DeepSpeed itself."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from typer.testing import CliRunner

from composer_fsdp2.checkpoint.deepspeed import open_any_checkpoint
from composer_fsdp2.checkpoint.source import open_checkpoint
from composer_fsdp2.cli.main import app
from composer_fsdp2.errors import CheckpointError
from tests.support.deepspeed import ODD, odd_weights, save, stored
from tests.unit.checkpoint.test_huggingface import tiny, tokenizer

REAL = Path(__file__).parents[2] / "data" / "deepspeed_checkpoints"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def read(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Name in the trained model -> weight; DeepSpeed is not imported for it."""
    source = open_any_checkpoint(path, **options)
    assert "deepspeed" not in sys.modules
    start = "state.model.model."
    return {key.removeprefix(start): source.tensor(key) for key in source.tensors}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].dtype == weight.dtype, name
        assert found[name].shape == weight.shape, name
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("between", [0, 3])
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_are_those_that_were_trained(stage: int, world: int, between: int, tmp_path: Path):
    folder = save(tmp_path, odd_weights(), stage, world, between=between, **ODD)
    for path in (tmp_path, folder, next(folder.iterdir())):
        assert_same(read(path), odd_weights())


@pytest.mark.parametrize("name", ["zero2", "zero3_bf16"])
def test_real_files_give_what_zero_to_fp32_gives(name: str, tmp_path: Path):
    """The files are of DeepSpeed 0.19.8; see the README beside them."""
    wanted = load_file(REAL / name / "expected.safetensors")
    out = tmp_path / "out.pt"
    run("convert", REAL / name, out, "--to", "full")
    model = torch.load(out)["state"]["model"]
    assert model["model.head.weight"] is model["model.emb.weight"]
    assert_same({key.removeprefix("model."): value for key, value in model.items()}, wanted)


def test_a_description_says_what_is_read_and_what_is_not(tmp_path: Path):
    save(tmp_path, odd_weights(), 3, 2, **ODD)
    facts = json.loads(run("inspect", tmp_path, "--json"))
    assert (facts["kind"], facts["world_size"]) == ("deepspeed ZeRO-3", 2)
    assert facts["ties"] == [["state.model.model.embed.weight", "state.model.model.head.weight"]]
    assert facts["parameters"] == 11 * 5 + 7 * 5 + 7 + 1 + 5 * 7 + 3 + 1
    assert len(facts["files"]) == 4
    assert "load_weights_only" in facts["remarks"][0]
    assert "moments start new" in run("inspect", tmp_path)
    assert "is whole" in run("verify", tmp_path)


def test_damage_is_found(tmp_path: Path):
    file = save(tmp_path, odd_weights(), 2, 2, **ODD) / OPTIM
    data, weight = bytearray(file.read_bytes()), torch.tensor([odd_weights()["up.weight"][6, 4]])
    data[data.index(weight.numpy().tobytes())] ^= 1
    file.write_bytes(data)
    assert "is not good" in run("verify", tmp_path, code=1)
    assert OPTIM in run("convert", tmp_path, tmp_path / "out", "--to", "sharded", code=2)
    assert not (tmp_path / "out").exists()


# --- Where the optimizer is elsewhere. ---


def test_a_name_that_leads_out_of_a_universal_checkpoint_is_refused(tmp_path: Path):
    folder = save(tmp_path, {"../../up": torch.ones(3)}, 2, 2, groups=[["../../up"]])
    (folder / "zero").mkdir()
    torch.save(torch.zeros(3), tmp_path / "fp32.pt")
    with pytest.raises(CheckpointError, match="outside of its own folder"):
        open_any_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", ["dictionary", "flat"])
def test_a_universal_checkpoint_has_a_file_for_each_parameter(shape: str, tmp_path: Path):
    weights = odd_weights()
    folder = save(tmp_path, weights, 2, 2, **ODD)
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    for name in [name for group in ODD["groups"] for name in group]:
        (folder / "zero" / name).mkdir(parents=True)
        value = {"cat_dim": 0, "param": weights[name]}
        stored_value = value if shape == "dictionary" else weights[name].reshape(-1)
        torch.save(stored_value, folder / "zero" / name / "fp32.pt")
    (tmp_path / "latest").rename(tmp_path / "latest_universal")
    assert_same(read(tmp_path), weights)
    assert open_any_checkpoint(tmp_path).kind == "deepspeed universal"
    (folder / "zero" / "up.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"'zero/up.bias/fp32.pt' is missing"):
        open_any_checkpoint(tmp_path)


def test_without_files_of_the_optimizer_weights_are_those_of_the_model(tmp_path: Path):
    folder = save(tmp_path, odd_weights(), 1, 2, **ODD)
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    half = {
        name: weight.bfloat16() if weight.is_floating_point() else weight
        for name, weight in odd_weights().items()
    }
    assert_same(read(tmp_path), half)
    assert "no partitions of fp32 weights" in run("inspect", tmp_path)


# --- Names. ---


def test_names_get_the_prefix_of_the_composer_model(tmp_path: Path):
    def names(prefix: str | None, start: str) -> set[str]:
        path = tmp_path / f"{start}{prefix}"
        weights = {f"{start}weight": torch.ones(3), f"{start}bias": torch.ones(1)}
        save(path, weights, 2, 2, groups=[list(weights)])
        source = open_any_checkpoint(path, prefix=prefix)
        return {key.removeprefix("state.model.") for key in source.tensors}

    assert names(None, "") == {"model.weight", "model.bias"}
    assert names(None, "model.") == {"model.weight", "model.bias"}  # of a ComposerModel
    assert names(None, "module.") == {"model.weight", "model.bias"}
    assert names("net.", "") == {"net.weight", "net.bias"}
    assert names("", "_orig_mod.") == {"weight", "bias"}
    said = run("convert", "--prefix", "net.", "--to", "full", __file__, tmp_path / "x", code=2)
    assert "no checkpoint of DeepSpeed" in said


# --- What is refused. ---


class Executes:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Member:
    """An enum's member as Python 3.11.0 pickles it, by name."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.of


class Stage:
    """A class of the other package."""


Stage.__module__ = "deepspeed.runtime"


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _add(name: str) -> Callable[[Path], None]:
    return lambda folder: torch.save({}, folder / name)


def _divide_differently(folder: Path) -> None:
    file = folder / OPTIM.replace("rank_1", "rank_0")
    with stored():
        state = torch.load(file, weights_only=False)
        state["optimizer_state_dict"]["partition_count"] = [2, 1]
        torch.save(state, file)


MODEL2 = "mp_rank_00_model_states.pt"
REFUSED = {
    "no file of a rank": (2, _remove(OPTIM), f"'{OPTIM}' is missing"),
    "no file of a rank, stage 3": (3, _remove(OPTIM), f"'{OPTIM}' is missing"),
    "no model states of a rank": (
        3,
        _remove("zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "'zero_pp_rank_0_mp_rank_00_model_states.pt' is missing",
    ),
    "no model states": (2, _remove(MODEL2), f"'{MODEL2}' is missing"),
    "nothing": (2, shutil.rmtree, f"'{MODEL2}' is missing"),
    "a rank too many": (2, _add(OPTIM.replace("rank_1", "rank_7")), "rank_7.*Remove those of the"),
    "two stages": (3, _add(MODEL2), f"has '{MODEL2}' and 'zero_pp_rank_0.*Remove those of the"),
    "tensor parallel": (2, _add("mp_rank_01_model_states.pt"), "mp_rank_01.* tensor or pipeline"),
    "pipeline": (2, _add("layer_00-model_00-model_states.pt"), "layer_00.* tensor or pipeline"),
    "experts": (
        2,
        _add("layer_0_expert_1_mp_rank_00_model_states.pt"),
        "layer_0_expert_1.* experts over ranks",
    ),
    "groups of different ranks": (2, _divide_differently, "between different ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case: str, tmp_path: Path):
    stage, change, message = REFUSED[case]
    change(save(tmp_path, odd_weights(), stage, 3 if case == "a rank too many" else 2, **ODD))
    with pytest.raises(CheckpointError, match=message):
        open_any_checkpoint(tmp_path)
    facts = json.loads(run("inspect", tmp_path, "--json", code=1))
    assert (facts["kind"], len(facts["problems"])) == ("deepspeed", 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_another_size_are_damage(stage: int, tmp_path: Path):
    weights = odd_weights()
    groups = [["embed.weight"], *ODD["groups"][1:]]
    shapes = [{name: weights[name].shape for name in group} for group in ODD["groups"]]
    others: dict[str, Any] = {**ODD, "groups": groups, "others": {"param_shapes": shapes}}
    save(tmp_path, weights, stage, 2, **others)
    with pytest.raises(CheckpointError, match="is damaged: ValueError"):
        open_any_checkpoint(tmp_path)


@pytest.mark.parametrize("others", [{"mp_world_size": 2}, {"ds_autoep_layers": [{}]}])
def test_a_part_of_a_tensor_is_not_taken_for_all_of_it(others: dict[str, Any], tmp_path: Path):
    save(tmp_path, odd_weights(), 2, 2, **ODD, others=others)
    with pytest.raises(CheckpointError, match="not divided by ZeRO alone"):
        open_any_checkpoint(tmp_path)


def test_nothing_is_executed(tmp_path: Path):
    others = {"of the user": Executes(tmp_path / "executed")}
    save(tmp_path, odd_weights(), 2, 2, **ODD, others=others)
    said = run("convert", tmp_path, tmp_path / "out", "--to", "full", code=2)
    assert "mkdir', which is not data" in said
    assert not (tmp_path / "executed").exists()


def test_members_of_enums_are_data_by_name_too_and_other_attributes_are_refused(tmp_path: Path):
    with stored(Stage):
        save(tmp_path / "a", odd_weights(), 2, 2, **ODD, others={"stage": Member(Stage, "name")})
    assert_same(read(tmp_path / "a"), odd_weights())
    others = {"stage": Member(torch.Size, "mro")}
    save(tmp_path / "b", odd_weights(), 2, 2, **ODD, others=others)
    with pytest.raises(CheckpointError, match=r"builtins.getattr', which is not data"):
        open_any_checkpoint(tmp_path / "b")


@pytest.mark.parametrize("part", ["", "global_step3", f"global_step3/{MODEL2}"])
def test_a_load_says_how_to_convert_it(part: str, tmp_path: Path):
    save(tmp_path, odd_weights(), 2, 2, **ODD)
    with pytest.raises(CheckpointError, match=r"is a checkpoint of DeepSpeed.* --to sharded`"):
        open_checkpoint(tmp_path / part)


def test_migrate_says_that_another_command_converts_it(tmp_path: Path):
    save(tmp_path, odd_weights(), 2, 2, **ODD)
    result = CliRunner().invoke(app, ["migrate", str(tmp_path)])
    assert result.exit_code == 2
    assert "checkpoint convert" in result.output


# --- Hugging Face. ---


@pytest.mark.parametrize("stage", [2, 3])
def test_from_pretrained_loads_what_deepspeed_trained(stage: int, tmp_path: Path):
    """The Trainer of Hugging Face writes config and tokenizer beside the checkpoint."""
    model = tiny("llama tied")
    weights = dict(model.state_dict())
    groups = [[name for name in weights if name != "lm_head.weight"]]
    shared = {"lm_head.weight": "model.embed_tokens.weight"}
    save(tmp_path / "in", weights, stage, 2, groups=groups, shared=shared)
    model.config.save_pretrained(tmp_path / "in")
    tokenizer().save_pretrained(tmp_path / "in")
    run("convert", tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(dict(loaded.state_dict()), weights)


def test_adapters_without_their_configuration_are_no_folder_of_hugging_face(tmp_path: Path):
    weights = {"base_model.model.lora_A.default.weight": torch.ones(2, 3), "b": torch.ones(1)}
    save(tmp_path / "in", weights, 2, 2, groups=[list(weights)])
    (tmp_path / "in" / "config.json").write_text("{}")
    said = run("convert", tmp_path / "in", tmp_path / "out", "--to", "hf", code=2)
    assert "no configuration of PEFT" in said
    assert not (tmp_path / "out").exists()
