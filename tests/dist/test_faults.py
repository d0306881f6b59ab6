"""Real deaths: ranks are killed, or told to stop, in training and in saves, and the run goes on.

Each round ends with autoresume and has to end with the weights of a run nobody disturbed. What was
found after the kills stands in the output.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Callback
from composer.callbacks import CheckpointSaver
from composer.models import ComposerModel
from torch import nn

from composer_fsdp2 import installed
from composer_fsdp2.checkpoint.contents import detect_kind
from composer_fsdp2.checkpoint.source import open_checkpoint
from tests.support.faults_table import record
from tests.support.models import lm_loss
from tests.support.pool import RankError, WorkerPool
from tests.support.training import built, samples_of, trainer_for

STEPS, EVERY, KILLED_AT = 6, 2, 4
MOMENTS = 10
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {"state_dict_type": "sharded"},
    "full": {"state_dict_type": "full"},
    "async": {"state_dict_type": "sharded", "async_save": True},
}


class Wide(ComposerModel):
    """Enough weights for a save to take a while: 0.8 million, and two moments of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 512)
        self.blocks = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
        self.head = nn.Linear(512, 17, bias=False)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.blocks(self.embed(batch[0])))

    def loss(self, outputs: torch.Tensor, batch: Any, *_args: Any) -> torch.Tensor:
        return lm_loss(outputs, batch[1])


class Killer(Callback):
    """Ends its process some time after a batch, which is when the save of that batch begins."""

    def __init__(self, batch: int, delay_seconds: float, number: int) -> None:
        self.batch = batch
        self.delay_seconds = delay_seconds
        self.number = number

    def batch_end(self, state: Any, logger: Any) -> None:
        del logger
        if int(state.timestamp.batch) == self.batch:
            kill = functools.partial(os.kill, os.getpid(), self.number)
            self.timer = threading.Timer(self.delay_seconds, kill)
            self.timer.start()

    def fit_end(self, state: Any, logger: Any) -> None:
        """A fast machine may be done by then."""
        del state, logger
        self.timer.join()


def train(
    folder: str,
    fsdp2: dict[str, Any],
    delay_seconds: float | None,
    rank: int | None,
    number: int,
) -> Any:
    """One run, resumed if there is something to resume from; every rank runs it.

    Returns:
        The batch it resumed at, a digest of its last weights, and how long its first save took.
    """
    model = built(Wide)
    killed = delay_seconds is not None and rank in (None, dist.get_rank())
    delay = delay_seconds or 0.0
    callbacks = [Killer(KILLED_AT, delay, number)] if killed else []
    with installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Autoresume")
        warnings.filterwarnings("ignore", message="Killer is not in the state_dict")
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            samples_of(STEPS, 8),
            fsdp2,
            max_duration=f"{STEPS}ba",
            save_folder=folder,
            save_interval=f"{EVERY}ba",
            autoresume=True,
            run_name="again",
            callbacks=callbacks,
        )
        at = int(trainer.state.timestamp.batch)
        with timed_saves() as seconds:
            try:
                if at < STEPS:  # one killed after its last save has nothing left to do
                    trainer.fit()
            except SystemExit as told:  # by Composer, which closes when the interpreter ends
                trainer.engine.close()
                os._exit(told.code)  # type: ignore[arg-type]
        trainer.close()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        local = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(local.numpy().tobytes())
    return at, digest.hexdigest(), max(seconds, default=0.0)


@contextlib.contextmanager
def timed_saves() -> Iterator[list[float]]:
    """How long each save takes until the checkpoint is there."""
    seconds: list[float] = []
    original = CheckpointSaver._save_checkpoint

    def save(self: Any, state: Any, logger: Any) -> None:
        start = time.monotonic()
        original(self, state, logger)
        seconds.append(time.monotonic() - start)

    CheckpointSaver._save_checkpoint = save
    try:
        yield seconds
    finally:
        CheckpointSaver._save_checkpoint = original


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Ranks of our own: those of other tests are better left alive."""
    pool = WorkerPool(2)
    yield pool
    pool.close()


def run(
    pool: WorkerPool,
    folder: Path,
    kind: str,
    delay: float | None = None,
    rank: int | None = None,
    number: int = signal.SIGKILL,
) -> Any:
    return pool.run(functools.partial(train, str(folder), KINDS[kind], delay, rank, number))[0]


def look(folder: Path) -> str:
    """What a kill left: everything that is visible has to be whole, and so has what `latest` names.

    Returns:
        The newest checkpoint that is there.
    """
    link = folder / "latest-rank0.pt"
    visible = sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p != link)
    for path in visible:
        open_checkpoint(path).check()
    if link.is_symlink():
        assert detect_kind(link.resolve())
    return f"killed with {visible[-1].name.removesuffix('-rank0.pt') if visible else 'nothing'}"


@pytest.mark.matrix
@pytest.mark.fault
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_killed_in_a_save(
    kind: str, pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, wanted, save_seconds = run(pool, tmp_path / "whole", kind)
    moments = random.Random(kind)
    found: Counter[str] = Counter()
    # A save in the background begins where one at once does, and takes about as long.
    longest = 1.5 * max(save_seconds, 0.1)
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        with pytest.raises(RankError, match=f"exit code -{signal.SIGKILL:d}"):
            run(pool, folder, kind, moments.uniform(0, longest))
        found[look(folder)] += 1
        at, weights, _ = run(pool, folder, kind)
        assert weights == wanted
        found[f"resumed at batch {at}"] += 1
        assert not [path for path in folder.iterdir() if path.name.startswith(".incomplete")]
    record("all ranks killed in a save", "survived", times=MOMENTS)
    with capsys.disabled():
        told = ", ".join(f"{n}x {what}" for what, n in sorted(found.items()))
        print(
            f"\n{kind}: {MOMENTS} kills within {longest:.2f} s of a save: {told}; all ended alike"
        )


@pytest.mark.table
@pytest.mark.fault("one rank killed in training", "survived")
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_killed_in_training(kind: str, pool: WorkerPool, tmp_path: Path):
    _, wanted, _ = run(pool, tmp_path / "whole", kind)
    with pytest.raises(RankError, match=f"rank 1 failed\ndied, exit code -{signal.SIGKILL:d}"):
        run(pool, tmp_path / "run", kind, 0.0, 1)
    look(tmp_path / "run")
    at, weights, _ = run(pool, tmp_path / "run", kind)
    assert at >= EVERY or kind == "async"  # where the first one may not be complete by then
    assert weights == wanted


@pytest.mark.table("async-15-None")
@pytest.mark.fault("told to stop in a save", "survived")
@pytest.mark.parametrize(
    ("kind", "number", "rank"),
    [
        ("sharded", signal.SIGTERM, None),
        ("full", signal.SIGINT, 1),
        ("async", signal.SIGTERM, None),
    ],
)
def test_told_to_stop_in_a_save(
    kind: str, number: int, rank: int | None, pool: WorkerPool, tmp_path: Path
):
    _, wanted, save_seconds = run(pool, tmp_path / "whole", kind)
    with pytest.raises(RankError, match=f"exit code {128 + number}"):
        run(pool, tmp_path / "run", kind, save_seconds / 2, rank, number)
    look(tmp_path / "run")
    at, weights, _ = run(pool, tmp_path / "run", kind)
    assert at or kind == "async"  # where the first one may not be complete by then
    assert weights == wanted
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".incom")]
