"""What ranks tell each other in a step: how often, and without a host that waits for its device."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import statistics
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.callbacks import NaNMonitor
from composer.core import Callback, State

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.step import agreement, gloo
from composer_fsdp2.step.agreement import Agreement, agreement_of, connected
from composer_fsdp2.step.gloo import takes_cpu_tensors
from composer_fsdp2.torch_private.collectives import Collective, around_collectives
from composer_fsdp2.torch_private.tensors import timeout_of
from tests.support.experts import Sparse, choose
from tests.support.limits import scaled
from tests.support.models import TinyComposer, TinyLM
from tests.support.training import built, samples_of, trainer_for

CPU = torch.device("cpu")


class Small(Callback):
    """Collectives of each batch that are not those of units, and how many of them are ours."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.ours: list[int] = []
        self._now = self._before = 0

    def count(self, collective: Collective) -> Any:
        name = collective.key.rpartition(".")[2]
        self._now += name in ("all_reduce", "barrier", "broadcast") or "object" in name
        return collective()

    def batch_end(self, state: State, logger: Any) -> None:
        told = agreement_of(CPU).collectives
        self.made.append(self._now)
        self.ours.append(told - self._before)
        self._now, self._before = 0, told

    def per_step(self) -> tuple[float, float]:
        """All, and ours, of a batch after the first ones."""
        return statistics.median(self.made[3:]), statistics.median(self.ours[3:])


def counted(
    parallelism: Any,
    make: Callable[[], Any] = TinyComposer,
    more: Sequence[Callback] = (),
    **kwargs: Any,
) -> tuple[float, float]:
    small, model = Small(), built(make)
    with installed():
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(8, 8),
            parallelism_config=parallelism,
            callbacks=[*more, small],
            **kwargs,
        )
        with around_collectives(small.count):
            trainer.fit()
        trainer.close()
    return small.per_step()


def sharded(**config: Any) -> dict[str, Any]:
    return {"fsdp2": config}


@pytest.mark.table("one microbatch")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("size", [4, 1], ids=["one microbatch", "four"])
def test_a_step_waits_for_the_device_less_often_than_composers(size: int):
    """Composer's four all-reduces and broadcast; one of them, and ours, go from host to host."""
    composers, nothing = counted(None, device_train_microbatch_size=size)
    found, ours = counted(sharded(), device_train_microbatch_size=size)
    assert (composers, nothing) == (5, 0)
    assert (found, ours) == (6, 2)
    assert found - ours < composers


class Routed(TinyComposer):
    """A mixture in which each sample chooses another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Sparse()

    def forward(self, batch: Any) -> torch.Tensor:
        choose(self, [int(sample.sum()) % 4 for sample in batch[0]])
        return super().forward(batch)


@pytest.mark.world_size(2)
def test_who_used_an_expert_is_told_from_host_to_host():
    composers, _ = counted(None, lambda: built(TinyComposer))
    found, ours = counted(sharded(), Routed)
    assert found - ours < composers
    assert ours == 3


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_leaving_a_batch_together_is_arranged_from_host_to_host():
    """Composer's own loop asks the device two times a microbatch and two times a batch."""
    small = {"device_train_microbatch_size": "auto"}
    found, ours = counted(sharded(), **small)
    assert found - ours == 4 + 2
    assert ours == 5


@pytest.mark.world_size(2)
def test_a_loss_that_is_no_number_is_told_from_host_to_host():
    without, ours_without = counted(sharded())
    found, ours = counted(sharded(), more=[NaNMonitor()])
    assert (found - ours, ours) == (without - ours_without, ours_without + 1)


# --- Where the default group takes tensors of the device alone. ---


