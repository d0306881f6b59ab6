"""Every FSDP1 checkpoint resumes under FSDP2: the state to the bit, and the losses that follow."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Trainer
from composer.utils.object_store import ObjectStore
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from composer_fsdp2 import installed
from composer_fsdp2.errors import CheckpointError
from tests.support.fsdp1_fixtures import (
    NAMES,
    NEXT,
    SAVED_AT,
    Recorder,
    digest,
    expected,
    fsdp1_losses,
    path_of,
    settings_of,
    tiny_model,
)

STABLE = torch.__version__.startswith("2.7.")
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "2x2": (4, {"data_parallel_replicate_degree": 2}),
}
"""where the checkpoint goes: ranks and degrees"""


def resume(
    name: str, parallelism: dict[str, Any] | None, model: Any = None, **kwargs: Any
) -> tuple[Trainer, Recorder]:
    """A Trainer with other weights that has loaded the fixture."""
    model = model or tiny_model().build_model(8, **expected(name)["model_kwargs"])
    losses = Recorder()
    with installed(), warnings.catch_warnings():
        # Of Composer: fewer or more ranks than random states.
        warnings.filterwarnings("ignore", message=".*RNG state")
        # Ours: torch 2.7 did not save it, newer ones ask for it.
        warnings.filterwarnings("ignore", message=".*both have state.schedulers.LambdaLR._is_init")
        if parallelism is None:
            # Of Composer, whose own loading that is: FSDP1's scaler goes by another name.
            warnings.filterwarnings("ignore", message=".*GradScaler is not in the state_dict")
        trainer = Trainer(
            **settings_of(name, model, parallelism_config=parallelism, callbacks=[losses], **kwargs)
        )
    return trainer, losses


def fit(trainer: Trainer) -> None:
    with installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RNG state")
        warnings.filterwarnings("ignore", message=".*world size")
        trainer.fit()
    trainer.close()


def live_state(
    trainer: Trainer,
) -> tuple[dict[str, str], dict[str, dict[str, str]], list[set[str]]]:
    """Digests of the model and the optimizer state, and the names in each group."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    return (
        {name: digest(value) for name, value in weights.items()},
        {
            name: {key: digest(value) for key, value in values.items()}
            for name, values in state["state"].items()
        },
        [set(group["params"]) for group in state["param_groups"]],
    )


def check_state(trainer: Trainer, name: str) -> None:
    """Asserts that everything is what it was when the fixture was saved."""
    facts = expected(name)
    weights, state, groups = live_state(trainer)
    saved = facts["at_save"]
    assert weights == {name: value["sha256"] for name, value in saved["model"].items()}
    model = trainer.state.model
    net = getattr(model, "module", model).model  # DistributedDataParallel wraps after the load
    assert net.lm_head.weight is net.wte.weight
    if facts["weights_only"]:
        assert int(trainer.state.timestamp.batch) == 0
        return
    assert state == {
        name: {key: value["sha256"] for key, value in values.items()}
        for name, values in saved["optimizer_state"].items()
    }
    assert groups == [set(group["params"]) for group in saved["param_groups"]]
    for ours, theirs in zip(
        trainer.state.optimizers[0].param_groups, saved["param_groups"], strict=True
    ):
        for key, value in theirs.items():
            if key != "params":
                have = ours[key]
                assert (list(have) if isinstance(have, tuple) else have) == value
    assert int(trainer.state.timestamp.batch) == SAVED_AT


def matrix() -> list[Any]:
    """Each fixture into each run, whose own checkpoints are of the two kinds by turns."""
    kinds = itertools.cycle(("full", "sharded"))
    return [
        pytest.param(name, into, kind, marks=pytest.mark.world_size(WORLDS[into][0]))
        for (into, name), kind in zip(itertools.product(WORLDS, NAMES), kinds, strict=False)
    ]


@pytest.mark.table("full_weights_only_2r-1-full", "full_flatparam_2r-1-sharded")
@pytest.mark.parametrize(("name", "into", "kind"), matrix())
def test_every_fixture_into_every_run(name: str, into: str, kind: str):
    facts = expected(name)
    trainer, losses = resume(name, {"fsdp2": {"state_dict_type": kind, **WORLDS[into][1]}})
    check_state(trainer, name)
    difference = None
    same_ranks = facts["world_size"] == dist.get_world_size()
    # With dropout losses depend on the random states, of which there is one per rank that saved.
    if not facts["weights_only"] and (same_ranks or "dropout" not in name):
        fit(trainer)
        # Four gradients are summed in an order that depends on where they lie in the buffer, and
        # FSDP2 lays them out differently; two have no order, and HSDP sums two and two.
        two = dist.get_world_size() <= 2 or (into == "2x2" and "hsdp" in name)
        difference = check_losses(name, losses, exact=same_ranks and two)
    record(name, into, kind, difference)


