"""Files and functions of this package that a batch of a dense model passes, on default settings.

Method: a small GPT-like model and AdamW go through `prepare_fully_shard` on two gloo ranks. A plain
loop trains four batches; `sys.setprofile` hears of every call in the last one, on rank 0. The first
two batches do more: ranks compare their order, and contents of parameters are checked. `--batch 1`
shows the first one. Functions of the package are counted by their code, and threads are left out.

Goal: at most 10 files.

`--run` is a Trainer of Composer on one rank instead, which trains a batch and saves a sharded
checkpoint: files of the package that it imports, and those that register hooks of modules, tensors
or optimizers. Goals: at most 130 and 4.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

import shapes
import torch
import torch.distributed as dist
import torch.nn as nn

import composer_fsdp2

PACKAGE = Path(composer_fsdp2.__file__).parent
GOAL = 10
GOALS_OF_RUN = {"imports": 130, "hooking": 4}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(batch: int) -> None:
    """Prints the line of rank 0."""
    model = shapes.with_heads_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shapes.prepare(model, ("Block",), optimizer)
    tokens = torch.randint(0, 2048, (4, 129))
    for _ in range(batch - 1):
        _train(model, optimizer, tokens)
    called: set[CodeType] = set()

    def hear(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(hear)
    _train(model, optimizer, tokens)
    sys.setprofile(None)
    ours = [code for code in called if Path(code.co_filename).is_relative_to(PACKAGE)]
    files = sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in ours})
    if dist.get_rank() == 0:
        value = {"files": len(files), "functions": len(ours), "batch": batch, "names": files}
        shapes.emit("files_in_a_batch", value, GOAL)


def measure_run() -> None:
    """Prints the line of a whole run."""
    import trainer_step

    hooking: set[str] = set()

    def hear(frame: FrameType, event: str, _arg: object) -> None:
        caller = frame.f_back
        if event == "call" and caller and re.fullmatch("register_.*hook", frame.f_code.co_name):
            hooking.add(caller.f_code.co_filename)

    composer_fsdp2.install()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(hear)
        trainer_step.Run(trainer_step.OURS, "adamw", 4, save_folder=folder, save_interval="1ba")
        sys.setprofile(None)
    names = [Path(file).relative_to(PACKAGE) for file in hooking if file.startswith(str(PACKAGE))]
    imports = sum(name.startswith(PACKAGE.name) for name in sys.modules)
    value = {"imports": imports, "hooking": len(names), "names": sorted(map(str, names))}
    shapes.emit("files_of_a_run", {**value, "goal": GOALS_OF_RUN})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=4, help="which one is shown")
    parser.add_argument("--run", action="store_true", help="a run of the Trainer instead")
    given = parser.parse_args()
    if given.run:
        shapes.run_ranks(measure_run, 1)
    else:
        shapes.run_ranks(measure, 2, given.batch)


if __name__ == "__main__":
    main()
