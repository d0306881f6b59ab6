"""Switches of newer torch, where it has them; where it has not, asking is an error."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2.config.placement import Communication
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.shard import averaging, communication
from composer_fsdp2.shard.communication import METHODS, apply_communication, check_communication
from tests.support.models import TinyLM
from tests.support.parity import Recipe, check_parity

SWITCHES = {
    "sum_reductions": (True, "set_force_sum_reduction_for_comms"),
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
    if name == "sum_reductions":
        assert all(group.force_sum_reduction_for_comms for group in groups)
    elif name == "reduce_scatter_buffers":
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


NO_SUMS = "torch has no set_force_sum_reduction_for_comms"
sums = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"), reason=NO_SUMS
)


@sums
@pytest.mark.world_size(4)
@pytest.mark.parametrize("size", [1, 2])
def test_sums_are_divided_over_all_copies(size: int):
    """By SGD, which a factor in the gradients leads elsewhere."""
    config = {"data_parallel_replicate_degree": 2, "communication": {"sum_reductions": True}}
    check_parity(TinyLM, config, optimizer="sgd", recipe=Recipe(steps=3, microbatches=size))


@sums
@pytest.mark.world_size(2)
@pytest.mark.parametrize("size", [1, 2])
def test_sums_are_divided_once_where_the_backend_does_not_average(size: int):
    """The gloo of older torch sums where it should average, and a hook divides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "_averages_reduce_scatter", lambda *_: False)
        config = {"communication": {"sum_reductions": True}}
        check_parity(TinyLM, config, optimizer="sgd", recipe=Recipe(steps=3, microbatches=size))


@pytest.mark.world_size(2)
def test_what_torch_is_told_and_in_which_order():
    """Symmetric memory is set last: torch looks at group and reduction then."""
    told: list[tuple[Any, ...]] = []
    model = TinyLM()
    prepare_fully_shard(model, None, {})
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    settings = Communication(
        separate_reduce_scatter_group=True, sum_reductions=True, symmetric_memory=True
    )
    with pytest.MonkeyPatch.context() as patch:
        for method in METHODS.values():

            def tell(unit: Any, *args: Any, method: str = method) -> None:
                told.append((method, units.index(unit), *args))

            patch.setattr(FSDPModule, method, tell, raising=False)
        apply_communication(units[:1], units, settings)
    numbers = range(len(units))
    assert told == [
        ("set_separate_reduce_scatter_group", 0, True),
        *(("set_force_sum_reduction_for_comms", number, True) for number in numbers),
        *(("set_symm_mem_for_comm", number) for number in numbers),
    ]


TOGETHER = {
    "allocate_from_process_group": "are both set",
    "reduce_scatter_buffers": "'communication.reduce_scatter_buffers' is 2",
}


@pytest.mark.parametrize("other", TOGETHER)
def test_buffers_that_symmetric_memory_cannot_be(other: str):
    value = 2 if other == "reduce_scatter_buffers" else True
    settings = Communication(symmetric_memory=True, sum_reductions=True, **{other: value})
    with pytest.raises(ConfigError, match=TOGETHER[other]):
        check_communication(settings, "cuda", {})


@pytest.mark.parametrize("name", ["NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"])
def test_variables_that_take_symmetric_memory_away(name: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_symm_mem_for_comm", lambda _: None, raising=False)
        patch.setattr(communication, "nccl_version", lambda: (2, 30, 0))
        settings = Communication(symmetric_memory=True)
        check_communication(settings, "cuda", {name: "1"})
        with pytest.raises(ConfigError, match=f"{name}=0 takes .* away"):
            check_communication(settings, "cuda", {name: "0"})
