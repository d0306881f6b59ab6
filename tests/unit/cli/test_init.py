"""`composer-fsdp2 init`: a YAML from four answers, which `doctor` passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.tools.starter import GOALS, SHAPES, Answers, starter_yaml
from tests.support import foundry


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    folder = tmp_path_factory.mktemp("assets")
    foundry.write_assets(folder)
    return folder


@pytest.fixture
def init(tmp_path, monkeypatch):
    """Runs `init` with options; the file is run.yaml in an empty folder."""
    for name in ("RANK", "WORLD_SIZE", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*args: object, typed: str = ""):
        return CliRunner().invoke(main.app, ["init", *map(str, args)], input=typed)

    return run


def options(model: object, data: object, goal: str, gpus: int = 0) -> list[str]:
    given = {"model": model, "data": data, "goal": goal, "gpus": gpus}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def doctor(file: str, *args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, ["doctor", file, *args])
    return result.exit_code, result.output


@pytest.mark.table("mpt-tiny-mds-pretrain-0", "llama-finetuning-lora-16")
@pytest.mark.parametrize("gpus", [0, 4, 16])
@pytest.mark.parametrize(
    ("model", "data", "goal"),
    [
        ("mpt-tiny", "mds", "pretrain"),
        ("llama", "mds", "pretrain"),
        ("llama", "finetuning", "finetune"),
        ("llama", "finetuning", "lora"),
    ],
)
def test_doctor_passes_what_it_writes(init, assets, model, data, goal, gpus):
    if goal == "lora":
        pytest.importorskip("peft", reason="needs the extra peft")
    known = model if model in SHAPES else assets / model
    tokenizer = f"--tokenizer={assets}/tokenizer"
    done = init(*options(known, assets / data, goal, gpus), tokenizer)
    assert done.exit_code == 0, done.output
    (checked,) = (line for line in done.stderr.splitlines() if "composer-fsdp2 doctor" in line)
    _, _, command = checked.partition("composer-fsdp2 doctor ")
    code, said = doctor(*command.split())
    assert code == 0, said
    assert "asks for         FSDP2" in said


def test_missing_answers_are_named_where_nobody_can_be_asked(init):
    done = init("--model", "mpt-tiny", "--gpus", 0)
    assert done.exit_code == 2
    assert "Write --data ... --goal ..." in " ".join(done.stderr.split())
    assert not Path("run.yaml").exists()


def test_asks_on_a_terminal_for_what_is_missing(init, monkeypatch, assets):
    from composer_fsdp2.cli import init as module

    monkeypatch.setattr(module, "_is_terminal", lambda: True)
    done = init("--model", "mpt-tiny", "--gpus", 0, typed=f"{assets}/mds\npretrain\n")
    assert done.exit_code == 0, done.output
    assert "Data: a folder" in done.stderr
    assert "GPUs of" not in done.stderr
    assert yaml.safe_load(Path("run.yaml").read_text())["variables"]["data"] == f"{assets}/mds"


def test_a_mistake_is_said_at_once_and_the_other_answers_stay(init, monkeypatch, assets):
    from composer_fsdp2.cli import init as module

    monkeypatch.setattr(module, "_is_terminal", lambda: True)
    typed = f"mpt-tiny\n{assets}/mds\neight\n-1\n12\n0\nlora\npretain\n pretrain \n"
    done = init(typed=typed)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    for part in (
        "valid integer",
        "-1 GPUs do not fill nodes of 8",
        "12 GPUs do not fill nodes of 8",
        "The model mpt-tiny has random weights, and the goal is lora",
        "Did you mean 'pretrain'?",
    ):
        assert said.count(part) == 1
    assert said.count("Model: ") == said.count("Data: ") == 1


def test_a_wrong_option_is_said_before_the_first_question(init, monkeypatch):
    from composer_fsdp2.cli import init as module

    monkeypatch.setattr(module, "_is_terminal", lambda: True)
    done = init("--gpus", 12)
    assert done.exit_code == 2
    assert "12 GPUs do not fill nodes" in done.stderr
    assert "Model: " not in done.stderr


def test_a_file_that_exists_stays(init, assets):
    Path("run.yaml").write_text("mine: 1\n")
    given = options("mpt-tiny", assets / "mds", "pretrain")
    refused = init(*given)
    assert refused.exit_code == 2
    assert "'run.yaml' exists" in refused.stderr
    assert Path("run.yaml").read_text() == "mine: 1\n"
    assert init(*given, "--force").exit_code == 0
    assert "mine" not in Path("run.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (options("mpt-tiny", "d", "lora"), "nothing to start from"),
        (options("mpt-tiny", "d", "pretrain", 12), "12 GPUs do not fill nodes of 8"),
        (options("mpt-tiny", "d", "pretain"), "--goal"),
        ([*options("mpt-tiny", "d", "pretrain", 8), "--gpu=K80"], "--gpu is 'K80'"),
        ([*options("mpt-tiny", "d", "pretrain", 0), "--gpu=H100"], "the run has no GPUs"),
        (["/dev/null/run.yaml", *options("mpt-tiny", "d", "pretrain")], "run.yaml"),
    ],
)
def test_answers_that_cannot_be(init, given, said):
    done = init(*given)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.table("mpt-7b")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("mpt-tiny", "It fits in 79.1 GiB: a step takes "),
        ("mpt-7b", "It does not fit in 79.1 GiB: a step takes "),
    ],
    ids=["mpt-tiny", "mpt-7b"],
)
def test_whether_the_run_fits_a_gpu_is_said(init, assets, model, said):
    tokenizer = f"--tokenizer={assets}/tokenizer"
    done = init(*options(model, assets / "mds", "pretrain", 1), tokenizer, "--gpu=H100")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stderr.split())
    assert said in shown
    search = "composer-fsdp2 plan run.yaml --gpus 1 --gpu H100 --search"
    assert (search in shown) == ("not fit" in said)


def test_data_that_is_not_there_is_said(init):
    done = init(*options("mpt-tiny", "./later", "pretrain"))
    assert done.exit_code == 0
    assert "There is no './later' yet" in done.stderr


def answers(**changes: Any) -> Answers:
    given: dict[str, Any] = {"model": "a/b", "data": "c", "gpus": 8, "goal": "pretrain"}
    return Answers(**{**given, **changes})


@pytest.mark.table(
    "a/b-s3://bucket/d-lora",
    "a/b-with: colon-lora",
    "./m # 1-s3://bucket/d-pretrain",
    "1e3-s3://bucket/d-finetune",
)
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("data", ["./d", "s3://bucket/d", "name/of-data", "with: colon", "0123"])
@pytest.mark.parametrize("model", ["a/b", "./m # 1", "1e3"])
def test_the_answers_are_in_the_file_as_written(goal, data, model):
    text = starter_yaml(answers(goal=goal, data=data, model=model))
    for found in (yaml.safe_load(text), YAML(typ="safe").load(text)):
        assert found["variables"] == {"model": model, "data": data}
        assert isinstance(found["optimizer"]["lr"], float)
    assert text.count("# ") > 10


def test_several_nodes_are_hsdp():
    block = yaml.safe_load(starter_yaml(answers(gpus=32)))["parallelism_config"]["fsdp2"]
    assert block["data_parallel_shard_degree"] == 8
    assert block["data_parallel_replicate_degree"] == -1
    assert "data_parallel" not in starter_yaml(answers(gpus=8))
