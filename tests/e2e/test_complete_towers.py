"""LoRA on a Llama, and a student with its teacher: trained, killed, resumed and exported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.complete_runs import IDS, PRELOAD, killed, logits, losses, run

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
pytestmark = pytest.mark.slow
__all__ = ["PRELOAD"]

SMALL = ["save_interval=4ba", "eval_interval=4ba", "eval_subset_num_batches=1"]
RUNS = ("llama-lora", "distillation")


@pytest.fixture(scope="module", params=RUNS)
def ended(request, tmp_path_factory) -> tuple[str, Path]:
    """A run, and where it was killed after batch 6 and another went on to batch 8."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    begun = killed(name, folder, *SMALL, at=6)
    assert re.search("evaluated on eval .*LanguageCrossEntropy [0-9.]+", begun.stderr)
    second = run(name, folder, *SMALL, "max_duration=8ba")
    assert second.returncode == 0, second.stderr
    return name, folder


def test_goes_on_as_if_nothing_had_happened(ended: tuple[str, Path]):
    found = losses(ended[1])
    assert list(found) == list(range(1, 9))
    assert [len(found[batch]) for batch in (1, 4, 5, 8)] == [1, 1, 2, 1]
    assert found[5][0] == found[5][1]
    assert found[8][0] < found[1][0]


def test_the_export_computes_what_the_trained_model_does(ended: tuple[str, Path]):
    name, folder = ended
    export = folder / "export" / "huggingface" / "final"
    model: Any
    if name == "llama-lora":
        base = AutoModelForCausalLM.from_pretrained(folder / "data" / "model")
        model = peft.PeftModel.from_pretrained(base, export)
        assert not (export / "model.safetensors").exists()
    else:
        model = AutoModelForCausalLM.from_pretrained(export)
    with torch.no_grad():
        found = model.eval()(input_ids=IDS).logits
        assert torch.equal(found, logits(folder))
        if name == "llama-lora":
            merged = model.merge_and_unload()(input_ids=IDS).logits
            assert torch.allclose(merged, found, atol=1e-5)
