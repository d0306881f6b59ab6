"""`composer-fsdp2 plan RUN.yaml`: the table, the JSON, the picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from tests.support import foundry
from tests.support.foundry import FSDP2, llama, run_of

pytest.importorskip("llmfoundry", reason="needs the extra foundry")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    return folder


@pytest.fixture
def plan(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "FSDP_VERSION", "RUN_NAME"):
        monkeypatch.delenv(name, raising=False)

    def run(settings: dict[str, Any], *args: str) -> tuple[int, str, str]:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(settings))
        result = CliRunner().invoke(main.app, ["plan", str(path), *args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


def test_the_units_of_a_run_as_table_and_picture(plan, assets: Path, tmp_path: Path):
    file = tmp_path / "plan.svg"
    code, shown, said = plan(run_of(assets, FSDP2), "--plot", str(file))
    assert code == 0, said
    assert "model.transformer.blocks.2" in shown
    assert f"picture {file}" in said
    drawn = file.read_text()
    assert "transformer.blocks.0-2" in drawn
    assert "Units of run.yaml" in drawn
    assert "Memory of a rank over one step: " in drawn
    assert "gathered units" in drawn


@pytest.mark.matrix
def test_json_has_the_units_and_what_is_frozen(plan, assets: Path):
    code, shown, _ = plan(run_of(assets, FSDP2), "--json", "--gpus-per-node=8")
    found = json.loads(shown)
    assert code == 0
    assert found["frozen"] == {}
    assert sum(unit["numel"] for unit in found["units"]) > 1000


def test_a_model_with_new_weights_is_tied(plan, assets: Path):
    model = llama(assets, "llama-tied", pretrained=False, init_device="meta")
    code, shown, said = plan(run_of(assets, FSDP2, model), "--gpus=2", "--json")
    assert code == 0, said
    found = json.loads(shown)
    assert found["tied"] == [["model.model.embed_tokens.weight", "model.lm_head.weight"]]
    elements = sum(unit["numel"] for unit in found["units"])
    assert found["forecast"]["held"]["parameters"] == 4 * elements / 2


@pytest.mark.matrix
def test_a_key_that_nobody_reads_is_said(plan, assets: Path):
    code, _, said = plan(run_of(assets, FSDP2), "model.n_layers=1", "--compare=model.n_layer=1,2")
    assert code == 0, said
    assert "n_layer" in said


def test_what_each_rank_of_a_tensor_group_holds(plan, assets: Path):
    """By hand: rows and biases of Wqkv and up_proj, and columns of the two others."""
    run = run_of(assets, {"parallelism_config": {"tp": {"degree": 2}, "fsdp2": {}}})
    run["model"]["n_layers"] = 1
    divided = 48 * 16 + 48 + 16 * 16 + 32 * 16 + 32 + 16 * 32
    code, shown, said = plan(run, "--ranks=4")
    assert code == 0, said
    assert "mesh: dp_shard 2 x tp 2" in shown
    assert f"4 layers are divided, {divided:,} of " in shown
    _, shown, _ = plan(run, "--ranks=4", "--json")
    found = json.loads(shown)
    sizes, units = found["tensor_parallel"], found["units"]
    elements = sum(unit["numel"] for unit in units)
    assert (sizes["elements"], sizes["divided"]) == (elements, divided)
    held = divided / 4 + (elements - divided) / 2
    assert sizes["held"] == pytest.approx(held, rel=0.01)
    assert sizes["held_bytes"] == 4 * sizes["held"]
    code, shown, error = plan(run, "--ranks=3")
    assert (code, shown) == (1, "")
    assert "tensor_parallel.degree is 2, which does not divide the world size 3" in error


def test_memory_and_collectives_of_a_step(plan, assets: Path):
    """By hand: MPT's parameters are in fp32, and each of four ranks has a quarter of them."""
    run = run_of(assets, FSDP2)
    code, shown, said = plan(run, "--gpus=4", "--gpus-per-node=2", "--gpu=H100")
    assert code == 0, said
    assert "One step of a rank (4 ranks on 2 nodes):" in shown
    assert "7 times, dp_shard, 4 ranks across 2 nodes" in shown
    head, tokens, seconds, *_ = shown.splitlines()
    assert head.startswith("It fits in 79.1 GiB")
    rows = run["global_train_batch_size"]
    assert tokens.startswith(
        f"Tokens: {rows * foundry.LENGTH} a step, on each of 4 ranks (2 nodes)"
    )
    assert " tokens a second and GPU: " in seconds
    assert "TFLOP/s" in shown
    _, shown, _ = plan(run, "--gpus=4", "--json")
    found = json.loads(shown)
    elements = sum(unit["numel"] for unit in found["units"])
    assert found["forecast"]["held"]["parameters"] == 4 * elements / 4
    code, shown, _ = plan(
        run, "--gpus=4", "--gpu-memory=0.1", "model.d_model=4096", "precision=fp32"
    )
    assert code == 1
    assert "It does not fit in 0.1 GiB" in shown
    assert "Try first: " in shown.splitlines()[2]


@pytest.mark.matrix
def test_weights_in_16_bits_are_gathered_and_reduced_in_them(plan, assets: Path):
    """LLM Foundry replaces mixed_precision for `master_weights_dtype`, as it does in the run."""
    sent: list[dict[str, int]] = []
    for extra in ([], ["model.master_weights_dtype=bf16"]):
        code, shown, said = plan(run_of(assets, FSDP2), "--gpus=4", "--json", *extra)
        assert code == 0, said
        moved = json.loads(shown)["forecast"]["sent"]
        sent.append({part["kind"]: part["size_bytes"] for part in moved})
    assert sent[0] == {kind: 2 * size for kind, size in sent[1].items()}


