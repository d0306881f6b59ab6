"""Newton-Schulz against what it approximates, and against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composer_fsdp2 import Muon
from composer_fsdp2.optim.muon.newton_schulz import lr_ratio, orthogonalise

HOW = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
EXACT = ((1.875, -1.25, 0.375), 30, 1e-7)
"""coefficients with which it converges"""


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (2, 31)])
def test_it_goes_to_the_nearest_orthogonal_matrix(shape: tuple[int, int]):
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(orthogonalise(matrix, *EXACT), u @ v, atol=1e-4, rtol=0)


def test_what_is_given_stays():
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(5, 8, dtype=dtype)
        before = matrix.clone()
        assert orthogonalise(matrix, *HOW).dtype is dtype
        assert torch.equal(matrix, before)


def test_no_gradient_is_no_step():
    assert torch.equal(orthogonalise(torch.zeros(4, 3), *HOW), torch.zeros(4, 3))


def stepped(grad: torch.Tensor, blocks: Any) -> torch.Tensor:
    """What the first step adds to a matrix, where shapes change no rate and nothing decays."""
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    group = {"params": [param], "algorithm": "muon", "blocks": blocks}
    settings = {"lr": 1.0, "weight_decay": 0.0, "nesterov": False, "momentum": 0.0}
    Muon([group], **settings, adjust_lr_fn="original", iteration_dtype="fp32").step()
    return -param.detach()


@pytest.mark.parametrize("blocks", [(4, 2, 2), {"turns": 2, "outputs": [2, 1, 1]}])
def test_blocks_are_matrices_of_their_own(blocks: Any):
    matrix = torch.randn(8, 9)
    rows = (
        [[0, 1, 4, 5], [2, 6], [3, 7]] if isinstance(blocks, dict) else [range(4), (4, 5), (6, 7)]
    )
    expected = torch.empty(8, 9)
    for one in map(list, rows):
        expected[one] = orthogonalise(matrix[one], *HOW)
    found = stepped(matrix, blocks)
    assert torch.equal(found, expected)
    assert not torch.allclose(stepped(matrix, None), found, atol=0.01)


def test_a_list_is_one_matrix_after_the_other():
    matrices = torch.randn(3, 4, 6)
    found = stepped(matrices, (2, 2))
    parts = [orthogonalise(part, *HOW) for part in matrices[1].split(2)]
    assert torch.equal(found[1], torch.cat(parts))


def test_learning_rates():
    assert lr_ratio("original", 9, 4) == 1.5
    assert lr_ratio("original", 4, 9) == 1.0
    assert lr_ratio("spectral_unclamped", 4, 16) == 0.5
    assert lr_ratio("match_rms_adamw", 4, 25) == 1.0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_same_bits_as_torchs_own_on_one_process(adjust: str, nesterov: bool):
    pair = [nn.Linear(6, 15, bias=False) for _ in range(2)]
    pair[0].weight.data.copy_(pair[1].weight.data)
    settings = {"lr": 0.02, "adjust_lr_fn": adjust, "nesterov": nesterov, "weight_decay": 0.2}
    ours = Muon(pair[0], **settings)
    theirs = torch.optim.Muon(pair[1].parameters(), **settings)  # pyright: ignore
    for _ in range(4):
        grad = torch.randn(15, 6)
        for layer, optimizer in zip(pair, (ours, theirs), strict=True):
            layer.weight.grad = grad.clone()
            optimizer.step()
    assert torch.equal(pair[0].weight, pair[1].weight)


def test_same_bits_as_adamw_for_what_is_no_matrix():
    pair = [nn.LayerNorm(7) for _ in range(2)]
    ours = Muon(pair[0], lr=1.0, adamw_lr=0.02, adamw_weight_decay=0.2)
    theirs = torch.optim.AdamW(pair[1].parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.2)
    for _ in range(4):
        for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            a.grad = torch.randn(7)
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in pair), strict=True))
