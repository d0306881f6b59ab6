"""A pretrained model through LLM Foundry, until one rank fails: one run for both."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.forked import PRELOAD, command
from tests.support.models import llama_config

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
pytestmark = pytest.mark.slow
__all__ = ["PRELOAD"]

CHECK = """
import time
import torch
import torch.distributed as dist
from composer import Callback
from llmfoundry import registry
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

@registry.callbacks.register("compare")
class Compare(Callback):
    def __init__(self, folder):
        self.folder = folder

    def fit_start(self, state, logger):
        expected = AutoModelForCausalLM.from_pretrained(self.folder).state_dict()
        found = {k: v.full_tensor() if isinstance(v, DTensor) else v
                 for k, v in state.model.model.state_dict().items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert all(isinstance(param, DTensor) for param in state.model.parameters())
        print("EQUAL on rank", dist.get_rank(), flush=True)

    def batch_end(self, state, logger):
        print("TRAINED", state.timestamp.batch.value, flush=True)
        if state.timestamp.batch == 2 and dist.get_rank() == 1:
            print("failed at", time.time(), flush=True)
            raise RuntimeError("one rank gives up")
"""

RUN = """
parallelism_config: {{fsdp2: {{}}}}
run_name: pretrained
variables:
  data: {folder}/data
  text: {{megabytes: 0.1, vocab_size: 300}}
code_paths: [yamls/quickstart_data.py, {folder}/check.py]
max_seq_len: 32
model:
  name: hf_causal_lm
  pretrained: true
  pretrained_model_name_or_path: {folder}/model
  init_device: mixed
tokenizer: {{name: {folder}/data/tokenizer, kwargs: {{model_max_length: 32}}}}
train_loader:
  name: text
  dataset: {{local: {folder}/data, split: train, max_seq_len: 32, shuffle: false}}
  drop_last: true
  num_workers: 0
  pin_memory: false
  prefetch_factor: null
  persistent_workers: false
optimizer: {{name: decoupled_adamw, lr: 1.0e-3}}
scheduler: {{name: constant_with_warmup, t_warmup: 1ba}}
max_duration: 100ba
eval_interval: 0
global_train_batch_size: 4
device_train_microbatch_size: 2
device_eval_batch_size: 2
precision: fp32
seed: 17
callbacks: {{compare: {{folder: {folder}/model}}}}
progress_bar: false
log_to_console: false
log_config: false
python_log_level: warning
dist_timeout: 60
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run, a model in several files, and the callback that compares."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(1)
    config = llama_config(
        tied=False, vocab_size=320, hidden_size=32, intermediate_size=48, max_position_embeddings=32
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model", max_shard_size=50_000)
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    (folder / "check.py").write_text(CHECK)
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def done(folder) -> tuple[subprocess.CompletedProcess[str], float]:
    """The run, and when it was over."""
    run = command("train", f"{folder}/run.yaml", "--ranks=2", f"--log-dir={folder}/logs")
    return run, time.time()


def test_starts_from_the_folder_and_trains(done):
    run, _ = done
    assert "EQUAL on rank 0" in run.stdout
    assert "TRAINED 2" in run.stdout
    assert run.stderr.count("every rank reads only its shards of") == 1
    assert "sync_module_states" not in run.stderr


def test_a_failing_rank_ends_the_run_with_its_error(done, folder):
    run, ended = done
    assert run.returncode == 1
    report = run.stderr[run.stderr.rindex("Rank 1 failed:") :]
    assert report.startswith("Rank 1 failed: RuntimeError: one rank gives up")
    traceback = folder / "logs" / "rank-1-traceback.log"
    assert f"The traceback: {traceback}" in report
    assert "in batch_end" in traceback.read_text()
    (log,) = (folder / "logs").glob("*/attempt_0/1/stdout.log")
    assert ended - float(log.read_text().split("failed at")[1]) < 30
