"""The command line: what it refuses before a process starts, and what it hands on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.config.schema import FORECAST

ROOT = Path(__file__).parents[3]
pytest.importorskip("llmfoundry", reason="needs the extra foundry")


@pytest.fixture
def train(monkeypatch):
    """Runs `composer-fsdp2 train` in this process; starting ranks would be a failure."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        main.launch, "launch_ranks", lambda *args: pytest.fail(f"ranks started: {args}")
    )
    # A process of its own, which takes seconds; tests/e2e/test_checked_first.py has it.
    monkeypatch.setattr(main, "_ask_doctor", lambda *args: None)

    def run(*args: str):
        return CliRunner().invoke(main.app, ["train", *map(str, args)])

    return run


def refused(result, *parts: str) -> None:
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    message = " ".join(result.stderr.split())
    for part in parts:
        assert part in message


# --- Refused before ranks start. ---


def test_missing_file(train):
    refused(train("nowhere.yaml"), "ConfigError", "no file 'nowhere.yaml'", "from /")


def test_a_folder(train, tmp_path):
    refused(train(tmp_path), "is a folder", "Write the path of the file in it")


def test_broken_yaml(train, write):
    refused(train(write("a: [1, 2")), "is not valid YAML", "line 1")


def test_binary_file(train, tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    refused(train(tmp_path / "run.yaml"), "is not valid YAML")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "{}"])
def test_yaml_without_settings(train, write, text):
    refused(train(write(text)), "holds no settings", "quickstart.yaml")


@pytest.mark.parametrize("item", ["max_duration", "=1ba", "max_duration:1ba"])
def test_malformed_override(train, write, item):
    refused(train(write("a: 1"), item), f"'{item}' is not an override", "Write key=value")


def test_override_with_a_broken_value(train, write):
    refused(train(write("a: 1"), "a=1", "b=[1"), "The override 'b=[1' cannot be applied")


def test_wrong_parallelism_config(train, write):
    result = train(write("parallelism_config: {fsdp2: {reshard_after_forwrd: true}}"))
    refused(result, "'reshard_after_forwrd'", "Did you mean 'reshard_after_forward'?")


def test_more_ranks_than_a_machine_can_start(train, write):
    run = write("parallelism_config: {fsdp2: {}}\n")
    refused(train(run, "--ranks", "1000000"), "-n is 1000000", "or less")


def test_degrees_that_do_not_fit_the_ranks(train, write):
    path = write("parallelism_config: {fsdp2: {data_parallel_shard_degree: 3}}")
    refused(train(path, "-n", "2"), "data_parallel_shard_degree 3", "to the world size 2")


def test_wrong_parallelism_config_in_an_override(train, write):
    path = write("parallelism_config: {fsdp2: {}}")
    refused(train(path, "parallelism_config.fsdp2.verbose=3"), "verbose: 3 is invalid")


def test_interpolation_that_leads_nowhere(train, write):
    path = write("parallelism_config: {fsdp2: {verbose: '${nowhere}'}}")
    refused(train(path), "interpolation cannot be resolved", "nowhere")


@pytest.mark.parametrize(
    ("module", "advice"),
    [("llmfoundry", "composer-fsdp2[foundry]"), ("pkg_resources", "setuptools<81")],
)
def test_missing_package(train, write, monkeypatch, module, advice):
    monkeypatch.setitem(sys.modules, module, None)
    refused(train(write("a: 1")), "pip install", advice)


