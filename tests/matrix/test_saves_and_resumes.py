"""Saves and resumes drawn by chance equal the run that never stopped, or are refused at the start.

`COMPOSER_FSDP2_TESTS_DRAWN=600` draws more than 60. What is wrong is shown with its case, which is
drawn again by its number: `draw(17)`.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback
from torch import distributed as dist
from torch.utils.data import TensorDataset

from composer_fsdp2 import Muon, installed
from composer_fsdp2.errors import CheckpointError, ConfigError
from tests.dist.test_tensor_parallel import global_batches
from tests.dist.test_tensor_trainer import Language
from tests.support.object_store import URI, QuickUploads, found_by_composer, served
from tests.support.parity import full
from tests.support.pool import RankError
from tests.support.training import trainer_for

NUMBER = int(os.environ.get("COMPOSER_FSDP2_TESTS_DRAWN", "60"))
ROW = 10
STEPS, HALF, SIZE = 10, 5, 8

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "replicas": (4, {"data_parallel_replicate_degree": 2}),
    "tensors": (4, {"tensor_parallel": 2}),
    "tensors without local steps": (4, {"tensor_parallel": 2, "local_step": False}),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3),
    "amsgrad": lambda model: torch.optim.AdamW(
        model.parameters(), lr=3e-3, eps=1e-3, amsgrad=True, foreach=False
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "muon": lambda model: Muon(model, lr=0.01, iteration_dtype="fp32"),
}
FROZEN: dict[str, tuple[int, int]] = {
    "never": (0, 0),
    "always": (0, STEPS),
    "until batch 2": (0, 2),
    "until batch 7": (0, 7),
    "from batch 3": (3, STEPS),
    "from batch 3 to 7": (3, 7),
}
"""first batch in which a layer is frozen, and the first in which it is not"""
PLACES = ("local", "a folder for each rank", "two nodes", "store")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is stopped after five batches. Its text can be pasted into a test."""

    place: str
    kind: str
    background: bool
    before: str
    after: str
    optimizer: str
    frozen: str


def draw(number: int) -> Case:
    """The case of a number; each place comes up equally often."""
    chance = random.Random(number)
    before = chance.choice(list(LAYOUTS))
    return Case(
        place=PLACES[number % len(PLACES)],
        kind=chance.choice(["sharded", "sharded", "full"]),
        background=chance.random() < 0.4,
        before=before,
        after=before if chance.random() < 0.5 else chance.choice(list(LAYOUTS)),
        optimizer=chance.choice(list(OPTIMIZERS)),
        frozen=chance.choice(list(FROZEN)),
    )


class Freezes(Callback):
    """Freezes the first layer for some batches."""

    def __init__(self, frozen: str) -> None:
        self.begin, self.end = FROZEN[frozen]

    def set(self, model: Any, batch: int) -> None:
        model.net.model.layers[0].requires_grad_(not self.begin <= batch < self.end)

    def batch_start(self, state: Any, logger: Any) -> None:
        del logger
        self.set(state.model, int(state.timestamp.batch))


def run(case: Case, layout: str, until: int, seed: int, url: str = "", **kwargs: Any) -> Any:
    """Trains; returns weights and state of rank 0, or the text of a refusal. Collective: yes."""
    torch.manual_seed(seed)
    model, freezes = Language("llama"), Freezes(case.frozen)
    freezes.set(model, 0)
    optimizer = OPTIMIZERS[case.optimizer](model)
    ids = global_batches(STEPS).flatten(0, 1)
    world, settings = LAYOUTS[layout]
    readers = world // settings.get("tensor_parallel", 1)
    uploads = QuickUploads()
    fsdp2 = {"state_dict_type": case.kind, "async_save": case.background, **settings}
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed())
        stack.enter_context(_as_nodes(case.place))
        if url:
            stack.enter_context(found_by_composer(url))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        stack.callback(uploads.end)
        try:
            trainer = trainer_for(
                model,
                optimizer,
                TensorDataset(ids, ids),
                fsdp2,
                batch=SIZE // readers,
                max_duration=f"{until}ba",
                save_interval=f"{HALF}ba",
                callbacks=[freezes, uploads],
                load_progress_bar=False,
                **kwargs,
            )
        except (CheckpointError, ConfigError) as error:
            return f"{type(error).__name__}: {error}"
        trainer.fit()
        trainer.close()
    found = {name: full(value).clone() for name, value in model.state_dict().items()}
    names = {id(param): name for name, param in model.named_parameters()}
    for param, state in trainer.state.optimizers[0].state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{names[id(param)]} {key}"] = full(value).clone()
    return found if dist.get_rank() == 0 else {}


@contextlib.contextmanager
def _as_nodes(place: str) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if place == "two nodes":
            size = dist.get_world_size() // 2
            patch.setenv("LOCAL_WORLD_SIZE", str(size))
            patch.setenv("LOCAL_RANK", str(dist.get_rank() % size))
            patch.setenv("NODE_RANK", str(dist.get_rank() // size))
        yield


def check(case: Case, folder: Path, url: str, ranks: Any) -> str:
    """Runs a case; returns what is wrong with it, `equal` or `refused`."""
    before, after = LAYOUTS[case.before][0], LAYOUTS[case.after][0]
    place = {"store": URI, "a folder for each rank": str(folder / "{rank}")}
    save = place.get(case.place, str(folder))
    url = url if case.place == "store" else ""
    try:
        first = ranks(before, partial(run, case, case.before, HALF, 0, url, save_folder=save))
        if isinstance(first[0], str):
            saves = case.place == "a folder for each rank" and case.kind == "sharded"
            return "refused" if saves and len(set(first)) == 1 else f"refused: {first}"
        name = "ep0-ba5" if case.kind == "sharded" else "ep0-ba5-rank0.pt"
        load = f"{save.replace('{rank}', '0')}/{name}"
        second = ranks(after, partial(run, case, case.after, STEPS, 1, url, load_path=load))[0]
        whole = ranks(before, partial(run, case, case.before, STEPS, 0))[0]
    except RankError as error:
        return str(error)[:2000]
    if isinstance(second, str):
        return f"refused: {second}"
    if second.keys() != whole.keys():
        return f"state of one of both: {sorted(second.keys() ^ whole.keys())[:6]}"
    off = {
        key: float((second[key] - whole[key]).abs().max()) for key in whole if whole[key].numel()
    }
    worst = max(off, key=lambda key: off[key])
    # Sums in another order, where half of the steps were taken by another layout.
    limit = 0.0 if case.before == case.after else 1e-5
    return "equal" if off[worst] <= limit else f"{worst} is off by {off[worst]}"


@pytest.mark.parametrize("first", range(0, NUMBER, ROW))
def test_goes_on_as_if_it_had_not_stopped(first: int, tmp_path: Path, ranks: Any):
    outcomes, wrong = Counter[str](), list[str]()
    with served() as url:
        for number in range(first, min(first + ROW, NUMBER)):
            case = draw(number)
            if case.place == "store":
                _empty(url)
            found = check(case, tmp_path / str(number), url, ranks)
            outcomes[found] += 1
            if found not in ("equal", "refused"):
                wrong.append(f"{number}: {asdict(case)}\n{found}")
    assert not wrong, "\n\n".join(wrong)
    assert outcomes["equal"] >= ROW // 2, outcomes


def _empty(url: str) -> None:
    from tests.support.object_store import BUCKET, names_in

    with found_by_composer(url) as client:
        for name in names_in(client, ""):
            client.delete_object(Bucket=BUCKET, Key=name)
