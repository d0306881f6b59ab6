"""Steps that the ways of loading share."""

from __future__ import annotations

import pytest
import torch

from composer_fsdp2.trainer.checkpoint.load_steps import _loses_precision


@pytest.mark.parametrize(
    ("stored", "run", "loses"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float8_e4m3fn, torch.float32, False),
        (torch.float32, torch.float8_e4m3fn, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, False),
        (torch.uint16, torch.int32, False),
    ],
)
def test_precision(stored: torch.dtype, run: torch.dtype, loses: bool):
    assert _loses_precision(stored, run) is loses
