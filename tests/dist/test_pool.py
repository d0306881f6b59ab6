"""The worker pool itself: what the other distributed tests rely on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from tests.support.limits import Limit, scaled
from tests.support.pool import Pools, RankError


def _sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


@pytest.mark.world_size(2)
def test_ranks_see_each_other():
    assert dist.get_world_size() == 2
    assert _sum_of_ranks() == 3.0


@pytest.mark.world_size(2)
def test_composer_agrees_about_ranks():
    from composer.utils import dist as composer_dist

    composer_dist.initialize_dist("cpu")
    assert composer_dist.get_global_rank() == dist.get_rank()
    assert composer_dist.get_world_size() == composer_dist.get_local_world_size() == 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["first", "second"])
def test_arguments_and_tmp_path_are_shared(name: str, tmp_path: Path):
    (tmp_path / f"{name}-{dist.get_rank()}").touch()
    dist.barrier()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{name}-0", f"{name}-1"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("attempt", [1, 2])
def test_each_test_starts_from_the_same_seed_and_environment(attempt: int):
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))
    assert os.environ.setdefault("LEFT_BY_ATTEMPT", str(attempt)) == str(attempt)


@pytest.mark.table("1")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("attempt", [1, 2])
def test_meshes_of_an_earlier_test_do_not_linger(attempt: int):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    data_parallel = mesh["dp_replicate", "dp_shard"]._flatten()
    assert funcol.all_reduce(torch.ones(()), "sum", data_parallel).item() == 2.0


@pytest.mark.world_size(2)
def test_every_rank_can_be_seen_to_raise():
    with pytest.raises(ValueError, match="on every rank"):
        raise ValueError("on every rank")
    assert _sum_of_ranks() == 3.0


@pytest.mark.world_size(2)
def test_warnings_are_errors_on_ranks():
    with pytest.raises(UserWarning, match="unexpected"):
        warnings.warn("unexpected", UserWarning, stacklevel=1)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:expected")
def test_marks_about_warnings_reach_ranks():
    warnings.warn("expected", UserWarning, stacklevel=1)


def test_skip_on_every_rank_skips(ranks):
    with pytest.raises(pytest.skip.Exception, match="with this reason"):
        ranks(2, pytest.skip, "shows as skipped, with this reason")


@pytest.mark.gpu
@pytest.mark.world_size(1, backend="nccl")
def test_gpu_rank_has_its_device():
    assert torch.cuda.current_device() == 0
    value = torch.ones((), device="cuda")
    dist.all_reduce(value)
    assert value.item() == 1.0


def test_pools_of_two_sizes_exist_together(ranks):
    assert ranks(2, _sum_of_ranks) == [3.0] * 2
    assert ranks(4, _sum_of_ranks) == [10.0] * 4


def _state_of(pid: int) -> str:
    """A letter: `T` is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ranks_take_no_time_between_tests(ranks):
    pids = [*ranks(2, os.getpid), *ranks(3, os.getpid)]
    if not Path("/proc").exists():
        return  # a system that does not say
    end = time.monotonic() + scaled(10)
    while {_state_of(pid) for pid in pids} != {"T"}:  # a rank stops when it is next awake
        assert time.monotonic() < end
        time.sleep(0.01)
    assert ranks(2, os.getpid) == pids[:2]


def _session(path: Path) -> None:
    """A session of its own that is killed while its ranks are stopped."""
    path.write_text(str(Pools().get(1).run(os.getpid)[0]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_stopped_ranks_end_with_a_session_that_is_killed(tmp_path: Path):
    file = tmp_path / "pid"
    process = multiprocessing.get_context("spawn").Process(target=_session, args=(file,))
    process.start()
    process.join(scaled(100))
    if not Path("/proc").exists():
        return  # a system that does not say, nor ends them
    rank, end = int(file.read_text()), time.monotonic() + scaled(20)
    while Path(f"/proc/{rank}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def _fail_on_rank_one() -> None:
    assert dist.get_rank() != 1
    dist.barrier()


@pytest.mark.matrix
def test_failing_rank_is_reported_soon_and_the_pool_restarts(ranks):
    ranks(2, _sum_of_ranks)
    limit = Limit(10)
    with pytest.raises(RankError) as caught:
        ranks(2, _fail_on_rank_one)
    assert limit.left()
    report = str(caught.value)
    assert "rank 1 failed" in report
    assert "assert 1 != 1" in report  # the values, as pytest shows them
    assert "rank 0 was still busy when another rank failed" in report
    assert "in barrier" in report  # and where it was
    assert ranks(2, _sum_of_ranks) == [3.0, 3.0]


def _die_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


@pytest.mark.matrix
def test_dead_rank_is_reported(ranks):
    with pytest.raises(RankError, match="rank 0 failed\ndied, exit code 7"):
        ranks(2, _die_on_rank_zero)
    assert ranks(2, _sum_of_ranks) == [3.0, 3.0]


@pytest.mark.matrix
def test_rank_out_of_time_is_reported_with_its_stack(ranks):
    ranks(2, _sum_of_ranks)
    with pytest.raises(RankError, match=r"still busy after 1 s\n(?s:.*)"):
        ranks(2, time.sleep, 60, timeout=1)


def _warn() -> None:
    warnings.warn("nobody listed this", DeprecationWarning, stacklevel=1)


def test_unlisted_warning_fails_the_test(ranks):
    with pytest.raises(RankError, match="DeprecationWarning: nobody listed this"):
        ranks(2, _warn)
