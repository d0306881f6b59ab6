"""What ranks send through the store at which they met: nothing in a step, and little of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer_fsdp2 import installed, prepare_fully_shard
from composer_fsdp2.errors import PlanError
from composer_fsdp2.guards import order_check, watchdog
from composer_fsdp2.guards.leaving import joint_exit
from composer_fsdp2.guards.watchdog import watchdog_of
from composer_fsdp2.ranks import raise_on_all_ranks
from composer_fsdp2.torch_private.collectives import Collective, around_collectives
from composer_fsdp2.torch_private.tensors import default_store
from tests.dist.test_agreement import CPU, Limited, as_on_nccl
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.training import built, samples_of, trainer_for


class Requests:
    """Counts what is asked of a store, by the name of the method, and how many keys."""

    def __init__(self) -> None:
        self.store, self.made, self.keys = default_store(), Counter[str](), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def ask(key: Any, *args: Any) -> Any:
            self.made[name] += 1
            self.keys[name] += len(key) if isinstance(key, list) else 1
            return getattr(self.store, name)(key, *args)

        return ask


@contextmanager
def counted() -> Generator[Requests]:
    requests = Requests()
    with pytest.MonkeyPatch.context() as patch:
        for module in (joint_exit, watchdog):
            patch.setattr(module, "default_store", lambda: requests)
        # Its thread tells by the clock that this rank goes on after the test before.
        patch.setattr(watchdog.CollectiveWatchdog, "look", lambda *_: None)
        yield requests


@pytest.mark.world_size(2)
def test_steps_send_nothing_and_groups_are_made_once():
    made: list[str] = []
    new_group = dist.new_group
    with as_on_nccl(), counted() as requests, pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_check, "_channels", type(order_check._channels)())
        patch.setattr(
            dist, "new_group", lambda *a, **k: made.append(k["backend"]) or new_group(*a, **k)
        )
        for groups in (2, 0):  # for agreements and for the order, for all models
            model = TinyLM()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            prepare_fully_shard(model, optimizer, {"order_check": "always"}, device="cpu")
            assert made == ["gloo"] * groups
            made.clear()
            requests.made.clear()
            for ids, targets in batches(3, 8):
                lm_loss(model(ids), targets).backward()
                optimizer.step()
            assert (requests.made, made) == ({}, [])


@pytest.mark.world_size(4)
def test_where_all_ranks_are_is_asked_in_one_request():
    watchdog = watchdog_of(CPU)
    assert watchdog is not None
    watchdog.report()
    dist.barrier()
    with counted() as requests:
        assert "ranks 0-3" in watchdog.report()
    assert requests.made == {"set": 1, "check": 1, "multi_get": 1}


@pytest.mark.world_size(4, timeout=60)
def test_of_many_ranks_one_asks_where_all_are(monkeypatch):
    monkeypatch.setattr(watchdog, "_MANY_RANKS", 4)
    monkeypatch.setattr(watchdog, "_FRESH_SECONDS", 2.0)
    monkeypatch.setattr(watchdog, "_PLACES", "test/places")
    dog = watchdog_of(CPU)
    assert dog is not None
    with counted() as requests:
        for entered in (1, 2):  # the second after what was found has become old
            dog.tell(f"place {entered}")
            dist.barrier()
            assert dog._places() == {f"place {entered}": [0, 1, 2, 3]}
            asked: list[Any] = [None] * 4
            dist.all_gather_object(asked, requests.made["multi_get"])
            assert sum(asked) == entered
            time.sleep(2.1)
    dog.tell("")


def test_looks_of_all_ranks_are_no_more_than_the_store_answers():
    assert joint_exit.seconds_between_looks(8) == (0.005, 1.0)
    for ranks in (64, 2816, 16384):
        assert all(ranks / seconds < 2001 for seconds in joint_exit.seconds_between_looks(ranks))


@pytest.mark.world_size(4, timeout=60)
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
def test_a_rank_that_leaves_asks_for_as_much_on_many_ranks_as_on_few():
    model = built(TinyComposer)
    with installed(), counted() as requests:
        trainer = trainer_for(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            samples_of(2, 16),
            device_train_microbatch_size="auto",
            callbacks=[Limited()],
        )
        trainer.fit()
        trainer.close()
    assert trainer.state.device_train_microbatch_size == 2
    summed: list[Any] = [None] * 4
    dist.all_gather_object(summed, requests.made["multi_get"])
    assert sorted(summed) == [0, 0, 0, 1]  # one reads all
    assert requests.keys["check"] == requests.made["check"]
    assert requests.made["get"] <= 2


@pytest.mark.world_size(2)
def test_long_facts_travel_when_they_differ_alone():
    sent: list[int] = []

    def note(collective: Collective) -> Any:
        found = collective.given.get("obj", collective.given.get("object_list"))
        sent.append(len(str(found)))
        return collective()

    text = "a line\n" * 100_000
    with around_collectives(note):
        raise_on_all_ranks({"plan": text, "~seed": dist.get_rank()})
        assert max(sent) < 1000
        with pytest.raises(PlanError, match=r"(?s)different plan.*\+rank 1"):
            raise_on_all_ranks({"plan": f"{text}rank {dist.get_rank()}"})
    assert max(sent) > len(text)
