"""A converted file of another trainer is a run: `doctor` passes it and two ranks train it.

What such a file cannot say (model, tokenizer, data) is added, and sizes are those of a test.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.foundry.run_file import read_run
from composer_fsdp2.tools.migrate.document import dump
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Status, value_at
from tests.support.data_folder import CONFIGS
from tests.support.foundry import PRELOAD, VOCAB, llama, run_of, tell, write_assets

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
__all__ = ["PRELOAD"]

LEFT = ("strategy_name", "dataloader_num_workers")
"""keys of the old trainer that are left as written"""
ALWAYS = ("run_name", "eval_interval", "dist_timeout", "python_log_level")
"""keys that keep a test short"""
DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}
FROZEN = "model.embed_tokens"
EXAMPLES = {
    "roll": (
        (CONFIGS / "roll-actor-critic.yaml")
        .read_text()
        .replace("model_args: {", f"model_args: {{freeze_module_prefix: {FROZEN}, ", 1),
        "actor_train.strategy_args",
    ),
    "accelerate": ((CONFIGS / "accelerate-fsdp2-dpo.yaml").read_text(), ""),
    "huggingface": ((CONFIGS / "hf-trainer-full-shard.yaml").read_text(), "training"),
    "deepspeed": (json.dumps(DEEPSPEED), ""),
}
"""a file of each trainer, and the mapping in it that becomes the run"""
GIVEN: dict[str, dict[str, Any]] = {
    "huggingface": {"world_size": 2, "decisions": {"training.num_train_epochs": 1}}
}
"""what the file leaves to its user"""
SMALL = [
    "precision=fp32",
    "max_duration=2ba",
    "global_train_batch_size=8",
    "device_train_microbatch_size=2",
    "parallelism_config.fsdp2.data_parallel_shard_degree=2",
    "parallelism_config.fsdp2.data_parallel_replicate_degree=1",
    # Composer changes the rate after a batch to what it was meant to be in it: 0 in both.
    "scheduler.t_warmup=0ba",
]
"""for two ranks of a CPU"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "qwen3")
    return folder


@pytest.mark.parametrize("trainer", EXAMPLES)
def test_is_a_run(trainer: str, ranks, assets: Path, tmp_path: Path):
    text, place = EXAMPLES[trainer]
    report = migrate(text, **GIVEN.get(trainer, {}))
    assert not report.having(Status.DECISION, Status.UNSUPPORTED)
    new = value_at(yaml.safe_load(report.text), tuple(filter(None, place.split("."))))
    # As the report says: what is new goes to the top, what the run needs beside it is written.
    converted = {key: value for key, value in new.items() if key not in LEFT}
    said = re.findall(r"`(\w+): ", report.remarks[-1])
    run = run_of(assets, llama(assets, "qwen3"))
    file = tmp_path / "new.yaml"
    file.write_text(dump({key: run[key] for key in (*said, *ALWAYS) if key in run} | converted))
    overrides = [*SMALL, f"save_folder={tmp_path}/saved"]
    doctor = CliRunner().invoke(app, ["doctor", str(file), "--ranks", "2", *overrides])
    assert doctor.exit_code == 0, doctor.output
    cfg: Any = OmegaConf.to_container(read_run(file, [*overrides, "loggers.told={}"]))
    told, other = ranks(2, tell, cfg)
    assert told.sharded
    assert told.batches == 2
    assert told.losses == other.losses
    assert all(map(math.isfinite, told.losses))
    saved = [path.name for path in (tmp_path / "saved").iterdir() if not path.is_symlink()]
    # Every tenth of two batches is each of them; all others save at the end alone.
    assert len(saved) == (2 if trainer == "huggingface" else 1), saved
    _check_moved(told.weights, assets, {FROZEN} if trainer == "roll" else set())


def _check_moved(weights: dict[str, torch.Tensor], assets: Path, frozen: set[str]) -> None:
    """Checks which weights are those that training began with."""
    first = Qwen3ForCausalLM.from_pretrained(assets / "qwen3").state_dict()
    still = {name for name, value in first.items() if torch.equal(weights[f"model.{name}"], value)}
    assert {name.removesuffix(".weight") for name in still} == frozen
