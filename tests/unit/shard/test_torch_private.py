"""Private members of torch: looked up before they are needed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import PatchError
from composer_fsdp2.torch_private import members
from composer_fsdp2.torch_private.members import (
    EVERY_RUN,
    PRIVATE_MEMBERS,
    PrivateMember,
    check_private_members,
    member_states,
)
from tests.support.limits import scaled


@pytest.fixture(autouse=True)
def _looks_anew() -> Iterator[None]:
    members._is_there.cache_clear()
    members._set_by_methods.cache_clear()
    yield
    members._is_there.cache_clear()
    members._set_by_methods.cache_clear()


def test_this_torch_has_all():
    assert not [state.member for state in member_states() if not state.found]
    check_private_members({member.feature for member in PRIVATE_MEMBERS})


def row(name: str, feature: str) -> PrivateMember:
    rows = [m for m in PRIVATE_MEMBERS if m.name == name and m.feature == feature]
    return rows[0]


def owner_of(member: PrivateMember) -> type:
    module, _, name = member.owner.partition(":")
    return getattr(sys.modules[module], name)


def test_one_of_every_run_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(PatchError) as caught:
        check_private_members()
    text = str(caught.value)
    assert f"torch {torch.__version__} has no 'FSDPModule._get_fsdp_state'" in text
    assert f"{EVERY_RUN} cannot work without it" in text
    assert "Install a torch" in text
    assert "leave" not in text


def test_one_of_a_feature_is_missed_by_that_feature_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(owner_of(row("_init_extensions", "fp8")), "_init_extensions")
    check_private_members(["unused_parameters"])
    with pytest.raises(PatchError, match=r"FSDPParam._init_extensions.*or leave fp8 out"):
        check_private_members(["fp8"])


def test_one_that_only_methods_set_is_missed(monkeypatch: pytest.MonkeyPatch):
    """Attributes of instances: the methods that set this one set another one now."""
    read = inspect.getsource
    monkeypatch.setattr(
        inspect, "getsource", lambda one: read(one).replace("_partial_reduce_output", "_partial")
    )
    with pytest.raises(PatchError, match=r"FSDPParamGroup._partial_reduce_output"):
        check_private_members(["gradient_sync"])


def test_one_that_can_no_longer_be_set_is_missed(monkeypatch: pytest.MonkeyPatch):
    member = row("post_forward_mesh_info", "eval_reshard_after_forward")
    monkeypatch.setattr(owner_of(member), member.name, property(lambda _: None), raising=False)
    with pytest.raises(PatchError, match="or does not let it be set"):
        check_private_members(["eval_reshard_after_forward"])


def test_either_of_two_names_will_do(monkeypatch: pytest.MonkeyPatch):
    there = PrivateMember("torch:Tensor", "_no_such_name|_base", "x", "read")
    monkeypatch.setattr(members, "PRIVATE_MEMBERS", (there,))
    check_private_members(["x"])


@pytest.mark.matrix
def test_looking_costs_little():
    code = (
        "import time; from composer_fsdp2.prepare import model as p;"
        "from composer_fsdp2.torch_private.members import check_private_members as check;"
        "start = time.perf_counter(); check(['unused_parameters', 'gradient_sync']);"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, text=True
    )
    assert float(done.stdout) < 0.5


_DTENSOR_BEFORE_AND_AFTER = """
import gc, sys, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from composer_fsdp2 import prepare_fully_shard, uninstall

store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

def methods():
    dispatcher = DTensor._op_dispatcher
    return dict(vars(DTensor)), dict(vars(dispatcher)), dict(dispatcher._custom_op_handlers)

def prepared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepare_fully_shard(model, None, {})
    return model

before = methods()
first, second = prepared(), prepared()
assert all(now != was for now, was in zip(methods(), before))
for_two = methods()
del first
gc.collect()
assert methods() == for_two
del second
gc.collect()
assert methods() == before
third = prepared()
uninstall()
assert methods() == before
fourth = prepared()
assert methods() != before
del third, fourth
gc.collect()
assert methods() == before
dist.destroy_process_group()
"""


def test_dtensor_is_torchs_own_before_the_first_model_and_after_the_last(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", _DTENSOR_BEFORE_AND_AFTER, str(tmp_path / "store")],
        capture_output=True,
        check=False,
        text=True,
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stderr[-2000:]