def test_values_of_a_setting_side_by_side(plan, assets: Path):
    run = run_of(assets, FSDP2)
    code, shown, said = plan(run, "--gpus=2", "--compare", "model.n_layers=1,2")
    assert code == 0, said
    head, one, two = shown.splitlines()
    assert head.split()[:3] == ["model.n_layers", "peak", "state"]
    assert (one.split()[0], two.split()[0]) == ("1", "2")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("settings", "option", "left_out"),
    [
        ({"optimizer_state": {"dtype": "bf16"}}, "--gpu-memory=0.1", "are both set"),
        (
            {"gradient_sync": "reduce_scatter_only", "data_parallel_replicate_degree": 2},
            "--gpu=H100",
            "hold one replica",
        ),
        (
            {"sequence_parallel": 2, "compile": {"backend": "eager"}},
            "--gpu=H100",
            "are set beside 'sequence_parallel'",
        ),
    ],
    ids=["optimizer_state", "gradient_sync", "sequence_parallel"],
)
def test_the_search_leaves_out_what_the_run_refuses(
    plan, assets: Path, tmp_path: Path, settings, option, left_out
):
    """In 0.1 GiB the optimizer's state has to be in CPU memory, and stays in bf16."""
    sizes = {"model.n_layers": 1, "model.d_model": 256, "model.vocab_size": 20000}
    run = run_of(assets, {"parallelism_config": {"fsdp2": settings}}, sizes)
    run |= {"loggers": {}, "global_train_batch_size": 2, "device_train_microbatch_size": 1}
    code, shown, said = plan(run, "--gpus=2", "--search", "--write", option)
    assert code == 0, said
    assert shown.startswith("1. ")
    assert left_out in shown
    block = yaml.safe_load((tmp_path / "run.yaml").read_text())["parallelism_config"]["fsdp2"]
    state = settings.get("optimizer_state")
    assert block.get("optimizer_state") == (state and {**state, "device": "cpu"})
    assert settings.keys() <= block.keys()


def test_notes_say_where_the_plan_is_not_the_run(plan, assets: Path):
    """Half of the tokens have half of the logits."""
    run = run_of(assets, FSDP2, {"model.n_layers": 1, "precision": "amp_bf16"})
    kept: list[int] = []
    forecast: dict[str, Any] = {}
    for length in (foundry.LENGTH, foundry.LENGTH // 2):
        run["train_loader"]["dataset"]["max_seq_len"] = length
        _, shown, _ = plan(run, "--ranks=2", "--json")
        forecast = json.loads(shown)["forecast"]
        kept.append(forecast["kept"]["logits"])
    rows, precision = forecast["notes"]
    assert "a row has the 12 tokens of train_loader.dataset.max_seq_len" in rows
    assert "precision is amp_bf16, and these are the numbers of fp32 on CPUs: --gpus N" in precision
    assert kept[0] > kept[1] > 0


@pytest.mark.matrix
def test_the_best_settings_are_written(plan, assets: Path, tmp_path: Path):
    run = run_of(assets, FSDP2)
    code, shown, said = plan(
        run, "model.n_layers=1", "--gpus=2", "--gpu=H100", "--search", "--write"
    )
    assert code == 0, said
    assert shown.startswith("1. ")
    block = yaml.safe_load((tmp_path / "run.yaml").read_text())["parallelism_config"]["fsdp2"]
    assert block["activation_checkpointing"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu=K80"], "--gpu is 'K80', whose memory and speed are not known here."),
        (["--ranks=2", "--gpus=2"], "--ranks is 2 and --gpus is 2."),
        (["--compare=precision"], "--compare is 'precision', which is no setting with values."),
        (["--search"], "--search is given, and the memory of a GPU is not known"),
        (["--search", "--json"], "--search and --json are given."),
        (["--compare=a=1", "--plot=a.svg"], "--compare and --plot are given."),
        (["--gpus=12", "--gpus-per-node=8"], "12 ranks do not fill nodes of 8 GPUs."),
    ],
)
def test_options_that_cannot_be(plan, assets: Path, options: list[str], said: str):
    code, shown, error = plan(run_of(assets, FSDP2), *options)
    assert (code, shown) == (2, "")
    assert said in error


def test_there_has_to_be_a_block_to_write_into(plan, assets: Path):
    block = "parallelism_config.fsdp2.activation_checkpointing=true"
    code, shown, error = plan(run_of(assets), block, "--search", "--write", "--gpu=H100")
    assert (code, shown) == (2, "")
    assert "has no mapping under `parallelism_config.fsdp2`" in error


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_built(plan, assets):
    for name, said in (("plan.xyz", "writes no files"), ("missing/plan.svg", "no folder")):
        code, shown, error = plan({}, "--plot", name)
        assert (code, shown) == (2, "")
        assert said in error


def test_a_run_without_fsdp2_has_no_units(plan, assets: Path):
    code, _, said = plan(run_of(assets))
    assert code == 2
    assert "does not ask for FSDP2" in said


def test_a_model_that_cannot_be_built_has_no_plan(plan, assets: Path):
    settings = run_of(assets, FSDP2)
    code, shown, said = plan(settings, "model.name=mpt_casual_lm")
    assert (code, shown) == (1, "")
    assert "mpt_causal_lm" in said
    assert "The model cannot be planned." in said
