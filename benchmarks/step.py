"""CPU time of a training step, against hand-written `fully_shard` calls on the same units.

Method: two gloo ranks of this machine, one thread each, train two copies of a Llama-like model (8
blocks, d=256, vocabulary 2048, fp32): one prepared by this package, one by hand. The steps
alternate and the order within a pair is swapped every time; the figure is the median over the pairs
of the ratio of process CPU times on rank 0. Both copies see the same batches, and their last losses
are reported. `--peer hand` compares by hand with itself and shows the noise of the method.

`--accumulate` makes a step of 4 microbatches: `last` reduces once, `kept` (with
reshard_after_forward: false) gathers once as well. By hand does the same with torch's own methods;
`--peer every` is this package with a reduction in every microbatch. `--prefetch N` gathers N units
ahead in forward and backward, by hand through torch's lists in the order the blocks run.
`--compile` compiles every block's forward, with the backend aot_eager, which needs no C++ compiler.

`--tensor 2` divides layers as well: four ranks, tensor parallelism 2 x FSDP2 2, by hand with
`parallelize_module` and `fully_shard`. The two ranks of a tensor group see one batch. Tensor
parallelism wants the optimizer before the model is prepared, which steps local shards then;
`--local-step false` has both sides step DTensors, so that the rest of the step is compared.

`--device cuda` is a step on GPUs, one rank for each of them, in seconds on the clock. The model is
wide enough there (d=2048, sequences of 1,024) that the GPU is busy; with `--width 256` the host is.

`--agreement` is another figure: the CPU time in which the ranks compare their numbers of
microbatches, as the Trainer has them do before each batch, in units of that of a step.

`--over fsdp1` is a third figure: the CPU time of a whole step of Composer's Trainer with this
package over one with Composer's FSDP1, for `--optimizer`, on torch 2.7. Both Trainers live in the
same processes, have the same units and make three steps in turn, from the end of one batch to the
end of the next. `--profile` adds where the time of both goes.

Goal: ratio <= 1.03; with `--tensor` <= 1.05; of the agreement <= 0.01; over FSDP1 <= 1.00.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import shapes
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

GOAL, TENSOR_GOAL, AGREEMENT_GOAL = 1.03, 1.05, 0.01
MICROBATCHES = 4
COMPILER = "aot_eager"


@dataclass(frozen=True)
class Controls:
    """What both sides are told."""

    device: str = "cpu"
    accumulate: str = "none"
    prefetch: int = 0
    compile: bool = False
    tensor: int = 1
    local_step: str = "auto"
    width: int = 256

    def build(self) -> nn.Module:
        if self.width == 256:
            return shapes.with_heads_of(self.tensor)
        heads, hidden = self.width // 128, self.width * 11 // 4
        return shapes.LlamaLike(8, self.width, 16 * self.width, hidden, heads)

    @property
    def tokens(self) -> tuple[int, int]:
        """Rows, and their length with the last target."""
        return (4, 129 if self.width == 256 else 1025)

    @property
    def ranks(self) -> int:
        return shapes.ranks_on(self.device, 2 * self.tensor)

    @property
    def reshard(self) -> bool:
        return self.accumulate != "kept"

    @property
    def sync(self) -> str:
        return "every" if self.accumulate in ("none", "every") else "last"

    @property
    def microbatches(self) -> int:
        return 1 if self.accumulate == "none" else MICROBATCHES


def _by_hand(
    model: nn.Module, controls: Controls, _optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    if controls.tensor > 1:
        return shapes.divide_by_hand(model, controls.tensor)
    mesh = init_device_mesh(controls.device, (dist.get_world_size(),))
    for block in model.blocks if controls.compile else ():
        block.forward = torch.compile(block.forward, backend=COMPILER)
    shapes.shard_by_hand(model, ("Block",), mesh, controls.reshard)
    order = [model, *model.blocks]
    for index, unit in enumerate(order if controls.prefetch else ()):
        after = slice(index + 1, index + 1 + controls.prefetch)
        unit.set_modules_to_forward_prefetch(order[after])
        back = [model, *reversed(model.blocks)]
        place = back.index(unit) + 1
        unit.set_modules_to_backward_prefetch(back[place : place + controls.prefetch])
    return model


def _ours(
    model: nn.Module, controls: Controls, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    divided = {"tensor_parallel": shapes.tensor_setting(controls.tensor)}
    divided["local_step"] = {"false": False, "true": True}.get(controls.local_step, "auto")
    shapes.prepare(
        model,
        ("Block",),
        optimizer,
        controls.device,
        **(divided if controls.tensor > 1 else {}),
        # By hand the ends of the model are in the root: two units more cost more.
        wrap_policy={"classes": ["Block"], "embeddings": False, "lm_head": False},
        reshard_after_forward="auto" if controls.reshard else False,
        gradient_sync=controls.sync,
        forward_prefetch=controls.prefetch,
        backward_prefetch=controls.prefetch,
        compile={"backend": COMPILER} if controls.compile else False,
    )
    return model


def _accumulate(model: nn.Module, microbatches: list[torch.Tensor], controls: Controls) -> Any:
    return shapes.accumulate(model, microbatches)


def _accumulate_by_hand(
    model: nn.Module, microbatches: list[torch.Tensor], controls: Controls
) -> Any:
    kept = not controls.reshard
    return shapes.accumulate_by_hand(model, microbatches, controls.sync, kept=kept)


OURS, HAND = (_ours, _accumulate), (_by_hand, _accumulate_by_hand)
PEERS = {"ours": OURS, "hand": HAND, "every": OURS}


class Trainee:
    """A model, its optimizer and the processor time of every step it made."""

    def __init__(self, peer: tuple[Any, Any], controls: Controls) -> None:
        torch.manual_seed(0)
        shard, self.accumulate = peer
        self.controls = controls
        if controls.tensor > 1 and shard is _ours:
            self.model = controls.build()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            shard(self.model, controls, self.optimizer)
        else:
            self.model = shard(controls.build(), controls)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss = float("nan")

    def step(self, tokens: torch.Tensor) -> float:
        """One optimizer step; returns its seconds, on the CPU with the backend's threads."""
        start = shapes.now(self.controls.device)
        microbatches = list(tokens.chunk(self.controls.microbatches))
        loss = self.accumulate(self.model, microbatches, self.controls)
        self.optimizer.step()
        self.optimizer.zero_grad()
        elapsed = shapes.now(self.controls.device) - start
        self.loss = loss.item()
        return elapsed


