"""A checkpoint of tensor or expert parallelism resumes in any layout, and those of others in it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from composer_fsdp2 import Muon, install
from tests.dist.test_tensor_parallel import grouped
from tests.dist.test_tensor_trainer import SIZE, Language, samples
from tests.dist.test_tensor_uneven import odd_gpt2, odd_llama
from tests.support.experts import FAMILIES
from tests.support.parity import full
from tests.support.training import trainer_for

LAYOUTS: dict[str, tuple[int, int, int, int]] = {
    "TP 2 x FSDP 2": (4, 2, 1, 1),
    "TP 2 x FSDP 3": (6, 2, 1, 1),
    "FSDP 4": (4, 1, 1, 1),
    "TP 4": (4, 4, 1, 1),
    "HSDP 2 x 2": (4, 1, 2, 1),
    "FSDP 2": (2, 1, 1, 1),
    "TP 2": (2, 2, 1, 1),
    "FSDP 3": (3, 1, 1, 1),
    "HSDP 2 x TP 2": (4, 2, 2, 1),
    "one process": (1, 1, 1, 1),
    "TP 2 x EP 2": (4, 2, 1, 2),
    "EP 4": (4, 1, 1, 4),
    "HSDP 2 x EP 2": (4, 1, 2, 2),
}
"""world size, degree of tensor parallelism, copies of the model, degree of expert parallelism"""
FIRST, SECOND, EXPERTS = "TP 2 x FSDP 2", "TP 2 x FSDP 3", "TP 2 x EP 2"
DENSE = [name for name, (*_, experts) in LAYOUTS.items() if experts == 1]
ORDERED = [(FIRST, other) for other in DENSE] + [(other, FIRST) for other in DENSE]
ORDERED += [(SECOND, other) for other in ("FSDP 4", "TP 4", "one process")]
ORDERED += [(other, SECOND) for other in ("FSDP 3", "TP 4", "HSDP 2 x 2")]
ORDERED += [("TP 4", "FSDP 3"), ("FSDP 3", "TP 4"), ("TP 4", "TP 2"), ("one process", "TP 4")]
STATES = ("sharded", "full")
KINDS = itertools.product(STATES, ("gpt2", "llama"))
CASES = [
    (*pair, kind, state)
    for pair, (state, kind) in zip(dict.fromkeys(ORDERED), itertools.cycle(KINDS), strict=False)
]
"""each pair once, and each kind of model and of file with a quarter of them"""
OF_EXPERTS = [
    (EXPERTS, "one process"),
    ("one process", "HSDP 2 x EP 2"),
    ("EP 4", "one process"),
    ("one process", EXPERTS),
    (EXPERTS, "FSDP 2"),
    ("FSDP 2", EXPERTS),
]
CASES += [
    (*pair, "mixtral", state)
    for pair, state in zip(OF_EXPERTS, itertools.cycle(STATES), strict=False)
]
MAKE: dict[str, Callable[[], Any]] = {
    # TP 4 divides the heads. Three ranks share nothing evenly, and two not the 17 words of each.
    "gpt2": lambda: odd_gpt2(n_embd=12, n_head=4, n_inner=28, vocab_size=34),
    "llama": lambda: odd_llama(num_key_value_heads=4, intermediate_size=28, vocab_size=34),
    "mixtral": lambda: FAMILIES["Mixtral"][0](num_key_value_heads=2, vocab_size=34),
}


class Odd(Language):
    """With sizes that do not divide evenly, and tied weights."""

    def __init__(self, kind: str) -> None:
        super().__init__("gpt2")
        self.net = MAKE[kind]()


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    """Two groups or more; with two moments, or one for matrices."""
    if kind != "llama":
        return grouped(model)
    flat = [param for param in model.parameters() if param.ndim == 1]
    wide = [param for param in model.parameters() if param.ndim > 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat}]
    return Muon(groups, lr=0.02, iteration_dtype="fp32")  # bf16 doubles rounding


def run(layout: str, kind: str, state: str, until: int, folder: Path, load: Path | None) -> None:
    """Trains in a layout from a checkpoint, and keeps what it has at the end."""
    world_size, degree, copies, experts = LAYOUTS[layout]
    install()
    torch.manual_seed(0)
    model = Odd(kind)
    fsdp2: dict[str, Any] = {"state_dict_type": state, "sharded_ckpt_prefix_dir": "last"}
    fsdp2["expert_parallel"] = experts
    if copies > 1:
        fsdp2["data_parallel_replicate_degree"] = copies
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* is not in the state_dict")
        warnings.filterwarnings("ignore", message="The current world size")  # of random states
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        trainer = trainer_for(
            model,
            optimizer_of(kind, model),
            samples(),
            batch=max(SIZE * degree // world_size, 1),
            parallelism_config={"fsdp2": fsdp2, "tp": {"degree": degree} if degree > 1 else None},
            max_duration=f"{until}ba",
            save_folder=None if load else str(folder / "saved"),
            save_filename="last.pt",
            save_interval="100ba",
            load_path=str(load) if load else None,
        )
        if not load:
            trainer.fit()
            trainer.save_checkpoint(str(folder / "saved" / "whole.pt"))
        found = kept(trainer)
        trainer.close()
    if dist.get_rank() == 0:
        torch.save(found, folder / "kept.pt")


def kept(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights and optimizer state as whole tensors, by name. Collective: yes."""
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    found = {name: full(value).clone() for name, value in model.state_dict().items()}
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{names[id(params[number])]} {key}"] = full(value).clone()
    return found


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the checkpoint of a layout, once."""
    from tests.conftest import POOLS

    pools, done = request.config.stash[POOLS], dict[tuple[str, str, str], Path]()

    def save(layout: str, kind: str, state: str) -> Path:
        key = (layout, kind, state)
        if key not in done:
            done[key] = tmp_path_factory.mktemp("layout")
            pools.get(LAYOUTS[layout][0]).run(partial(run, *key, 2, done[key], None))
        return done[key]

    return save


@pytest.mark.table("TP 2 x FSDP 2-one process-llama-sharded")
@pytest.mark.parametrize(("before", "after", "kind", "state"), CASES)
def test_resumes_without_a_difference(
    before: str,
    after: str,
    kind: str,
    state: str,
    saved: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
):
    from tests.conftest import POOLS

    folder = saved(before, kind, state)
    path = next((folder / "saved").glob("*"))
    pool = request.config.stash[POOLS].get(LAYOUTS[after][0])
    pool.run(partial(run, after, kind, state, 2, tmp_path, path))
    expected, got = (torch.load(where / "kept.pt") for where in (folder, tmp_path))
    assert any(name.endswith(("exp_avg_sq", "momentum_buffer")) for name in expected)
    assert expected.keys() == got.keys()
    assert {n: d for n, v in expected.items() if (d := (v - got[n]).abs().max().item())} == {}