def test_options_of_another_launcher(train, write, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(train(write("seed: 1"), "-n", "2"), "a launcher has already started the ranks")


def test_zero_ranks(train, write):
    result = train(write("seed: 1"), "-n", "0")
    assert result.exit_code == 2
    assert "'--ranks'" in result.stderr


# --- Accepted. ---


def test_interpolations_elsewhere_may_wait(train, write, monkeypatch):
    """A file in `code_paths` may bring the resolver."""
    started = []
    monkeypatch.setattr(main.launch, "launch_ranks", lambda *args: started.append(args))
    path = write("run_name: ${later:1}\nparallelism_config: {fsdp2: {}}")
    assert train(path, "variables.b=1", "-n", "3").exit_code == 0
    [(command, ranks, _)] = started
    assert (command[-3:], ranks) == (["train", str(path), "variables.b=1"], 3)


@pytest.mark.parametrize(
    ("offload", "given", "threads"), [("true", "", "2"), ("false", "", ""), ("true", "1", "1")]
)
def test_an_optimizer_on_the_cpu_has_all_cores(train, write, monkeypatch, offload, given, threads):
    monkeypatch.setattr(main.launch, "launch_ranks", lambda *args: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(5))
    monkeypatch.setattr(os, "environ", {**os.environ, "OMP_NUM_THREADS": given})
    if not given:
        del os.environ["OMP_NUM_THREADS"]
    path = write(f"parallelism_config: {{fsdp2: {{cpu_offload: {offload}}}}}")
    assert train(path, "--ranks", "2", "--no-check").exit_code == 0
    assert os.environ.get("OMP_NUM_THREADS", "") == threads


def test_a_duration_without_unit_is_said(train, write, monkeypatch):
    monkeypatch.setattr(main.launch, "launch_ranks", lambda *args: None)
    done = train(write("parallelism_config: {fsdp2: {}}\nmax_duration: 1ba"), "max_duration=300")
    assert "max_duration is 300 without a unit, which is 300 epochs" in done.stderr
    done = train(write("parallelism_config: {fsdp2: {}}\nmax_duration: 300ba"))
    assert "max_duration" not in done.stderr


def test_eval_starts_ranks_that_evaluate(train, write, monkeypatch):
    started = []
    monkeypatch.setattr(main.launch, "launch_ranks", lambda *args: started.append(args))
    path = write("parallelism_config: {fsdp2: {}}")
    result = CliRunner().invoke(main.app, ["eval", str(path), "variables.b=1", "-n", "3"])
    assert result.exit_code == 0
    [(command, ranks, _)] = started
    assert (command[-3:], ranks) == (["eval", str(path), "variables.b=1"], 3)


def test_eval_refuses_what_train_refuses(train, write):
    path = write("parallelism_config: {fdsp2: {}}")
    refused(CliRunner().invoke(main.app, ["eval", str(path)]), "Did you mean 'fsdp2'?")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1", "has no `parallelism_config.fsdp2` and runs without FSDP."),
        ("fsdp_config: {a: 1}", "runs with FSDP1 (`fsdp_config`)."),
        ("parallelism_config: {fsdp2: {}}", None),
    ],
)
def test_as_a_rank_it_says_when_fsdp2_is_not_requested(train, write, monkeypatch, text, said):
    trained = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(main, "_train_from_yaml", lambda *args: trained.append(args))
    path = write(text)
    result = train(path, "seed=2")
    assert trained == [(path, ["seed=2"])]
    assert ("FSDP2 is not requested" in result.stderr) == (said is not None)
    assert said is None or said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("rank", "restarts", "options", "asks"),
    [("0", "0", (), 1), ("0", "0", ("--no-check",), 0), ("0", "1", (), 0), ("1", "0", (), 0)],
)
def test_the_first_rank_of_another_launcher_asks_doctor(
    train, write, monkeypatch, rank, restarts, options, asks
):
    asked = []
    given = {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": restarts}
    for name, value in {**given, "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(main, "_ask_doctor", lambda *args: asked.append(args))
    monkeypatch.setattr(main, "_train_from_yaml", lambda *args: None)
    path = write("parallelism_config: {fsdp2: {}}\ndist_timeout: 60")
    assert train(path, *options).exit_code == 0
    assert asked == [(path, [], 2, 30)] * asks


@pytest.mark.parametrize("step", [None, {"gathered_bytes": 1}], ids=["none", "bytes"])
def test_ranks_are_given_what_doctor_predicts(write, monkeypatch, step):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(FORECAST, "")  # put back after the test
    monkeypatch.delenv(FORECAST)
    report = subprocess.CompletedProcess(
        [], 0, json.dumps({"findings": [], "predicted_step": step}), ""
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: report)
    given = []
    monkeypatch.setattr(
        main.launch, "launch_ranks", lambda *_: given.append(os.environ.get(FORECAST))
    )
    path = write("parallelism_config: {fsdp2: {}}\ndist_timeout: 60")
    assert CliRunner().invoke(main.app, ["train", str(path), "--ranks=2"]).exit_code == 0
    assert given == [step and json.dumps(step)]


def broken(*_args: object) -> None:
    raise ValueError("of somebody else")


def test_an_error_of_a_rank_of_another_launcher_is_a_sentence(train, write, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(main, "_train_from_yaml", broken)
    done = train(write("parallelism_config: {fsdp2: {}}"))
    assert done.exit_code == 1
    assert "Rank 3: ValueError: of somebody else" in done.stderr
    assert "Traceback" not in done.output
    log = done.stderr.split()[-1]
    assert "in broken" in Path(log).read_text()
    Path(log).unlink()


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("init", "init [OPTIONS] [FILE] "),
        ("doctor", "doctor [OPTIONS] [CONFIG] [key=value]... "),
        ("checkpoint convert", "convert [OPTIONS] "),
    ],
)
def test_short_help_and_usage(command, usage):
    done = CliRunner().invoke(main.app, [*command.split(), "-h"])
    assert done.exit_code == 0
    assert usage in done.output


def test_help_is_quick_and_lists_the_commands():
    code = "import sys; from composer_fsdp2.cli.main import app; "
    code += "app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "train" in done.stdout, done.stderr
    assert "doctor" in done.stdout
    assert done.stdout.endswith("False\n")
