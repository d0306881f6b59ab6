"""The pretend accelerator notices what a GPU would get wrong in silence."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from tests.accelerator import device
from tests.accelerator.device import BACKEND, NAME

pytestmark = pytest.mark.world_size(2, backend=BACKEND)


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, device=NAME)


def test_computes_as_the_cpu_does():
    x = torch.randn(4, 5)
    w = torch.randn(5, 3, requires_grad=True)
    own = w.detach().to(NAME).requires_grad_()
    for weight, given in ((w, x), (own, x.to(NAME))):
        (given.unfold(0, 2, 2).sum(-1) @ weight).tanh().mean().backward()
    assert own.grad is not None
    assert own.grad.device.type == NAME
    assert torch.equal(own.grad.cpu(), w.grad)


def test_autocast_is_that_of_a_gpu():
    x, weight = ones(3, 3), torch.ones(3, 3, device=NAME, requires_grad=True)
    with torch.autocast(NAME, torch.bfloat16):
        product = x @ weight
        norm = torch.nn.functional.layer_norm(product, (3,))
    assert (product.dtype, norm.dtype) == (torch.bfloat16, torch.float32)
    product.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_missing_wait_is_an_error():
    value, stream = ones(3), torch.pretend.Stream()
    stream.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(stream):
        value.add_(1)
    with pytest.raises(RuntimeError, match=r"reads memory that aten::add on stream \d+ wrote"):
        value + 1
    torch.pretend.current_stream().wait_event(stream.record_event())
    assert (value + 1).tolist() == [3.0, 3.0, 3.0]


def test_a_write_waits_for_reads():
    value, stream = ones(3), torch.pretend.Stream()
    stream.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(stream):
        value + 1
    with pytest.raises(RuntimeError, match=r"writes memory that aten::add on stream \d+ read"):
        value.zero_()
    stream.synchronize()
    value.zero_()


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_goes_back_when_no_stream_uses_it(recorded: bool):
    value, stream = ones(3), torch.pretend.Stream()
    stream.wait_stream(torch.pretend.current_stream())
    with torch.pretend.stream(stream):
        value + 1
    if recorded:
        value.record_stream(stream)
    del value
    if not recorded:
        with pytest.raises(RuntimeError, match="freed without record_stream or a wait"):
            ones(3)
        stream.synchronize()
    ones(3)


def test_a_copy_to_the_host_arrives_when_the_host_waits():
    target = torch.zeros(3, device="cpu").pin_memory()
    target.copy_(ones(3), non_blocking=True)
    assert target.tolist() == [0.0, 0.0, 0.0]
    torch.pretend.current_stream().synchronize()
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match=r"a tensor of shape \[3\] on the CPU"):
        ones(3) @ torch.ones(3)
    assert (ones(3) + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number may


def test_memory_runs_out():
    with device.limited_memory(1000), pytest.raises(torch.OutOfMemoryError, match="4000 bytes"):
        torch.empty(1000, device=NAME)
    assert torch.empty(1000, device=NAME).isnan().all()  # nobody wrote there


def test_reads_of_the_host_are_counted():
    value = ones(3)
    with device.waits() as found:
        value.add_(1).sum()
        torch.ones(3).pin_memory().to(NAME, non_blocking=True)
    assert not found
    with device.waits() as found:
        value.sum().item()
        value.to("cpu")
        torch.ones(3).to(NAME)
        value.nonzero()
        torch.pretend.synchronize()
    kinds = [name.partition(" in ")[0] for name in found]
    expected = ["item", "copy to the host", "copy to the device", "aten::nonzero"]
    assert kinds == [*expected, "synchronize the device"]
    assert all(name.endswith("test_device.test_reads_of_the_host_are_counted") for name in found)


def test_a_collective_has_a_stream_of_its_own():
    value = ones(3)
    work = dist.all_reduce(value, async_op=True)
    with pytest.raises(RuntimeError, match=r"reads memory that c10d::allreduce_ .* wrote"):
        value + 1
    assert work is not None
    work.wait()
    assert (value + 1).tolist() == [3.0, 3.0, 3.0]
