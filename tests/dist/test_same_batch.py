"""Ranks that compute one batch together: data is dealt to them, or compared where it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from composer_fsdp2 import install
from composer_fsdp2.errors import PlanError
from tests.dist.test_sequence_parallel import llama, prepared
from tests.dist.test_sequence_trainer import Samples, built, sgd
from tests.support.parity import TOLERANCE, assert_close
from tests.support.training import largest_difference, loader_of, trainer_for

LAYOUTS = {"tensor": {"tensor_parallel": 2}, "sequence": {"sequence_parallel": 2}}
DIFFERENT = r"Ranks \d and \d .* read different batches.*num_replicas"
KIND = "Hugging Face"

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:The tokenizer was not provided"),
    pytest.mark.filterwarnings("ignore:Cannot split tensor of length"),
]


class Dealt(IterableDataset[dict[str, torch.Tensor]]):
    """Deals itself to ranks, from some sample on."""

    def __init__(self, first: int = 0) -> None:
        self.samples, self.first = Samples(kind="plain"), first

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for at in range(len(self.samples)):
            yield self.samples[(at + (dist.get_rank() if at >= self.first else 0)) % 8]


def trainer_of(layout: str, **kwargs: Any) -> Any:
    install()
    model = built(KIND)
    optimizer = sgd(model)
    data: Any = Samples(kind="plain")
    return trainer_for(model, optimizer, data, LAYOUTS[layout], **kwargs)


@pytest.mark.table("sequence")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predict_deals_samples_to_groups(layout: str):
    trainer = trainer_of(layout)
    data: Any = Samples(8, kind="plain")
    got = trainer.predict(loader_of(data, 2))
    oracle, group = built(KIND).eval(), dist.get_rank() // 2
    with torch.no_grad():
        for number, outputs in enumerate(got):
            ids = torch.stack([data[4 * number + group + 2 * at]["input_ids"] for at in range(2)])
            assert_close("logits", oracle.model(input_ids=ids).logits, outputs["logits"])
    assert len(got) == 2
    assert trainer.state.predict_timestamp.sample == 8


@pytest.mark.matrix
@pytest.mark.world_size(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_of_a_later_fit_is_dealt_to_groups(layout: str):
    """As that of the first one: a loader of samples for single ranks."""
    trainer = trainer_of(layout, max_duration="2ba")
    trainer.fit()
    data: Any = Samples(kind="plain")
    trainer.fit(train_dataloader=loader_of(data, 4), duration="2ba", reset_time=True)
    oracle = built(KIND)
    optimizer = sgd(oracle)
    for _ in range(2):
        for first in (0, 4):
            rows = [data[at] for at in range(first, first + 4)]
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            oracle.model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(trainer.state.model, oracle) <= TOLERANCE


@pytest.mark.world_size(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_that_deals_itself_to_ranks_is_refused(layout: str):
    """In an evaluation inside of a fit, in a prediction, and where it begins in the third batch."""
    loader: Any = DataLoader(Dealt(), batch_size=2)
    evaluates = trainer_of(
        layout, eval_dataloader=loader, eval_interval="1ba", eval_subset_num_batches=2
    )
    with pytest.raises(PlanError, match=DIFFERENT):
        evaluates.fit()
    with pytest.raises(PlanError, match=DIFFERENT):
        trainer_of(layout).predict(loader)
    later: Any = DataLoader(Dealt(first=4), batch_size=2)
    trains = trainer_of(layout, train_dataloader=later, max_duration="4ba")
    with pytest.raises(PlanError, match=DIFFERENT):
        trains.fit()
    assert trains.state.timestamp.batch == 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_of_ones_own_loop_is_compared(layout: str):
    model: nn.Module = prepared(llama(), **LAYOUTS[layout])
    rows = Samples(kind="plain")
    alike, own = rows[0]["input_ids"][None], rows[dist.get_rank()]["input_ids"][None]
    for _ in range(2):
        model.train()(input_ids=alike, labels=alike).loss.backward()
        model.eval()
        with torch.no_grad(), pytest.raises(PlanError, match=DIFFERENT):
            model(input_ids=own)
        with torch.no_grad():
            model(input_ids=alike)
