"""Records the data that `docs/pictures.py` draws, from real runs on the CPU.

    PYTHONPATH=. python docs/record.py plan > docs/pictures/data/plan.json
    PYTHONPATH=. python docs/record.py step > docs/pictures/data/step.json
    PYTHONPATH=. python docs/record.py losses > docs/pictures/data/losses.json

`plan` builds a vision-language model of transformers on meta and plans it: PaliGemma 3B in its
default shape, with tied embeddings and a frozen vision tower. `step` trains a small language model
on two gloo ranks with the Trainer and `FSDP2Monitor`, and writes the third step of rank 0. `losses`
trains the same model on two gloo ranks twice in a loop of its own, from the same weights on the
same batches: with torch's FSDP1, and prepared by this package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LAYERS, STEP, STEPS = 512, 64, 4, 3, 100


# --- A plan. ---


def record_plan() -> dict[str, Any]:
    """Plans a model on meta; keeps the names of parameters only where they are tied."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    from composer_fsdp2 import plan_wrapping
    from composer_fsdp2.config.wrapping import WrapPolicy
    from composer_fsdp2.plan.module_tree import ModuleTree
    from composer_fsdp2.plan.rules import by_class, find_embedding_and_head, root_rule
    from composer_fsdp2.plan.unit_size import frozen_elements

    with torch.device("meta"):
        model = PaliGemmaForConditionalGeneration(PaliGemmaConfig())
    model.tie_weights()
    for name, param in model.named_parameters():
        param.requires_grad_("vision_tower" not in name)
    ends = find_embedding_and_head(ModuleTree.read(model), WrapPolicy())
    rules = [
        by_class("SiglipEncoderLayer", "GemmaDecoderLayer", "SiglipVisionModel"),
        lambda _name, module: ends.get(id(module)),
        root_rule,
    ]
    plan = plan_wrapping(model, rules)
    tied = {name for names in plan.tied for name in names}
    units = [
        {**dataclasses.asdict(unit), "params": [n for n in unit.params if n in tied] or ["..."]}
        for unit in plan.units
    ]
    return {
        "title": "PaliGemma 3B, frozen vision tower",
        "units": units,
        "tied": plan.tied,
        "frozen": frozen_elements(model, plan),
    }


# --- A step. ---


class Block(nn.Module):
    """A block without attention: the order of collectives is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what two layers make of it."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Embedding, blocks and head; the blocks are units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Chooses the units."""
        return isinstance(module, Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (batch, length, VOCAB)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _join(rank: int) -> None:
    """Sets what a launcher sets for one of two ranks on this machine."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29533"),
    }
    torch.set_num_threads(1)


def _listen(run: Any, events: list[dict[str, str]]) -> None:
    """Notes what happens to the units of a run."""
    from composer_fsdp2.step.run import StepListener

    class Heard(StepListener):
        def before_forward(self, unit: str, group: Any) -> None:
            self.note("forward", unit)

        def before_gather(self, unit: str, group: Any) -> None:
            self.note("gather", unit)

        def before_backward(self, unit: str, group: Any) -> None:
            self.note("backward", unit)

        def before_reduce(self, unit: str, group: Any) -> None:
            self.note("reduce", unit)

        def note(self, event: str, unit: str) -> None:
            found = {"event": event, "unit": unit}
            if events[-1:] != [found]:  # backward comes to a unit by each of its outputs
                events.append(found)

    run.listen(Heard(run))


def _train(rank: int, folder: str) -> None:
    """One rank: trains, and on rank 0 writes the events of a step."""
    _join(rank)
    from composer import Callback, Event, State, Trainer
    from composer.loggers import InMemoryLogger, Logger
    from composer.models import ComposerModel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    from composer_fsdp2 import FSDP2Monitor, install
    from composer_fsdp2.step.run import run_of

    install()

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = Language()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.model(batch[0])

        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return F.cross_entropy(outputs.flatten(0, 1), batch[0].flatten())

    class Recorder(Callback):
        def __init__(self) -> None:
            self.events: list[dict[str, str]] = []

        def run_event(self, event: Event, state: State, logger: Logger) -> None:
            if event == Event.AFTER_LOAD:
                run = run_of(state.model)
                assert run is not None
                _listen(run, self.events)
            elif event == Event.BATCH_START:
                self.events.clear()

    torch.manual_seed(0)
    model, memory, recorder = Model(), InMemoryLogger(), Recorder()
    tokens = TensorDataset(torch.randint(VOCAB, (8 * STEP, 32)))
    sampler = DistributedSampler(tokens, num_replicas=2, rank=rank)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(tokens, batch_size=4, sampler=sampler),
        max_duration=f"{STEP}ba",
        parallelism_config={"fsdp2": {}},
        device="cpu",
        precision="fp32",
        progress_bar=False,
        callbacks=[FSDP2Monitor(), recorder],
        loggers=[memory],
    )
    trainer.fit()
    trainer.close()
    if rank == 0:
        monitor = {
            name: values[-1][1] for name, values in memory.data.items() if name.startswith("fsdp2/")
        }
        found = {"step": STEP, "ranks": 2, "monitor": monitor, "events": recorder.events}
        _write(folder, found)


# --- Losses. ---


def _train_both(rank: int, folder: str) -> None:
    """One rank: trains under FSDP1, then under FSDP2."""
    _join(rank)
    from torch import distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from composer_fsdp2 import prepare_fully_shard

    def fsdp1(model: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )

    def fsdp2(model: nn.Module) -> nn.Module:
        prepare_fully_shard(model, None, {}, device="cpu")
        return model

    dist.init_process_group("gloo")
    found = {"steps": STEPS, "ranks": 2, "old": _losses(fsdp1), "new": _losses(fsdp2)}
    if rank == 0:
        _write(folder, found)
    dist.destroy_process_group()


def _losses(shard: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Trains a fresh model; returns the loss of every step, averaged over the ranks."""
    from torch import distributed as dist

    torch.manual_seed(0)
    model = shard(Language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    for _ in range(STEPS):
        # Each token is three more than the one before, but for one in eight.
        start = torch.randint(VOCAB, (8, 1), generator=batches)
        noise = torch.randint(VOCAB, (8, 32), generator=batches)
        keep = torch.rand((8, 32), generator=batches) > 1 / 8
        ids = torch.where(keep, (start + 3 * torch.arange(32)) % VOCAB, noise)
        logits = model(ids)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


def _write(folder: str, found: dict[str, Any]) -> None:
    with open(os.path.join(folder, "found.json"), "w") as file:
        json.dump(found, file)


def _on_two_ranks(work: Callable[[int, str], None]) -> dict[str, Any]:
    """Starts two ranks and returns what rank 0 has written."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
        with open(os.path.join(folder, "found.json")) as file:
            return json.load(file)


RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plan": record_plan,
    "step": partial(_on_two_ranks, _train),
    "losses": partial(_on_two_ranks, _train_both),
}


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*RECORDS])
    what = parser.parse_args().what
    document = {"command": f"python docs/record.py {what}", **RECORDS[what]()}
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
