"""`composer-fsdp2 checkpoint` on checkpoints that are whole, FSDP1's included."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from composer_fsdp2.checkpoint import convert as convert_module
from composer_fsdp2.checkpoint.contents import CHECKSUMS, files_of
from composer_fsdp2.checkpoint.convert import nest
from composer_fsdp2.checkpoint.describe import compare_checkpoints
from composer_fsdp2.checkpoint.source import FolderCheckpoint, open_checkpoint
from composer_fsdp2.cli.main import app
from composer_fsdp2.errors import CheckpointError
from tests.support.saved import (
    NAMES,
    digest,
    digests,
    expected,
    expected_digests,
    fixture,
    save_file,
    save_folder,
    small_state,
)

ROOT = Path(__file__).parents[3]
TIED = ["state.model.model.embed.weight", "state.model.model.head.weight"]


def run(*args: object, code: int = 0) -> str:
    """Standard output of `composer-fsdp2 checkpoint ARGS`."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.stdout


def run_json(*args: object, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code))


@pytest.fixture(params=["sharded", "full"])
def small(request, tmp_path) -> Path:
    if request.param == "sharded":
        return save_folder(tmp_path / "small", small_state())
    return save_file(tmp_path / "small.pt", small_state())


# --- All fixtures: real checkpoints of FSDP1, DDP and one process. ---


def test_every_fixture_is_tested():
    found = {item.name for item in fixture("full_2r").parents[1].iterdir() if item.is_dir()}
    assert found - {"__pycache__"} == set(NAMES)


