"""Ranks that disagree about the next collective, or do not come to it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import io
import re
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from composer_fsdp2 import PlanError, installed, prepare_fully_shard
from composer_fsdp2.guards import order_check
from composer_fsdp2.guards.watchdog import is_broken
from composer_fsdp2.text import rank_text
from tests.support.limits import Limit, scaled
from tests.support.models import Block, TinyComposer
from tests.support.pool import WorkerPool
from tests.support.training import built, loader_of, samples_of, trainer_for

TIMEOUT_SECONDS = scaled(4.0)


class Turned(nn.Sequential):
    """Two layers of one size, which run in the order that `order` says."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.order: tuple[int, ...] = (0, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self[self.order[1]](self[self.order[0]](input))


def turned(**config: Any) -> Turned:
    torch.manual_seed(0)
    model = Turned()
    prepare_fully_shard(model, None, {"wrap_policy": {"classes": ["Linear"]}, **config})
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(1, 4)).sum().backward()


def said_by_all(action: Callable[[], object]) -> str:
    """What every rank's error says, which has to be the same, and soon."""
    limit = Limit(10)
    with pytest.raises(PlanError) as caught:
        action()
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert limit.left()
    return texts[0]


def check_another_order(odd: int) -> str:
    model = turned()
    if dist.get_rank() == odd:
        model.order = (1, 0)
    return said_by_all(lambda: step(model))


@pytest.mark.fault("collectives in another order on a rank", "reported")
@pytest.mark.world_size(2)
def test_another_order_is_shown_on_both_ranks():
    said = check_another_order(odd=1)
    assert "The next collective is gather '0' on rank 0 and gather '1' on rank 1." in said
    assert said.endswith(
        "  rank 0: the next forward of training, gather '0'\n"
        "  rank 1: the next forward of training, gather '1'"
    )


@pytest.mark.fault("collectives in another order on a rank", "reported")
@pytest.mark.world_size(4)
def test_one_of_four_ranks_runs_in_another_order():
    said = check_another_order(odd=2)
    assert "gather '0' on ranks 0-1, 3 and gather '1' on rank 2." in said


@pytest.mark.fault("collectives in another order on a rank", "reported")
@pytest.mark.world_size(2)
def test_another_number_of_forwards_before_the_first_backward():
    model = turned()

    def accumulate() -> None:
        losses = [model(torch.ones(1, 4)).sum() for _ in range(1 + dist.get_rank())]
        torch.stack(losses).sum().backward()

    said = said_by_all(accumulate)
    assert "is gather '1' on rank 0 and the next forward of training on rank 1." in said
    assert "gather '0', gather '1', the next forward of training" in said


@pytest.mark.fault("collectives in another order on a rank", "reported")
@pytest.mark.world_size(2)
def test_another_number_of_microbatches_in_the_first_batch():
    model = turned()

    def accumulate() -> None:
        for _ in range(1 + dist.get_rank()):
            step(model)
        with torch.no_grad():
            model(torch.ones(1, 4))

    said = said_by_all(accumulate)
    assert "gather '0' on rank 0 and the next forward of training on rank 1." in said


@pytest.mark.world_size(2)
@pytest.mark.parametrize("when", ["first", "always", "never"])
def test_later_steps_are_compared_on_demand(when: str):
    model = turned(order_check=when)
    for _ in range(2):
        step(model)
    if dist.get_rank() == 1:
        model.order = (1, 0)
    if when == "always":
        assert "gather '1' on rank 1" in said_by_all(lambda: step(model))
    else:
        step(model)  # layers of one size, so that nothing hangs


