"""What symmetric memory needs of NCCL, from its version and variables."""

from __future__ import annotations

import pytest

from composer_fsdp2.config.placement import Communication
from composer_fsdp2.shard.communication import VARIABLES, missing_for

ASKED = Communication(symmetric_memory=True)
NEW, POLICY = (2, 30, 7), {"NCCL_CTA_POLICY": "2"}


def said(environment: dict[str, str], nccl: tuple[int, ...] | None = NEW, **place: bool):
    return [(one.what, one.needed) for one in missing_for(ASKED, environment, nccl, **place)]


def test_nothing_is_missing():
    assert said(POLICY) == []
    assert said(POLICY, None) == []
    assert (
        said({"NCCL_CTA_POLICY": "zero", "NCCL_CUMEM_ENABLE": "1", "NCCL_P2P_DISABLE": "0"}) == []
    )


def test_nothing_is_said_where_it_is_not_asked_for():
    off = dict.fromkeys(VARIABLES, "0")
    assert missing_for(Communication(sum_reductions=True), off, (2, 20, 0)) == []


@pytest.mark.parametrize("environment", [{}, {"NCCL_CTA_POLICY": "1"}, {"NCCL_CTA_POLICY": ""}])
def test_copy_engines_are_asked_for_by_a_variable(environment: dict[str, str]):
    ((what, needed),) = said(environment)
    assert "NCCL_CTA_POLICY is not 2" in what
    assert not needed
    assert said(environment, one_node=False) == []


def test_copy_engines_came_later():
    ((what, needed),) = said(POLICY, (2, 27, 5))
    assert "NCCL 2.27.5 has no gathers through copy engines" in what
    assert not needed


def test_windows_came_with_a_version():
    ((what, needed),) = said(POLICY, (2, 26, 2))
    assert "torch has NCCL 2.26.2 here" in what
    assert needed


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_CUMEM_ENABLE", "0"), ("NCCL_WIN_ENABLE", "0"), ("NCCL_P2P_DISABLE", "1")],
)
def test_variables_that_take_it_away(name: str, value: str):
    assert name in VARIABLES
    ((what, needed),) = said({**POLICY, name: value})
    assert f"{name}={value} takes " in what
    assert needed