@pytest.mark.table(
    "full_weights_only_2r",
    "sharded_dtensor_dropout_2r",
    "sharded_dtensor_weights_only_2r",
    "sharded_legacy_optimizer_root_2r",
)
@pytest.mark.parametrize("name", NAMES)
def test_inspect_fixture(name: str):
    truth, found = expected(name), run_json("inspect", fixture(name))
    weights = truth["at_save"]["model"].values()
    assert found["kind"] == ("sharded" if name.startswith("sharded") else "full")
    assert found["problems"] == []
    assert found["world_size"] == truth["world_size"]
    assert (found["torch_version"], found["composer_version"]) == ("2.7.0+cu126", "0.32.1")
    assert found["dtypes"] == {"float32": sum(_elements(value) for value in weights)}
    assert found["ties"] == [["state.model.model.wte.weight", "state.model.model.lm_head.weight"]]
    assert found["parameters"] == found["dtypes"]["float32"] - 64 * 16
    if truth["weights_only"]:
        assert found["optimizers"] == found["progress"] == {}
        return
    assert (found["progress"]["epoch"], found["progress"]["batch"]) == (0, 3)
    groups = truth["at_save"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [
        group["names"] for group in found["optimizers"]["AdamW"]
    ]
    for group, shown in zip(groups, found["optimizers"]["AdamW"], strict=True):
        assert shown["hyperparameters"] == {k: v for k, v in group.items() if k != "params"}


def _elements(value: dict[str, Any]) -> int:
    return torch.Size(value["shape"]).numel()


@pytest.mark.table("sharded_dtensor_dropout_2r", "sharded_dtensor_weights_only_2r")
@pytest.mark.parametrize("name", NAMES)
def test_verify_fixture(name: str):
    found = run_json("verify", fixture(name))
    assert found["problems"] == []
    assert found["parts"] == len(open_checkpoint(fixture(name)).paths)


@pytest.mark.table("full_weights_only_2r")
@pytest.mark.parametrize("name", NAMES)
def test_convert_fixture_there_and_back(name: str, tmp_path: Path):
    truth, source = expected_digests(name), fixture(name)
    there = "full" if source.is_dir() else "sharded"
    back = "sharded" if source.is_dir() else "full"
    run("convert", source, tmp_path / "there", "--to", there)
    run("convert", tmp_path / "there", tmp_path / "back", "--to", back)
    run("convert", source, tmp_path / "same", "--to", back)
    for step, kind in {"there": there, "back": back, "same": back}.items():
        found = open_checkpoint(tmp_path / step)
        assert found.kind == kind
        assert digests(found) == truth
        assert run("diff", source, tmp_path / step).startswith("Equal:")
        run("verify", tmp_path / step)
        if kind == "full":
            _check_composers_layout(torch.load(tmp_path / step, weights_only=False), name)


def _check_composers_layout(values: dict[str, Any], name: str) -> None:
    """Nested as Composer nests it; weights tied, optimizer tensors each on their own."""
    truth = expected(name)
    model = values["state"]["model"]
    tied = {model["model.wte.weight"].data_ptr(), model["model.lm_head.weight"].data_ptr()}
    assert len(tied) == 1
    if truth["weights_only"]:
        return
    assert isinstance(values["rng"], list)
    assert len(values["rng"]) == truth["world_size"]
    optimizer = values["state"]["optimizers"]["AdamW"]
    groups = [set(group["params"]) for group in optimizer["param_groups"]]
    assert groups == [set(group["params"]) for group in truth["at_save"]["param_groups"]]
    tensors = [value for slots in optimizer["state"].values() for value in slots.values()]
    assert len({value.data_ptr() for value in tensors}) == len(tensors)


@pytest.mark.table("full_flatparam_2r")
@pytest.mark.parametrize("name", ["full_flatparam_2r", "sharded_legacy_optimizer_root_2r"])
def test_torch_loads_what_was_converted(name: str, tmp_path: Path):
    """torch's own reader, told nothing of this package; the optimizer is where it is today."""
    run("convert", fixture(name), tmp_path / "new", "--to", "sharded")
    source = open_checkpoint(fixture(name))
    truth = expected_digests(name)
    target = nest((source.paths[key], torch.empty(source.tensors[key].shape)) for key in truth)
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(target, checkpoint_id=tmp_path / "new")
    flat = {key: _at(target, source.paths[key]) for key in truth}
    assert {key: digest(value) for key, value in flat.items()} == truth


def _at(values: Any, way: tuple[str | int, ...]) -> Any:
    for part in way:
        values = values[part]
    return values


# --- Small ones: the forms of the output, sizes, options. ---


def test_inspect_text(small: Path):
    text = run("inspect", small)
    for part in (
        "world size  2",
        "saved at    epoch 1, batch 7",
        "parameters  328",
        "dtypes      float32 (648)",
        "optimizer   AdamW, 1 group\n    0: 2 names; lr=0.1, betas=(0.9, 0.95)",
        f"tied        {TIED[0]} = {TIED[1]}",
    ):
        assert part in text
    assert "problem" not in text


def test_no_ties_where_both_are_trained(tmp_path: Path):
    """Equal by chance, such as two matrices of zeros, is not tied."""
    state = small_state()
    zeros = {"model.embed.weight": torch.zeros(4, 4), "model.head.weight": torch.zeros(4, 4)}
    slots = {name: {"step": torch.tensor(1.0)} for name in zeros}
    state["state"]["model"] = zeros
    state["state"]["optimizers"]["AdamW"]["state"] = slots
    assert run_json("inspect", save_folder(tmp_path / "a", state))["ties"] == []
    assert run_json("inspect", save_file(tmp_path / "a.pt", state))["ties"] == []


@pytest.mark.parametrize("to", ["sharded", "full"])
def test_values_that_are_no_plain_floats(to: str, tmp_path: Path):
    values = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(3, 5).bfloat16(),
        "columns": torch.randn(4, 6).t(),
        "complex": torch.randn(3, dtype=torch.complex64),
        "nan": torch.tensor([float("nan"), -0.0]),
        "a.b": torch.ones(2),
    }
    source = save_file(tmp_path / "a.pt", {"state": {"model": values}})
    run("convert", source, tmp_path / "b", "--to", to)
    assert (
        run("diff", source, tmp_path / "b")
        == "Equal: 8 tensors and 0 objects are the same in both\n"
    )
    found = open_checkpoint(tmp_path / "b")
    for name, value in values.items():
        torch.testing.assert_close(
            found.tensor(f"state.model.{name}"), value, rtol=0, atol=0, equal_nan=True
        )
    assert ("state", "model", "a.b") in found.paths.values()


def test_a_part_of_a_larger_storage_is_written_alone(tmp_path: Path):
    whole = torch.randn(1000, 10)
    source = save_file(tmp_path / "a.pt", {"state": {"model": {"a": whole[3:5]}}})
    assert source.stat().st_size > 40_000
    for to in ("sharded", "full"):
        run("convert", source, tmp_path / to, "--to", to)
        assert sum(files_of(tmp_path / to).values()) < 5_000
        assert run("diff", source, tmp_path / to).startswith("Equal")


def test_files_are_divided_by_size(small: Path, tmp_path: Path):
    run("convert", small, tmp_path / "b", "--to", "sharded", "--max-shard-size", "8 kB")
    found = open_checkpoint(tmp_path / "b")
    files = sorted((tmp_path / "b").glob("*.distcp"))
    assert [file.name for file in files] == [f"__{i}_0.distcp" for i in range(len(files))]
    assert len(files) > 2
    # The bytes around a tensor count for the next file.
    assert all(file.stat().st_size < 10_000 for file in files)
    sizes = {file.name: file.stat().st_size for file in [*files, tmp_path / "b" / ".metadata"]}
    assert json.loads((tmp_path / "b" / CHECKSUMS).read_text())["files"] == sizes
    assert run("diff", small, tmp_path / "b").startswith("Equal")
    assert found.kind == "sharded"


