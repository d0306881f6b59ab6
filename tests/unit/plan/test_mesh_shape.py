"""The arithmetic of degrees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.plan.mesh_shape import REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS, MeshShape
from composer_fsdp2.shard.device_mesh import build_mesh


def resolve(shard: int, replicate: int | None, world_size: int) -> MeshShape:
    config = FSDP2Config(data_parallel_shard_degree=shard, data_parallel_replicate_degree=replicate)
    return MeshShape.resolve(config, world_size)


@pytest.mark.parametrize(
    ("shard", "replicate", "world_size", "degrees"),
    [
        (-1, None, 1, (1,)),
        (-1, None, 8, (8,)),
        (8, None, 8, (8,)),
        (-1, 1, 8, (1, 8)),
        (-1, 2, 8, (2, 4)),
        (-1, 8, 8, (8, 1)),
        (4, 2, 8, (2, 4)),
        (4, -1, 8, (2, 4)),
        (1, -1, 8, (8, 1)),
        (1, 1, 1, (1, 1)),
    ],
)
def test_degrees_that_fit(shard, replicate, world_size, degrees):
    assert tuple(resolve(shard, replicate, world_size).axes.values()) == degrees


@pytest.mark.parametrize(
    ("shard", "replicate", "world_size"),
    [
        (4, None, 8),
        (16, None, 8),
        (4, 4, 8),
        (2, 2, 8),
        (-1, 3, 8),
        (-1, 16, 8),
        (3, -1, 8),
        (16, -1, 8),
    ],
)
def test_degrees_that_do_not_fit_are_shown_with_the_world_size(shard, replicate, world_size):
    with pytest.raises(ConfigError) as caught:
        resolve(shard, replicate, world_size)
    message = str(caught.value)
    assert f"data_parallel_shard_degree {shard} " in message
    assert f"data_parallel_replicate_degree {replicate or 1} " in message
    assert f"world size {world_size}" in message


@given(
    st.integers(1, 64) | st.just(-1),
    st.none() | st.integers(1, 64) | st.just(-1),
    st.integers(1, 256),
)
def test_resolved_degrees_multiply_to_the_world_size(shard, replicate, world_size):
    if shard == replicate == -1:
        return
    try:
        shape = resolve(shard, replicate, world_size)
    except ConfigError:
        assert shard * (replicate or 1) != world_size
        return
    assert shape.shard * (shape.replicate or 1) == world_size
    assert shard in (-1, shape.shard)
    assert replicate in (-1, shape.replicate)


def test_axes_are_named_outermost_first():
    assert list(MeshShape(shard=4).axes) == [SHARD_AXIS]
    assert list(MeshShape(shard=4, replicate=1).axes) == [REPLICATE_AXIS, SHARD_AXIS]
    assert list(MeshShape(shard=4, replicate=2).axes.values()) == [2, 4]
    assert list(MeshShape(shard=4, tensor=2).axes) == [SHARD_AXIS, TENSOR_AXIS]


@pytest.mark.parametrize("reshard", ["auto", True, False, None, 1, 2, 4, 8])
def test_reshard_that_divides(reshard):
    MeshShape(shard=8, replicate=3).check_reshard(reshard, "the run")


@pytest.mark.parametrize("reshard", [3, 16, 24])
def test_reshard_that_does_not_divide_shows_what_would(reshard):
    with pytest.raises(ConfigError) as caught:
        MeshShape(shard=8, replicate=3).check_reshard(reshard, "'blocks.0'")
    message = str(caught.value)
    assert message.startswith(f"reshard_after_forward of 'blocks.0' is {reshard}")
    assert "shard degree 8" in message
    assert "1, 2, 4, 8" in message


def test_a_mesh_needs_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        build_mesh(MeshShape(shard=1), "cpu")