def check_losses(name: str, losses: Recorder, *, exact: bool = False) -> float:
    """Compares the losses of a resumed run, to the bit on torch 2.7 where `exact`.

    Another CPU rounds otherwise than the one that wrote the fixtures. There a run without FSDP2
    from the same fixture says what the losses are to the bit.

    Collective: yes.

    Returns:
        The largest difference.
    """
    wanted = expected(name)["next_losses"]
    difference = largest_difference(losses.values, wanted)
    assert difference <= 2e-6
    # From the shared counters of flat parameters a run without FSDP2 goes on otherwise.
    if exact and STABLE and (difference == 0 or "flatparam" not in name):
        if difference > 0:
            difference = largest_difference(losses.values, losses_without_fsdp2(name))
        assert difference == 0
    return difference


def largest_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    assert len(found) == len(wanted) == NEXT
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


@functools.cache
def losses_without_fsdp2(name: str) -> tuple[float, ...]:
    """What follows the fixture on this CPU: in one process, by DDP, or HSDP by FSDP1 itself.

    DDP adds the gradients of two ranks, which has no order. Its run resumes through Composer's own
    loading; `check_state` says that it is right.
    """
    if dist.get_world_size() > 2:
        return tuple(fsdp1_losses(name))
    trainer, losses = resume(name, None)
    check_state(trainer, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*find_unused_parameters")
        fit(trainer)
    return tuple(losses.values)


def record(name: str, into: str, kind: str, difference: float | None) -> None:
    """Leaves a line for `python -m tests.support.checkpoint_matrix`, which makes the table."""
    if "CHECKPOINT_MATRIX" in os.environ and dist.get_rank() == 0:
        line = {"name": name, "into": into, "kind": kind, "difference": difference}
        with Path(os.environ["CHECKPOINT_MATRIX"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


PLAIN = ["sharded_dtensor_2r", "full_2r"]
"""without those that Composer's own loading, which such runs keep, goes on from otherwise"""


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", PLAIN)
def test_without_any_fsdp(name: str):
    """A folder loads into a plain run too."""
    check_plain(name)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
def test_data_parallel(name: str):
    check_plain(name)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded_dtensor_4r", "full_2r"])
def test_from_an_object_store(name: str, tmp_path: Path):
    """Composer fetches what is needed; it is read as safely as from the disk."""
    if dist.get_rank() == 0:
        source, target = path_of(name), tmp_path / "run" / path_of(name).name
        target.parent.mkdir()
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    dist.barrier()
    path = f"run/{path_of(name).name}"
    store = FolderStore(tmp_path)
    trainer, _ = resume(name, {"fsdp2": {}}, load_path=path, load_object_store=store)
    check_state(trainer, name)


@pytest.mark.world_size(2)
def test_nothing_in_the_object_store(tmp_path: Path):
    store = FolderStore(tmp_path)
    missing = pytest.raises(CheckpointError, match="FileNotFoundError")
    with pytest.MonkeyPatch.context() as patch, missing:
        # Composer asks again and again, and waits longer each time.
        patch.setattr("composer.utils.retrying.time", SimpleNamespace(sleep=lambda _: None))
        resume("full_2r", {"fsdp2": {}}, load_path="gone", load_object_store=store)


class FolderStore(ObjectStore):
    """Objects are the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_uri(self, object_name: str) -> str:
        return f"folder://{object_name}"

    def get_object_size(self, object_name: str) -> int:
        return (self.folder / object_name).stat().st_size

    def download_object(
        self, object_name: str, filename: Any, overwrite: bool = False, callback: Any = None
    ) -> None:
        del overwrite, callback
        shutil.copyfile(self.folder / object_name, filename)


def check_plain(name: str) -> None:
    trainer, losses = resume(name, None)
    check_state(trainer, name)
    fit(trainer)
    check_losses(name, losses)


@pytest.mark.table("ddp_2r", "sharded_dtensor_2r")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["full_2r", "ddp_2r", "full_flatparam_2r", "sharded_dtensor_2r"])
def test_read_by_rank_0_alone(name: str):
    """Weights of the other ranks are another model's, and nothing of them is left."""
    random.seed(dist.get_rank())
    trainer, losses = resume(
        name, {"fsdp2": {"state_dict_type": "full", "load_monolith_rank0_only": True}}
    )
    check_state(trainer, name)
    fit(trainer)
    check_losses(name, losses, exact=True)


@pytest.mark.table("sharded_dtensor_actckpt_2r", "full_2r")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded_dtensor_2r", "sharded_dtensor_actckpt_2r", "full_2r"])
def test_with_activation_checkpointing(name: str):
    trainer, losses = resume(name, {"fsdp2": {"activation_checkpointing": True}})
    check_state(trainer, name)
    fit(trainer)
    check_losses(name, losses, exact=True)
