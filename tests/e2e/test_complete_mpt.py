"""MPT from MDS shards: trained, evaluated, killed, resumed and exported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from composer_fsdp2 import installed
from tests.support.complete_runs import IDS, PRELOAD, killed, logits, losses, run
from tests.support.yaml_memory import has_newest

MPTForCausalLM = pytest.importorskip(
    "llmfoundry.models.mpt", reason="needs the extra foundry"
).MPTForCausalLM
save_registry = pytest.importorskip("llmfoundry.utils.registry_utils").save_registry
pytestmark = pytest.mark.slow
__all__ = ["PRELOAD"]

NAME = "mpt-pretrain-mds"
SMALL = [
    "variables.text.megabytes=0.1",
    "save_interval=4ba",
    "eval_interval=4ba",
    "eval_subset_num_batches=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where a run was killed after batch 6 and another went on to batch 8."""
    folder = tmp_path_factory.mktemp("mpt")
    begun = killed(NAME, folder, *SMALL, at=6)
    assert re.search("evaluated on eval .*LanguageCrossEntropy [0-9.]+", begun.stderr)
    ended = run(NAME, folder, *SMALL, "max_duration=8ba")
    assert ended.returncode == 0, ended.stderr
    return folder


def test_goes_on_as_if_nothing_had_happened(folder):
    found = losses(folder)
    assert list(found) == list(range(1, 9))
    assert [len(found[batch]) for batch in (1, 4, 5, 8)] == [1, 1, 2, 1]
    assert found[5][0] == found[5][1]
    assert found[8][0] < found[1][0]


# MPT indexes with a list, which newer releases of torch remark on.
def test_the_export_computes_what_the_trained_model_does(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    export = folder / "export" / "huggingface" / "final"
    if has_newest():  # the folder's own code is for transformers 4
        with installed():
            model = MPTForCausalLM.from_pretrained(export)
    else:
        with save_registry():  # the code registers its layers in place of LLM Foundry's own
            model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    with torch.no_grad():
        found = model.eval()(input_ids=IDS).logits
    assert torch.equal(found, logits(folder))