@pytest.mark.matrix
def test_large_tensors_become_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(convert_module, "_PIECE_BYTES", 100)
    source = save_file(tmp_path / "a.pt", small_state())
    run("convert", source, tmp_path / "b", "--to", "sharded")
    found = open_checkpoint(tmp_path / "b")
    assert isinstance(found, FolderCheckpoint)
    chunks = found.metadata.state_dict_metadata[TIED[0]].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(3, 8)] * 13 + [(1, 8)]
    assert run("diff", source, tmp_path / "b").startswith("Equal")
    run("verify", tmp_path / "b")
    # Put together again, in the file and by torch.
    run("convert", tmp_path / "b", tmp_path / "c.pt", "--to", "full")
    assert run("diff", source, tmp_path / "c.pt").startswith("Equal")
    target = {"state": {"model": {"model.embed.weight": torch.empty(40, 8)}}}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.load(target, checkpoint_id=tmp_path / "b")
    truth = small_state()["state"]["model"]["model.embed.weight"]
    assert torch.equal(target["state"]["model"]["model.embed.weight"], truth)


def test_optimizer_without_state_keeps_its_place(tmp_path: Path):
    """A folder has no key for an empty dictionary; `load_state_dict` wants one."""
    state = small_state()
    state["state"]["optimizers"] = {"SGD": {"state": {}, "param_groups": [{"lr": 1.0}]}}
    run("convert", save_folder(tmp_path / "a", state), tmp_path / "b.pt", "--to", "full")
    found = torch.load(tmp_path / "b.pt", weights_only=False)
    assert found["state"]["optimizers"] == state["state"]["optimizers"]


def test_empty_folder_may_be_the_destination(small: Path, tmp_path: Path):
    (tmp_path / "b").mkdir()
    run("convert", small, tmp_path / "b", "--to", "sharded")
    assert run("diff", small, tmp_path / "b").startswith("Equal")


@pytest.mark.parametrize("option", [["--dtype", "float16"], ["--config", "x"]])
def test_options_of_another_kind(option: list[str], small: Path, tmp_path: Path):
    result = CliRunner().invoke(
        app, ["checkpoint", "convert", str(small), str(tmp_path / "b"), "--to", "full", *option]
    )
    assert result.exit_code == 2
    assert "It would have no effect" in " ".join(result.stderr.split())


@pytest.mark.parametrize("size", ["0", "GB", "5 elephants", "1.2.3GB", "-1GB"])
def test_sizes_that_are_none(size: str, small: Path, tmp_path: Path):
    result = CliRunner().invoke(
        app,
        [
            "checkpoint",
            "convert",
            str(small),
            str(tmp_path / "b"),
            "--to=sharded",
            f"--max-shard-size={size}",
        ],
    )
    assert result.exit_code == 2
    assert "which is no size" in result.stderr


def test_convert_json(small: Path, tmp_path: Path):
    found = run_json("convert", small, tmp_path / "b", "--to", "sharded")
    assert found["path"] == str(tmp_path / "b")
    sizes = {item.name: item.stat().st_size for item in (tmp_path / "b").iterdir()}
    assert found["files"] == sizes


# --- Differences. ---


def _changed() -> dict[str, Any]:
    state = small_state()
    model = state["state"]["model"]
    model["model.norm.weight"] = model["model.norm.weight"] + torch.eye(8)[2] * 0.5
    model["model.head.weight"] = model["model.head.weight"][:5]
    model["model.extra"] = torch.zeros(1)
    slots = state["state"]["optimizers"]["AdamW"]["state"]
    slots["model.norm.weight"]["step"] = torch.tensor(float("nan"))
    del state["state"]["algorithms"]
    state["state"]["run_name"] = "other"
    return state


@pytest.mark.parametrize("swapped", [False, True])
def test_diff(small: Path, tmp_path: Path, swapped: bool):
    other = save_file(tmp_path / "other.pt", _changed())
    found = run_json("diff", *([other, small] if swapped else [small, other]), code=1)
    only = [found["only_in_first"], found["only_in_second"]]
    assert only[::-1] if swapped else only == [["state.algorithms"], ["state.model.model.extra"]]
    layouts = ["float32 [40, 8]", "float32 [5, 8]"]
    assert found["layouts"] == {TIED[1]: layouts[::-1] if swapped else layouts}
    step = "state.optimizers.AdamW.state.model.norm.weight.step"
    name = "model.norm.weight"
    a, b = (state["state"]["model"][name].double() for state in (small_state(), _changed()))
    assert found["values"] == {f"state.model.{name}": (a - b).abs().max().item(), step: "nan"}
    names = ["'small'", "'other'"]
    assert found["objects"] == {"state.run_name": names[::-1] if swapped else names}
    assert (found["equal"], found["equal_tensors"]) == (False, 10)


