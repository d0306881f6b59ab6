"""Every YAML in the repository is planned where there is no data, no tokenizer and no network."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_fsdp2.cli import main
from composer_fsdp2.cli.init import write_quickstart
from tests.support.yaml_memory import ROOT, has_newest
from tests.support.yaml_models import PARAMETERS

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

YAMLS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "yamls").rglob("*.yaml"))


@pytest.fixture
def plan(monkeypatch, tmp_path: Path):
    """Runs `plan` on a fresh copy of `yamls/`."""
    for name in ("RANK", "WORLD_SIZE", "FSDP_VERSION", "RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_quickstart(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail(f"connects: {args}"))

    def run(*args: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(main.app, ["plan", *args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


@pytest.mark.table(
    "yamls/finetune/llama-3.2-1b.yaml",
    "yamls/newest/gpt-oss-20b.yaml",
    "yamls/pretrain/mpt-7b.yaml",
    "yamls/tensor/qwen3-32b.yaml",
)
@pytest.mark.parametrize("file", YAMLS)
def test_every_yaml_is_planned_without_data(plan, file: str):
    code, shown, said = plan(file, "--json")
    if file.startswith("yamls/newest") and not has_newest():
        assert code == 1
        assert re.search(r"is a model of type \w+, which came with transformers 5, and 4\.", said)
        return
    assert code == 0, said
    assert "problem" not in said
    found = json.loads(shown)
    if file.split("/")[1] not in ("complete", "quickstart.yaml"):
        assert found["forecast"]["flops"] > 0, found["forecast"]["notes"]


def test_degrees_that_this_machine_has_no_ranks_for(plan):
    degree = "parallelism_config.fsdp2.data_parallel_shard_degree"
    code, shown, said = plan("yamls/finetune/llama-3.2-1b.yaml", f"{degree}=16", "--json")
    assert code == 0, said
    assert "--gpus 16 is taken" in said
    assert json.loads(shown)["forecast"]["ranks"] == 16
    code, _, said = plan("yamls/finetune/llama-3.2-1b.yaml", f"{degree}=7")
    assert code == 2
    assert "does not multiply to the world size" in said


def test_sizes_of_a_model_that_nobody_knows_are_named(plan):
    run = ("yamls/pretrain/llama-3.1-8b.yaml", "variables.model=some/model", "--json")
    code, shown, said = plan(*run)
    assert (code, shown) == (1, "")
    assert "The sizes of 'some/model' are not known" in said
    assert "Write model_type and the sizes (vocab_size, hidden_size" in said
    assert "under model.config_overrides" in said
    sizes = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    written = [f"model.config_overrides.{key}={value}" for key, value in sizes.items()]
    code, _, said = plan(*run, *written)
    assert code == 1
    assert "Write num_key_value_heads under model.config_overrides" in said
    code, shown, said = plan(*run, *written, "model.config_overrides.num_key_value_heads=2")
    assert code == 0, said
    found = json.loads(shown)
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert sum(unit["numel"] for unit in found["units"]) == 2 * 1000 * 64 + 2 * layer + 64
    assert any("model.config_overrides" in note for note in found["forecast"]["notes"])


def test_a_run_of_fsdp1_is_planned_as_it_would_be_migrated(plan, tmp_path: Path):
    text = Path("yamls/finetune/llama-3.2-1b.yaml").read_text()
    block = "parallelism_config:\n  fsdp2:\n    activation_checkpointing: true\n"
    assert block in text
    old = "fsdp_config:\n  sharding_strategy: SHARD_GRAD_OP\n  activation_checkpointing: true\n"
    (tmp_path / "old.yaml").write_text(text.replace(block, old))
    code, shown, said = plan("old.yaml", "--json", "--gpus=8")
    assert code == 0, said
    assert "old.yaml asks for FSDP1" in said
    units = json.loads(shown)["units"]
    assert not any(unit["reshard_after_forward"] for unit in units)
    expected = PARAMETERS["meta-llama/Llama-3.2-1B"]
    assert sum(unit["numel"] for unit in units) == pytest.approx(expected, rel=0.005)
