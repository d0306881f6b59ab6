"""Files of other trainers, and files that cannot be read, where a run belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.tools.migrate.engine import migrate

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

FOREIGN = {
    "Accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
    "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n",
    "Accelerate ": "distributed_type: MULTI_GPU\nnum_processes: 8\n",
    "DeepSpeed": '{"zero_optimization": {"stage": 3}, "train_batch_size": 8}',
    "DeepSpeed ": '{"zero_optimization": {"stage": 3}}',
    "ROLL": "rollout_batch_size: 8\nactor_train:\n  strategy_args:\n"
    "    strategy_name: fsdp2_train\n    strategy_config: {fsdp_size: 8}\n",
    "TrainingArguments": "output_dir: x\nper_device_train_batch_size: 1\nfsdp: full_shard\n",
}
UNCONVERTED = {
    "verl": "actor_rollout_ref:\n  actor: {fsdp_config: {param_offload: false}}\n",
    "verl ": "model: {partial_pretrain: x, fsdp_config: {model_dtype: fp32}}\noptim: {lr: 1}\n",
    "verl  ": "engine: {fsdp_size: -1, ulysses_sequence_parallel_size: 1}\n",
    "verl   ": "actor_rollout_ref: {actor: {strategy: veomni, veomni: {fsdp_size: -1}}}\n",
    "axolotl": "base_model: x\ndatasets: []\nsequence_len: 8\nfsdp: [full_shard]\n",
    "axolotl ": "base_model: x\nsequence_len: 8\ndeepspeed: zero3.json\nmicro_batch_size: 1\n",
    "axolotl  ": "a: {base_model: x, datasets: [], fsdp_version: 2, fsdp_config: {}}\n",
    "LLaMA-Factory": "stage: sft\ntemplate: llama3\nfsdp: full_shard\noutput_dir: x\n",
    "LLaMA-Factory ": "finetuning_type: full\ndeepspeed: ds.json\nlearning_rate: 1e-5\n",
    "TRL": "accelerate_config: zero3\noutput_dir: x\nlearning_rate: 1e-5\n",
    "TRL ": "dataset_text_field: text\nfsdp: full_shard auto_wrap\noutput_dir: x\n",
}


@pytest.fixture
def invoke(monkeypatch):
    """Runs a command in this process; starting ranks would be a failure."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        main.launch, "launch_ranks", lambda *args: pytest.fail(f"ranks started: {args}")
    )
    return lambda *args: CliRunner().invoke(main.app, list(map(str, args)))


def arguments(command: str, path: Path) -> list[object]:
    return [command, path, path] if command == "parity" else [command, path]


def code(command: str) -> int:
    """For `doctor` it is a problem of the run, like others."""
    return 1 if command == "doctor" else 2


@pytest.mark.table("Accelerate-train")
@pytest.mark.parametrize("command", ["train", "eval", "doctor", "parity"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_trainer_is_named(invoke, write, kind: str, command: str):
    path = write(FOREIGN[kind])
    result = invoke(*arguments(command, path))
    said = " ".join(result.output.split())
    assert result.exit_code == code(command)
    assert kind.strip() in said
    assert f"composer-fsdp2 migrate {path}" in said


@pytest.mark.table("verl-migrate", "axolotl-train", "LLaMA-Factory-doctor", "TRL-migrate")
@pytest.mark.parametrize("command", ["migrate", "train", "eval", "doctor", "parity"])
@pytest.mark.parametrize("kind", UNCONVERTED)
def test_a_file_that_migrate_does_not_convert(invoke, write, kind: str, command: str):
    """Every command says the same, and none sends its user to another one."""
    path = write(UNCONVERTED[kind])
    result = invoke(*arguments(command, path))
    said = " ".join(result.output.split())
    assert result.exit_code == code(command)
    assert f"is a file of {kind.strip()}, which is not converted" in said
    assert "yamls/quickstart.yaml" in said
    assert "composer-fsdp2 migrate" not in said


def test_a_run_of_foundry_is_no_file_of_another_trainer(write):
    """Keys of other trainers in a run say nothing, and a dialect that is asked for is read."""
    run = "max_duration: 1ba\nbase_model: x\ndatasets: []\nfsdp_config: {verbose: true}\n"
    assert migrate(run).dialect == "composer"
    mine = "base_model: x\ndatasets: []\nfsdp: full_shard auto_wrap\nbf16: true\n"
    assert migrate(mine, dialect="huggingface").dialect == "huggingface"


@pytest.mark.parametrize("command", ["train", "doctor", "plan"])
def test_an_evaluation_is_told_of_its_command(invoke, write, command: str):
    path = write("models: []\nicl_tasks: x.yaml\nmax_seq_len: 8\n")
    result = invoke(command, path)
    assert result.exit_code == code(command)
    assert f"composer-fsdp2 eval {path}" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_job_of_mcli_is_named(invoke, write, command: str):
    result = invoke(command, write("image: x\nparameters: {max_duration: 1ep}\n"))
    assert result.exit_code == 2
    assert "its run stands under 'parameters'" in " ".join(result.stderr.split())


@pytest.mark.table(
    "max_duration: 1ep\\nparallelism_config: {fsdp2: {verbose: '${foo'}}-train",
    "max_duration: 1ep\\nparallelism_config: '${foo'-doctor",
)
@pytest.mark.parametrize("command", ["train", "eval", "doctor", "parity"])
@pytest.mark.parametrize(
    "text",
    [
        "max_duration: ${foo\nparallelism_config: {fsdp2: {}}",
        "max_duration: 1ep\nparallelism_config: {fsdp2: {verbose: '${foo'}}",
        "max_duration: 1ep\nparallelism_config: '${foo'",
        "max_duration: 1ep\nmodel: {a: ['${foo']}",
        "max_duration: '${a:b:c}}${'",
    ],
)
def test_an_interpolation_that_is_not_closed(invoke, write, command: str, text: str):
    result = invoke(*arguments(command, write(text)))
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2)
    said = " ".join((result.output + result.stderr).split())
    assert "Traceback" not in said
    assert "holds an interpolation that cannot be read" in said
