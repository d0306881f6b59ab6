"""What users rely on. A change here is a change of the package's contract."""

from __future__ import annotations

import inspect

import pytest
import torch

import composer_fsdp2

NAMES = [
    "ActivationPlan",
    "ActivationSpec",
    "CheckpointError",
    "ConfigError",
    "FSDP2Config",
    "FSDP2Monitor",
    "Muon",
    "PatchError",
    "PlanError",
    "ShardUnit",
    "TrainerFSDP2Config",
    "WrapPlan",
    "__version__",
    "apply_activation",
    "apply_plan",
    "clip_grad_norm_",
    "install",
    "installed",
    "parse_config",
    "plan_activation",
    "plan_wrapping",
    "prepare_fully_shard",
    "sequence_attention",
    "summon_full_params",
    "tied_groups",
    "uninstall",
]


def test_the_public_names():
    assert sorted(composer_fsdp2.__all__) == NAMES
    assert dir(composer_fsdp2) == sorted(composer_fsdp2.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name):
    value = getattr(composer_fsdp2, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'prepare_module'"):
        _ = composer_fsdp2.prepare_module


def test_errors_are_what_callers_may_already_catch():
    for error in ("ConfigError", "PlanError", "CheckpointError"):
        assert issubclass(getattr(composer_fsdp2, error), ValueError)
    assert issubclass(composer_fsdp2.PatchError, RuntimeError)


def test_the_drop_in_has_the_signature_of_what_it_replaces():
    from composer.distributed import prepare_fsdp_module

    theirs = list(inspect.signature(prepare_fsdp_module).parameters.values())
    ours = list(inspect.signature(composer_fsdp2.prepare_fully_shard).parameters.values())
    assert [p.name for p in ours[:3]] == ["model", "optimizers", "fsdp2_config"]
    assert [p.name for p in theirs[:3]] == ["model", "optimizers", "fsdp_config"]
    assert [p.name for p in ours[3:]] == [p.name for p in theirs[3:]]
    assert [(p.default, p.kind) for p in ours] == [(p.default, p.kind) for p in theirs]


def test_summon_full_params_has_the_signature_of_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    theirs = inspect.signature(FSDP.summon_full_params).parameters.values()
    ours = inspect.signature(composer_fsdp2.summon_full_params).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


def test_clip_grad_norm_has_the_signature_of_torch():
    theirs = inspect.signature(torch.nn.utils.clip_grad_norm_).parameters.values()
    ours = inspect.signature(composer_fsdp2.clip_grad_norm_).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
