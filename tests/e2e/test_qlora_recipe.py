"""The program of docs/recipes/qlora.md: adapters and merged weights are what the run trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from tests.support.limits import scaled
from tests.support.models import llama_config

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.new_python,
    pytest.mark.skipif(
        int(transformers.__version__.partition(".")[0]) < 5 and not torch.cuda.is_available(),
        reason="needs a CUDA device, because transformers 4 packs nowhere else",
    ),
]

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "docs" / "recipes" / "qlora.py")
RUN = "runs/qlora"


def run(folder: Path, ranks: int) -> None:
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [sys.executable, "-m", *launch, PROGRAM, "base", RUN],
        check=True,
        cwd=folder,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        timeout=scaled(240),
    )


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(16).unsqueeze(0)).logits


def test_what_is_exported_computes_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(hidden_size=64, vocab_size=64)).save_pretrained(tmp_path / "base")
    run(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    command = f"checkpoint convert {RUN}/checkpoints/ep2-ba16 {RUN}/adapters --to hf"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    # As in the run: packed anew for an evaluation, the weights would be others.
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained("base", quantization_config=packing)
    expected = logits(PeftModel.from_pretrained(base, f"{RUN}/adapters").train())
    merged = AutoModelForCausalLM.from_pretrained(f"{RUN}/merged")
    assert (logits(merged) - expected).abs().max() <= 1e-5
    unchanged = AutoModelForCausalLM.from_pretrained("base")
    assert (logits(unchanged) - expected).abs().max() > 1e-2
