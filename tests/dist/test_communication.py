"""Switches of newer torch, where it has them; where it has not, asking is an error."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.errors import ConfigError
from tests.support.models import TinyLM
from tests.support.parity import Recipe, check_parity

SWITCHES = {
    "reduce_scatter_buffers": (2, "set_reduce_scatter_max_input_buffers"),
    "separate_reduce_scatter_group": (True, "set_separate_reduce_scatter_group"),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", SWITCHES)
def test_trains_the_same_or_says_which_torch_has_it(name: str):
    value, method = SWITCHES[name]
    config: dict[str, Any] = {"communication": {name: value}}
    if not hasattr(FSDPModule, method):
        with pytest.raises(ConfigError, match=rf"'communication\.{name}' .*install a newer torch"):
            prepare_fully_shard(TinyLM(), None, config)
        return
    model = check_parity(TinyLM, config, recipe=Recipe(steps=3))
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    groups = [state._fsdp_param_group for state in states]
    assert len(groups) == 4
    if name == "reduce_scatter_buffers":
        assert {group.reduce_scatter_max_input_buffers for group in groups} == {2}
    else:
        made = {group._reduce_scatter_process_group for group in groups}
        assert len(made) == 1
        assert made.isdisjoint(group.mesh_info.shard_process_group for group in groups)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["allocate_from_process_group", "symmetric_memory"])
def test_what_needs_nccl_says_so_on_the_cpu(name: str):
    with pytest.raises(ConfigError, match=rf"'communication\.{name}' is set"):
        prepare_fully_shard(TinyLM(), None, {"communication": {name: True}})
