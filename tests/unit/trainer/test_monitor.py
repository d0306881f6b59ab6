"""What the monitor refuses before there is a run."""

from __future__ import annotations

import pytest

from composer_fsdp2 import ConfigError, FSDP2Monitor


@pytest.mark.parametrize("flops", ["1e15", 0, -1.0, True, float("nan"), [1.0]], ids=repr)
def test_peak_flops_that_are_no_positive_number(flops):
    with pytest.raises(ConfigError) as caught:
        FSDP2Monitor(gpu_flops_available=flops)
    assert f"is {flops!r}, which is no positive number" in str(caught.value)


@pytest.mark.parametrize("flops", [None, 1, 989.5e12], ids=repr)
def test_peak_flops(flops):
    assert FSDP2Monitor(gpu_flops_available=flops).gpu_flops_available == flops
