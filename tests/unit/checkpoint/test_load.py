"""What a run need not find in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from composer_fsdp2.checkpoint.load import check_fit
from composer_fsdp2.checkpoint.source import flatten, open_checkpoint

PROCESSOR = "state.integrations.huggingface.tokenizer.tokenizer.json.content.post_processor"


def state_with(processor: object) -> dict[str, Any]:
    content = {"version": "1.0", "post_processor": processor}
    tokenizer = {"tokenizer.json": {"content": content}}
    integrations = {"huggingface": {"tokenizer": tokenizer}}
    return {"state": {"model": {"weight": torch.ones(2)}, "integrations": integrations}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("saved", "run", "left_out"),
    [
        (None, {"type": "bytes"}, [f"{PROCESSOR}.type"]),
        ({"type": "bytes"}, None, [PROCESSOR]),
        ({"type": "bytes"}, {"type": "words"}, []),
    ],
)
def test_a_tokenizer_of_another_version_is_left_out(
    saved: object, run: object, left_out: list[str], tmp_path: Path
):
    """transformers 5 writes a mapping where transformers 4 wrote null."""
    dcp.save(state_with(saved), checkpoint_id=tmp_path, no_dist=True)
    wanted, _ = flatten(state_with(run))
    assert check_fit(open_checkpoint(tmp_path), wanted) == left_out
