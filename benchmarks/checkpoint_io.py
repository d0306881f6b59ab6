"""Saving and loading of checkpoints against plain writes and reads of the same bytes.

Method: two gloo ranks of this machine, one thread each. `--gigabytes` of parameters and AdamW state
in fp32 are sharded over them. Both sides run in turn in the same processes, the order swapped every
time; a figure is the median of the ratios of neighbours, on the slower rank.

Figures:
    save    a sharded checkpoint, whole and on the disk (fsync, rename), over writing the same bytes
            per rank to one file and fsync; goal <= 1.5
    load    the same checkpoint into the model's shards, checksums compared, over reading its files
            into memory; the file cache warm on both sides; goal <= 1.5
    async   how long training stands still for a save with `async_save`, over a save without, in
            Composer's Trainer; the first save, which takes the memory for the copy, is left out;
            goal <= 0.2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shapes
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

RANKS = 2
LAYER_PARAMS = 12_595_200  # of a block of width 1,024 and hidden 2,731


def _state(gigabytes: float) -> dict[str, Any]:
    """Shards of a model and its optimizer state."""
    layers = max(1, round(gigabytes * 1e9 / 12 / LAYER_PARAMS))
    torch.manual_seed(0)
    model = shapes.LlamaLike(blocks=layers, d_model=1024, vocab=512, hidden=2731)
    mesh = shapes.init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        shapes.fully_shard(block, mesh=mesh)
    shapes.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    # Loading initialises the state without a step of training.
    state = get_optimizer_state_dict(model, optimizer)
    return {"state": {"model": get_model_state_dict(model), "optimizers": {"AdamW": state}}}


def _slower(act: Callable[[], Any]) -> float:
    """Seconds of the slower rank. Collective: yes."""
    dist.barrier()
    start = time.perf_counter()
    act()
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _pairs(a: Callable[[], Any], b: Callable[[], Any], pairs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"ours": [], "plain": []}
    sides = [("ours", a), ("plain", b)]
    for index in range(pairs + 1):
        for name, act in sides if index % 2 else sides[::-1]:
            seconds = _slower(act)
            if index:  # the first pair pays for memory and the file cache
                found[name].append(seconds)
    return found


def _save(folder: str, gigabytes: float, pairs: int) -> dict[str, Any]:
    from composer_fsdp2.checkpoint.write import Savers, write_sharded

    values, rank = _state(gigabytes), dist.get_rank()
    target, plain = Path(folder, "checkpoint"), Path(folder, f"plain-{rank}")
    savers = Savers(None, None, writes=True, first_on_node=rank == 0)

    def ours() -> None:
        shutil.rmtree(target, ignore_errors=True) if rank == 0 else None
        write_sharded(values, target, savers)

    ours()
    mine = memoryview((target / f"__{rank}_0.distcp").read_bytes())

    def by_hand() -> None:
        plain.unlink(missing_ok=True)
        with plain.open("wb") as file:
            file.write(mine)
            os.fsync(file.fileno())

    found = _pairs(ours, by_hand, pairs)
    return {**found, "bytes": len(mine) * RANKS}


def _load(folder: str, gigabytes: float, pairs: int) -> dict[str, Any]:
    from composer.utils.checkpoint import FileSystemReaderWithValidation

    from composer_fsdp2 import installed
    from composer_fsdp2.checkpoint.load import load_sharded
    from composer_fsdp2.checkpoint.write import Savers, write_sharded

    values, rank = _state(gigabytes), dist.get_rank()
    target = Path(folder, "checkpoint")
    savers = Savers(None, None, writes=True, first_on_node=rank == 0)
    write_sharded(values, target, savers)
    file = target / f"__{rank}_0.distcp"

    def ours() -> None:
        with installed():
            load_sharded(values, FileSystemReaderWithValidation(str(target)))

    found = _pairs(ours, file.read_bytes, pairs)
    return {**found, "bytes": file.stat().st_size * RANKS}


def _async(folder: str, gigabytes: float, pairs: int) -> dict[str, Any]:
    """Saves of two Trainers that differ in `async_save` alone."""
    found = {
        name: _blocked(Path(folder, name), gigabytes, background, pairs)
        for name, background in (("ours", True), ("plain", False))
    }
    return {**found, "bytes": round(gigabytes * 1e9)}


def _blocked(folder: Path, gigabytes: float, background: bool, saves: int) -> list[float]:
    from composer import Trainer
    from composer.models import ComposerModel
    from torch.utils.data import DataLoader, TensorDataset

    from composer_fsdp2 import installed

    layers = max(1, round(gigabytes * 1e9 / 12 / (4 * 1024**2)))

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                *(torch.nn.Linear(2048, 2048, bias=False) for _ in range(layers))
            )

        def forward(self, batch: Any) -> torch.Tensor:
            return self.layers(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any, *_args: Any) -> torch.Tensor:
            del batch
            return outputs.pow(2).mean()

    torch.manual_seed(0)
    model = Model()
    every = 6  # batches between saves, so that one is written before the next begins
    data = TensorDataset(torch.randn(RANKS * every * (saves + 1), 2048))
    with installed(), _timed_saves() as seconds:
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            train_dataloader=DataLoader(data, sampler=_sampler(data)),
            max_duration=f"{every * (saves + 1)}ba",
            device="cpu",
            precision="fp32",
            progress_bar=False,
            parallelism_config={"fsdp2": {"async_save": background}},
            save_folder=str(folder),
            save_interval=f"{every}ba",
            save_num_checkpoints_to_keep=1,
        )
        trainer.fit()
        trainer.close()
    return seconds[1:]


def _sampler(data: Any) -> Any:
    from composer.utils import dist as composer_dist

    return composer_dist.get_sampler(data, shuffle=False)


@contextlib.contextmanager
def _timed_saves() -> Iterator[list[float]]:
    """How long each save keeps training waiting, on the slower rank."""
    from composer.callbacks import CheckpointSaver

    from composer_fsdp2.trainer.checkpoint import save

    seconds: list[float] = []
    names = ("batch_checkpoint", "fit_end")
    originals = {name: getattr(CheckpointSaver, name) for name in names}

    def batch_checkpoint(self: Any, state: Any, logger: Any) -> None:
        before = self.last_checkpoint_batch
        # Waiting for the save before this one is no part of what this one costs.
        background = save._backgrounds.get(self)
        if background is not None and background.thread is not None:
            due = self.save_interval(state, _event())
            if due:
                background.thread.join()
        taken = _slower(lambda: originals["batch_checkpoint"](self, state, logger))
        if self.last_checkpoint_batch != before:
            seconds.append(taken)

    CheckpointSaver.batch_checkpoint = batch_checkpoint
    try:
        yield seconds
    finally:
        CheckpointSaver.batch_checkpoint = originals["batch_checkpoint"]


def _event() -> Any:
    from composer.core import Event

    return Event.BATCH_CHECKPOINT


FIGURES = {"save": (_save, 1.5), "load": (_load, 1.5), "async": (_async, 0.2)}


def _on_rank(figure: str, folder: str, gigabytes: float, pairs: int) -> None:
    warnings.filterwarnings("ignore")
    found = FIGURES[figure][0](folder, gigabytes, pairs)
    if dist.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=list(FIGURES), required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="parameters and AdamW state")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", help="where the temporary folder is made")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        shapes.run_ranks(_on_rank, RANKS, options.figure, folder, options.gigabytes, options.pairs)
        found = json.loads(Path(folder, "found.json").read_text())
    ratios = [a / b for a, b in zip(found["ours"], found["plain"], strict=True)]
    size = found["bytes"]
    facts = {
        "ranks": RANKS,
        "bytes": size,
        "ratio": statistics.median(ratios),
        **shapes.spread(ratios),
        "ours_gb_per_second": size / 1e9 / statistics.median(found["ours"]),
        "plain_gb_per_second": size / 1e9 / statistics.median(found["plain"]),
    }
    if options.figure == "async":
        facts = {
            "ranks": RANKS,
            "bytes": size,
            "ratio": statistics.median(found["ours"]) / statistics.median(found["plain"]),
            "async_seconds": statistics.median(found["ours"]),
            "sync_seconds": statistics.median(found["plain"]),
        }
    shapes.emit(f"checkpoint.{options.figure}", facts, FIGURES[options.figure][1])


if __name__ == "__main__":
    main()