class Chosen(TinyComposer):
    """The first token of a rank's batch chooses one of two units of one size, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(Block() for _ in range(2))
        self.embed, self.head = self.net.embed, self.net.head
        del self.net

    def forward(self, batch: Any) -> torch.Tensor:
        x, chosen = self.embed(batch[0]), int(batch[0][0, 0])
        for number, side in enumerate(self.sides):
            x = side(x) if chosen in (number, 2) else x
        return self.head(x)


@pytest.mark.table("True-False", "False-True")
@pytest.mark.fault("ranks run other units after the first step", "reported")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_the_trainer_compares_whole_batches(together: bool, last: bool):
    """All take another way together, or each its own: in the last batch, or before another."""
    samples = samples_of(3 - last, 8)
    first = samples.tensors[0][:, 0].view(-1, 8)
    first[:] = 2
    first[1, 0::2] = 0  # Composer deals every other sample to a rank
    first[1, 1::2] = 1 - int(together)
    model = built(Chosen)
    with installed():
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            samples,
            {"wrap_policy": {"classes": ["Block"]}},
            eval_dataloader=loader_of(samples, 4),
            eval_interval="1ba",
        )
        if together:
            trainer.fit()
        else:
            text = said_by_all(trainer.fit)
            assert "ran different units in the last batch" in text
            assert "gather 'sides.0' on rank 0 and gather 'sides.1' on rank 1" in text
            assert "resume from a checkpoint from before it" in text
    assert int(trainer.state.timestamp.batch) == (len(first) if together else 2)
    trainer.close()


@pytest.mark.world_size(2)
def test_what_runs_before_training_is_not_compared():
    model = turned()
    if dist.get_rank() == 1:
        model.order = (1, 0)
    with torch.no_grad():
        model(torch.ones(1, 4))


@pytest.mark.world_size(2)
def test_where_gloo_does_not_get_through_a_warning_says_so():
    def refused(**_: Any) -> None:
        raise RuntimeError("no route to host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_check, "_channels", weakref.WeakKeyDictionary())
        patch.setattr(dist, "new_group", refused)
        with pytest.warns(UserWarning, match="gloo cannot connect the ranks: no route to host"):
            model = turned()
    step(model)


def test_ranks_in_words():
    assert rank_text([3]) == "rank 3"
    assert rank_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


# --- Ranks that do not come: their process group is of no use afterwards. ---


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def hurry(folder: Path) -> None:
    """Meets the other ranks anew, with a short timeout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def one_rank_is_late_in_the_first_step(folder: Path) -> float:
    hurry(folder)
    model = turned()
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT_SECONDS)
    with pytest.raises((PlanError, RuntimeError)) as caught:
        step(model)
    said = str(caught.value)
    if dist.get_rank() == 0:
        assert re.search(r"another rank did not come to it in \d+ s", said)
        assert said.startswith("the next forward of training is next on this rank")
        assert "The last unit each rank entered:\n  ranks 0-1: no unit yet\n" in said
        assert said.endswith("for data, a metric or a checkpoint.")
    seconds = time.monotonic() - start
    step(turned())  # what is prepared from here on begins anew
    if dist.get_rank() == 1:
        time.sleep(1.2 * TIMEOUT_SECONDS)
    with pytest.raises(RuntimeError, match=r"imed out|Connection closed"):
        dist.barrier()
    for _ in range(2):
        with pytest.raises(PlanError, match="The process group gave up waiting, here or in an ear"):
            turned()
    return seconds


@pytest.mark.matrix
@pytest.mark.fault("a rank that does not come to a collective", "reported")
def test_a_rank_that_does_not_come_is_missed_before_the_timeout(pool: WorkerPool, tmp_path: Path):
    seconds, _ = pool.run(functools.partial(one_rank_is_late_in_the_first_step, tmp_path))
    assert seconds < TIMEOUT_SECONDS


def one_rank_has_ended(folder: Path) -> str:
    hurry(folder)
    model = turned()
    if dist.get_rank() == 1:
        # What the end of its process closes: newer torch has the group in caches of DTensor.
        order_check._channels.clear()
        dist.destroy_process_group()
        del model
        gc.collect()
        return ""
    with pytest.raises(RuntimeError) as caught:
        step(model)
    return str(caught.value)


@pytest.mark.matrix
def test_a_rank_that_has_ended_is_not_called_late(pool: WorkerPool, tmp_path: Path):
    said, _ = pool.run(functools.partial(one_rank_has_ended, tmp_path))
    assert is_broken(RuntimeError(said)), said
    assert "did not come" not in said


class Late(TinyComposer):
    """Rank 1 is late for its third batch."""

    def forward(self, batch: Any) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if dist.get_rank() == 1 and self.calls == 3:
            time.sleep(1.5 * TIMEOUT_SECONDS)
        return super().forward(batch)


def one_rank_is_late_in_training(folder: Path) -> tuple[str, str]:
    hurry(folder)
    model = built(Late)
    with installed(), contextlib.redirect_stderr(io.StringIO()) as heard:
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(4, 8),
        )
        with pytest.raises(RuntimeError) as caught:
            trainer.fit()
    return str(caught.value), heard.getvalue()


@pytest.mark.fault("a rank that does not come to a collective", "reported")
@pytest.mark.matrix
def test_a_timeout_names_the_last_unit_of_every_rank(pool: WorkerPool, tmp_path: Path):
    (said, heard), _ = pool.run(functools.partial(one_rank_is_late_in_training, tmp_path))
    places = (
        "The last unit each rank entered:\n"
        "  rank 0: gather 'net' in microbatch 3\n"
        "  rank 1: reduce 'net' in microbatch 2"
    )
    assert "imed out" in said
    assert said.endswith(places)
    first = r"FSDP2: Nothing entered for \d+ s\. The last unit each rank entered:"
    assert re.match(first, heard)
    assert heard.strip().endswith(places)