@contextlib.contextmanager
def as_on_nccl(rows_from: int = 32) -> Generator[None]:
    """Has a default group that seems to take no CPU tensors, so that others are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_ROWS_FROM", rows_from)
        patch.setattr(agreement, "_agreements", weakref.WeakKeyDictionary())
        patch.setattr(dist, "get_backend_config", lambda _group: "cuda:nccl")
        yield


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("config", "rows_from"),
    [({}, 32), ({"data_parallel_replicate_degree": 2}, 32), ({}, 4)],
    ids=["one group", "hsdp", "rows"],
)
def test_groups_of_all_ranks_are_made_once(config: dict[str, Any], rows_from: int):
    with as_on_nccl(rows_from):
        first, second = TinyLM(), TinyLM()
        prepare_fully_shard(first, None, config, device="cpu")
        found = agreement_of(CPU)
        prepare_fully_shard(second, None, config, device="cpu")
        assert agreement_of(CPU) is found
        world, rank = dist.group.WORLD, dist.get_rank()
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        members = [dist.get_process_group_ranks(group) for group in found.groups]
        assert members == ([row, column] if rows_from == 4 else [[0, 1, 2, 3]])
        for group in found.groups:
            assert group is not world
            # Torch rounds to milliseconds on the way to the backend, down or up.
            told, given = (timeout_of(one, CPU) for one in (group, world))
            assert abs(told - given) < datetime.timedelta(seconds=0.1)
        assert found.total([dist.get_rank(), 1]) == [6, 4]
        assert found.min_max(dist.get_rank()) == (0, 3)
        assert found.any_rank(dist.get_rank() == 2)
        assert found.of_rank0(f"rank {dist.get_rank()}") == "rank 0"
        assert found.of_all(f"rank {dist.get_rank()}") == [f"rank {n}" for n in range(4)]


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "sockets"),
    [
        (1024, 32, 32, 62),
        (1000, 25, 40, 63),
        (64, 8, 8, 14),
        (1016, 32, 31, 62),  # 8 times 127
        (37, 6, 6, 11),
        (2819, 53, 53, 105),
        (16, 1, 0, 15),
    ],
)
def test_a_number_passes_few_ranks_one_after_the_other(
    ranks: int, rows: int, columns: int, sockets: int
):
    made = agreement.rank_rows_and_columns(ranks)
    assert tuple(map(len, made)) == (rows, columns)
    assert [rank for row in made[0] for rank in row] == list(range(ranks))
    for number, column in enumerate(made[1]):
        assert [row[number] for row in made[0]] == column
    # At most one rank of a row stands in no column, and it is the last one.
    assert {len(row) - columns for row in made[0]} <= {0, 1} or not made[1]
    assert agreement.neighbours(ranks) == sockets


@pytest.mark.world_size(5)
def test_a_prime_number_of_ranks_stands_in_rows_and_columns():
    """Rows of 3 and 2: the last rank of the first row is in no column."""
    rank = dist.get_rank()
    with as_on_nccl(rows_from=5):
        found = agreement_of(CPU)
        members = [dist.get_process_group_ranks(group) for group in found.groups]
        row, column = ([0, 1, 2] if rank < 3 else [3, 4]), [[0, 3], [1, 4], [], [0, 3], [1, 4]]
        assert members == [part for part in (row, column[rank]) if part]
        assert found.rank == rank
        assert found.total([rank, 1]) == [10, 5]
        assert found.min_max(rank) == (0, 4)
        for one in range(5):
            assert found.any_rank(rank == one)
        assert found.of_rank0(f"rank {rank}") == "rank 0"
        assert found.of_all(f"rank {rank}") == [f"rank {n}" for n in range(5)]
        answers = lambda values: [f"{value}!" for value in values]  # noqa: E731
        assert found.answered(f"rank {rank}", answers) == f"rank {rank}!"
        of_four = connected(datetime.timedelta(seconds=60), CPU, "", [1, 2, 3, 4])
        assert of_four is not None
        assert (of_four.groups == ()) == (rank == 0)


@pytest.mark.world_size(4)
def test_a_default_group_that_is_bound_to_a_device_makes_rows_and_columns():
    """torch would have NCCL split on the ranks that are not in a group, and wait for ever."""
    world: Any = dist.group.WORLD
    with as_on_nccl(rows_from=4):
        world.bound_device_id = torch.device("cuda", 0)
        try:
            found = agreement_of(CPU)
            assert world.bound_device_id == torch.device("cuda", 0)
        finally:
            world.bound_device_id = None
        assert [group.size() for group in found.groups] == [2, 2]
        assert found.total([dist.get_rank()]) == [6]


@pytest.mark.world_size(2)
def test_nothing_is_made_where_the_default_group_takes_cpu_tensors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_agreements", weakref.WeakKeyDictionary())
        patch.setattr(dist, "new_group", lambda **_: pytest.fail("a group was made"))
        assert agreement_of(CPU).groups == ()
    assert takes_cpu_tensors("cpu:gloo,cuda:nccl")
    assert not takes_cpu_tensors("cuda:nccl")


@pytest.mark.world_size(2)
def test_where_gloo_does_not_get_through_the_device_is_asked():
    def refused(**_: Any) -> None:
        raise RuntimeError("no route to host")

    with as_on_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", refused)
        with pytest.warns(UserWarning, match="gloo cannot connect the ranks: no route to host.*wa"):
            found = agreement_of(torch.device("cpu"))
        assert found.groups == ()
        assert found.min_max(dist.get_rank()) == (0, 1)


@pytest.mark.matrix
@pytest.mark.world_size(2, timeout=60)
def test_a_rank_without_the_interface_is_given_up_soon():
    """The others would wait for it as long as a collective may take, half an hour."""
    with as_on_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "_PROBE", datetime.timedelta(seconds=scaled(2)))
        if dist.get_rank() == 1:
            patch.setenv("GLOO_SOCKET_IFNAME", "none0")
        with pytest.warns(UserWarning, match="gloo cannot connect the ranks: .*GLOO_SOCKET_IFNAME"):
            assert agreement_of(CPU).groups == ()
        patch.undo()
    group = dist.new_group(backend="gloo")  # names of groups are the same on both ranks still
    dist.barrier(group)


@pytest.mark.parametrize("host", ["localhost", "no-such-host.invalid"])
def test_gloo_is_told_the_interface_where_the_host_name_leads_to_loopback(
    host: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    gloo._name_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"  # a user's choice stays
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    gloo._name_interface()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"


class Limited(Callback):
    """On one rank, memory runs out after backward for microbatches of more than two samples."""

    def __init__(self, rank: int = 1) -> None:
        self.rank, self.times = rank, 0

    def after_backward(self, state: State, logger: Any) -> None:
        if dist.get_rank() == self.rank and len(state.outputs) > 2:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def train_limited(rows_from: int, rank: int) -> Agreement:
    """Trains two batches in which memory runs out on one rank; returns what ranks agreed by."""
    model, limited = built(TinyComposer), Limited(rank)
    with as_on_nccl(rows_from), installed():
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(4, 8),
            device_train_microbatch_size="auto",
            callbacks=[limited],
        )
        trainer.fit()
        agreement = agreement_of(CPU)
        trainer.close()
    assert limited.times == (1 if dist.get_rank() == rank else 0)
    assert trainer.state.device_train_microbatch_size == 2
    assert int(trainer.state.timestamp.batch) == 2
    return agreement


@pytest.mark.matrix
@pytest.mark.world_size(5, timeout=60)
@pytest.mark.parametrize("rank", range(5))
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_a_prime_number_of_ranks_leaves_together(rank: int):
    """The others wait in its row, in its column, or for what comes of the columns."""
    train_limited(5, rank)


@pytest.mark.world_size(4, timeout=60)
@pytest.mark.parametrize("rows_from", [32, 4], ids=["one group", "rows"])
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_ranks_leave_what_they_agree_on_together_too(rows_from: int):
    """The others have come to the end of the attempt: in its row, or in the column behind that."""
    agreement = train_limited(rows_from, rank=1)
    assert len(agreement.groups) == (2 if rows_from == 4 else 1)
    assert agreement.collectives > 0