def test_diff_shows_twenty_lines_unless_asked(tmp_path: Path):
    a, b = (
        {"state": {"model": {f"w{i}": torch.full((2,), i + x) for i in range(30)}}} for x in (0, 1)
    )
    paths = save_file(tmp_path / "a.pt", a), save_file(tmp_path / "b.pt", b)
    text = run("diff", *paths, code=1)
    assert text.count(": at most 1 apart") == 20
    assert "Values differ (30):" in text
    assert "... 10 more, see --all" in text
    assert run("diff", *paths, "--all", code=1).count(": at most 1 apart") == 30


def test_diff_with_a_tolerance(tmp_path: Path):
    """|a - b| <= X + X |b|, of every element."""
    small, large = torch.tensor([0.0, math.nan, math.inf, 1.0]), torch.tensor([1000.0])
    a = {"state": {"model": {"small": small, "large": large, "whole": torch.tensor([7, 8])}}}
    apart = torch.tensor([0.09, math.nan, math.inf, 1.15])
    b = {"state": {"model": {"small": apart, "large": large + 99, "whole": torch.tensor([7, 8])}}}
    paths = save_file(tmp_path / "a.pt", a), save_file(tmp_path / "b.pt", b)
    names = [f"state.model.{name}" for name in ("small", "large")]
    for tolerance, differ in ((0, names), (0.05, names), (0.1, [])):
        found = run_json("diff", *paths, "--tolerance", tolerance, code=int(differ != []))
        assert list(found["values"]) == differ
        assert found["equal_tensors"] == 3 - len(differ)
    b["state"]["model"]["small"][0] = math.nan
    found = run_json("diff", paths[0], save_file(tmp_path / "c.pt", b), "--tolerance", 9, code=1)
    assert found["values"] == {names[0]: "nan"}
    for wrong in ("-1", "nan", "inf"):
        run("diff", *paths, f"--tolerance={wrong}", code=2)


def test_diff_of_weights_alone(small: Path, tmp_path: Path):
    state = small_state()
    state["state"]["optimizers"] = state["state"]["timestamp"] = {}
    state["state"]["run_name"] = "moved"
    path = save_file(tmp_path / "moved.pt", state)
    run("diff", small, path, code=1)
    found = run_json("diff", small, path, "--weights")
    assert (found["equal_tensors"], found["equal_objects"]) == (3, 0)
    state["state"]["model"]["model.norm.weight"][3] += 1
    found = run_json("diff", small, save_file(tmp_path / "b.pt", state), "--weights", code=1)
    assert list(found["values"]) == ["state.model.model.norm.weight"]
    none = save_file(tmp_path / "none.pt", {"state": {"run_name": "none"}})
    run("diff", none, none, "--weights", code=2)


def test_inspect_without_a_data_file(tmp_path: Path):
    path = save_folder(tmp_path / "a", small_state())
    for file in path.glob("*.distcp"):
        file.unlink()
    found = run_json("inspect", path, code=1)
    assert found["optimizers"] == {"AdamW": [{"hyperparameters": {}, "names": None}]}
    text = run("inspect", path, code=1)
    assert "AdamW, 1 group\n    0: names unknown; values cannot be read" in text
    assert "__0_0.distcp" in text


def test_a_comparison_tells_its_progress(small: Path):
    told: list[tuple[int, int]] = []
    pair = open_checkpoint(small), open_checkpoint(small)
    compare_checkpoints(*pair, lambda done, total: told.append((done, total)))
    totals = {total for _, total in told}
    assert totals == {sum(done for done, _ in told)}
    assert len(told) > 2


def test_equal_to_itself(small: Path):
    assert run_json("diff", small, small)["equal"] is True


# --- Names and ways. ---


def test_contradicting_ways():
    for ways in (
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a", 0), ("a", 2)],
        [("a", 0), ("a", "b")],
        [("a", 10**9)],
    ):
        with pytest.raises(CheckpointError, match="contradict each other"):
            nest((way, 1) for way in ways)


def test_two_values_under_one_key(tmp_path: Path):
    path = save_file(tmp_path / "a.pt", {"state": {"a": {"b": 1}, "a.b": 2}})
    with pytest.raises(CheckpointError, match="have the same key"):
        open_checkpoint(path)


def test_help_of_the_command_is_quick():
    code = "import sys; from composer_fsdp2.cli.main import app\n"
    code += "app(['checkpoint', '--help'], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    for command in ("inspect", "convert", "verify", "diff"):
        assert command in done.stdout, done.stderr
    assert done.stdout.endswith("False\n")


def test_nothing_is_written_beside_the_source(tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(fixture("sharded_dtensor_2r"), source)
    before = {item: item.read_bytes() for item in source.iterdir()}
    for command in (["inspect"], ["verify"], ["diff", source]):
        run(*command, source)
    assert {item: item.read_bytes() for item in source.iterdir()} == before
    assert list(tmp_path.iterdir()) == [source]
