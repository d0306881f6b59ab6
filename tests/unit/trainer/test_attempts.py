"""What an attempt at a batch takes back before the next one."""

from __future__ import annotations

import pytest
import torch

from composer_fsdp2.trainer.loop.attempts import _begin_scaling_again


def test_gradients_are_unscaled_once_more_with_the_same_scale():
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    _begin_scaling_again(None)
    _begin_scaling_again(torch.amp.GradScaler("cpu", enabled=False))
    _begin_scaling_again(scaler)  # no loss was scaled yet
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.0, 1.0]
        with pytest.raises(RuntimeError, match="unscale_"):
            scaler.unscale_(optimizer)
        _begin_scaling_again(scaler)
        assert scaler.get_scale() == 8.0