def measure(peer: str, steps: int, warmup: int, controls: Controls) -> None:
    """Trains both copies on every rank and prints the line of rank 0."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as Composer has it
    if peer == "every":
        ours = Trainee(OURS, controls)
        theirs = Trainee(OURS, replace(controls, accumulate="every"))
    else:
        ours, theirs = Trainee(PEERS[peer], controls), Trainee(HAND, controls)
    batches = torch.Generator().manual_seed(dist.get_rank() // controls.tensor)
    tokens = torch.randint(0, 2048, controls.tokens, generator=batches).to(controls.device)

    def timed(trainee: Trainee) -> Callable[[], float]:
        return lambda: trainee.step(tokens)

    shapes.paired_ratio(timed(ours), timed(theirs), warmup)
    value = shapes.paired_ratio(timed(ours), timed(theirs), steps)
    if dist.get_rank() == 0:
        losses = {"ours_loss": ours.loss, "theirs_loss": theirs.loss}
        told = {"peer": peer, **asdict(controls), "ranks": controls.ranks, "steps": steps}
        goal = GOAL if controls.tensor == 1 else TENSOR_GOAL
        shapes.emit("step", {**told, **value, **losses}, goal)


def measure_agreement(steps: int, warmup: int) -> None:
    """Prints the line of rank 0."""
    from composer_fsdp2.step.agreement import agreement_of

    trainee, agreement = Trainee(OURS, Controls()), agreement_of(torch.device("cpu"))
    tokens = torch.randint(0, 2048, (4, 129))
    step = statistics.median([trainee.step(tokens) for _ in range(warmup + steps)][warmup:])
    calls, start = 500, time.process_time()
    for _ in range(calls):
        agreement.min_max(1)
    call = (time.process_time() - start) / calls
    if dist.get_rank() == 0:
        told = {"ranks": 2, "steps": steps, "step_seconds": step, "agreement_seconds": call}
        shapes.emit("agreement", {**told, "ratio": call / step}, AGREEMENT_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer",
        choices=list(PEERS),
        default="ours",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--accumulate", choices=["none", "last", "kept"], default="none")
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tensor", type=int, choices=[1, 2], default=1)
    parser.add_argument("--local-step", choices=["auto", "true", "false"], default="auto")
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--width", type=int, help="256 on CPUs, 2048 on GPUs, by default")
    parser.add_argument("--over", choices=["hand", "fsdp1"], default="hand")
    parser.add_argument("--optimizer", default="adamw", help="adamw or decoupled_adamw")
    parser.add_argument("--microbatch", type=int, default=4, help="of 4 samples, over FSDP1")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and (
        options.over == "fsdp1" or options.agreement or options.tensor > 1
    ):
        parser.error("--device cuda is for steps over by hand, without --tensor")
    plain = options.over == "hand" and not options.agreement and options.tensor == 1
    if options.width is not None and (options.width % 128 or not plain):
        parser.error("--width is a multiple of 128, for steps over by hand, without --tensor")
    if options.over == "fsdp1":
        import trainer_step

        told = (options.optimizer, options.steps, options.warmup, options.microbatch)
        shapes.run_ranks(trainer_step.measure, 2, *told, options.profile)
        return
    if options.agreement:
        shapes.run_ranks(measure_agreement, 2, options.steps, options.warmup)
        return
    given = (options.device, options.accumulate, options.prefetch, options.compile, options.tensor)
    width = options.width or (256 if options.device == "cpu" else 2048)
    controls = Controls(*given, options.local_step, width)
    told = (options.peer, options.steps, options.warmup, controls)
    shapes.run_ranks(measure, controls.ranks, *told, device=options.device)


if __name__ == "__main__":
    main()
