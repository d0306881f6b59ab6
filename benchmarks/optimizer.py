"""CPU time of an optimizer's step on a sharded model, against the same loop on plain tensors.

Method: two gloo ranks of this machine, one thread each. The optimizer is given to
`prepare_fully_shard` with a GPT-2-like model of 147 parameters (12 blocks, d=64, fp32); its twin
steps plain tensors, copies of this rank's shards, in the same process. Both get the same gradients,
as new tensors before each step. The steps alternate and the order within a pair is swapped every
time; the figure is the median over the pairs of the ratio of process CPU times on rank 0. At the
end parameters and state are compared: `same_bits` says whether all are equal on both ranks. Nothing
is sent in a step. `clipping` is `composer_fsdp2.clip_grad_norm_` against torch's functions on the
plain tensors with an all-reduce of one number between them.

`--peer hand` is torch alone: `fully_shard` by hand, and torch's `clip_grad_norm_`. `--parameters
18900` is a model of 50 layers of 126 experts with three 8 x 8 matrices each; its figure is
seconds a step. `--over fsdp1` compares with FSDP1's step of the same model, where torch has FSDP1.
`--local-step` is passed on as the setting `local_step`. `--device cuda` is a step on GPUs, one rank
for each of them, in seconds on the clock.

Goal: ratio <= 1.40, with `fused` <= 1.80.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import shapes
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

GOAL, FUSED_GOAL = 1.40, 1.80
A_LAYER_OF_EXPERTS = 126 * 3
CLIPPING = "clipping"
MAX_NORM = 0.1

Params = Sequence[nn.Parameter]


def _foundry_lion(params: Params) -> torch.optim.Optimizer:
    from llmfoundry.optim import DecoupledLionW

    return DecoupledLionW(params, lr=1e-4, weight_decay=1e-5)


def _composer(name: str, **options: float) -> Callable[[Params], torch.optim.Optimizer]:
    def build(params: Params) -> torch.optim.Optimizer:
        import composer.optim

        return getattr(composer.optim, name)(params, lr=1e-4, weight_decay=1e-5, **options)

    return build


def _torch(name: str, **options: Any) -> Callable[[Params], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, lr=1e-4, **options)


OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "adam": _torch("Adam", foreach=False),
    "adamw": _torch("AdamW", foreach=False),
    "adamw_foreach": _torch("AdamW", foreach=True),
    "adamw_fused": _torch("AdamW", fused=True),
    "sgd": _torch("SGD", momentum=0.9, foreach=False),
    "nadam": _torch("NAdam", foreach=False),
    "rmsprop": _torch("RMSprop", foreach=False),
    "decoupled_sgdw": _composer("DecoupledSGDW", momentum=0.9),
    "decoupled_adamw": _composer("DecoupledAdamW"),
    "decoupled_lionw": _foundry_lion,
}

# --- models ---


class Block(nn.Module):
    """A layer of GPT-2: twelve parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Experts(nn.Module):
    """A layer whose every expert is called."""

    def __init__(self) -> None:
        super().__init__()
        count = A_LAYER_OF_EXPERTS // 3
        self.experts = nn.ModuleList(shapes.Expert(8, 8) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class Model(nn.Module):
    """An embedding, layers and a norm; its forward is the mean of what comes out."""

    def __init__(self, layers: Iterable[nn.Module], width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean()


def build(parameters: int) -> nn.Module:
    """147 parameters are those of GPT-2; any other number is one of experts' matrices."""
    torch.manual_seed(0)
    if parameters == 147:
        return Model((Block(64) for _ in range(12)), 64)
    model = Model((Experts() for _ in range(parameters // A_LAYER_OF_EXPERTS)), 8)
    model.embed.requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


# --- what is compared ---


@dataclass(frozen=True)
class Stepped:
    """Parameters, their optimizer, and the timed part of a step."""

    params: Params
    optimizer: torch.optim.Optimizer
    work: Callable[[], Any]

    def timed(self) -> float:
        device = _shard(self.params[0]).device.type
        start = shapes.now(device)
        self.work()
        return shapes.now(device) - start


@dataclass(frozen=True)
class Wanted:
    """What a command asked for."""

    optimizer: str
    parameters: int
    peer: str
    local_step: bool | str | None
    device: str

    def stepped(self, params: Params, optimizer: torch.optim.Optimizer, clip: Any) -> Stepped:
        is_clipping = self.optimizer == CLIPPING
        return Stepped(params, optimizer, (lambda: clip(params)) if is_clipping else optimizer.step)

    @property
    def classes(self) -> tuple[str, ...]:
        return ("Block",) if self.parameters == 147 else ("Experts",)

    @property
    def build_optimizer(self) -> Callable[[Params], torch.optim.Optimizer]:
        return OPTIMIZERS["sgd" if self.optimizer == CLIPPING else self.optimizer]


def _trained(model: nn.Module) -> Params:
    return [param for param in model.parameters() if param.requires_grad]


def _ours(wanted: Wanted) -> Stepped:
    from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard

    model = build(wanted.parameters)
    optimizer = wanted.build_optimizer(_trained(model))
    config: dict[str, Any] = {"wrap_policy": {"classes": list(wanted.classes)}}
    if wanted.local_step is not None:
        config["local_step"] = wanted.local_step
    prepare_fully_shard(model, optimizer, config, device=shapes.composers(wanted.device))
    return wanted.stepped(_trained(model), optimizer, lambda p: clip_grad_norm_(p, MAX_NORM))


def _by_hand(wanted: Wanted) -> Stepped:
    model = build(wanted.parameters)
    mesh = init_device_mesh(wanted.device, (dist.get_world_size(),))
    shapes.shard_by_hand(model, wanted.classes, mesh)
    params = _trained(model)
    optimizer = wanted.build_optimizer(params)
    return wanted.stepped(params, optimizer, lambda p: nn.utils.clip_grad_norm_(p, MAX_NORM))


def _plain(wanted: Wanted, like: Params) -> Stepped:
    """The same on copies of the shards, as if FSDP2 did not exist."""
    params = [nn.Parameter(_shard(param).clone()) for param in like]
    return wanted.stepped(params, wanted.build_optimizer(params), _clip_plain)


def _clip_plain(params: Params) -> None:
    """A user's clipping of shards: torch's own functions, and one number is reduced."""
    norm = nn.utils.get_total_norm([param.grad for param in params])
    square = norm.double().square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(params, MAX_NORM, square.sqrt().float())


def _fsdp1(wanted: Wanted) -> Stepped:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        build(wanted.parameters),
        auto_wrap_policy=ModuleWrapPolicy({Block, Experts}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    model(torch.randint(0, 512, (2, 16))).backward()
    params = _trained(model)
    optimizer = wanted.build_optimizer(params)
    return wanted.stepped(params, optimizer, lambda _: model.clip_grad_norm_(MAX_NORM))


PEERS = {"ours": _ours, "hand": _by_hand}


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Gradients:
    """Gives the same gradients to several lists of parameters, as backward would: new tensors."""

    def __init__(self, like: Params) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shards = [_shard(param) for param in like]
        drawn = [torch.randn(shard.shape, generator=generator) for shard in shards]
        self.values = [value.to(shards[0].device) for value in drawn]

    def give(self, params: Params) -> None:
        for param, value in zip(params, self.values, strict=True):
            new = value.clone()
            param.grad = _like(param, new) if isinstance(param, DTensor) else new


def _like(param: DTensor, value: torch.Tensor) -> torch.Tensor:
    """A gradient as FSDP2 makes it: with the layout of its parameter, and not one that is equal."""
    return DTensor(value, param._spec, requires_grad=False)


# --- measuring ---


def _alternating(one: Stepped, other: Stepped, give: Callable[[Stepped], None], pairs: int) -> Any:
    def timed(stepped: Stepped) -> Callable[[], float]:
        def measure() -> float:
            give(stepped)
            return stepped.timed()

        return measure

    return shapes.paired_ratio(timed(one), timed(other), pairs)


def _same_bits(one: Stepped, other: Stepped) -> bool:
    """Of parameters, gradients and state, on all ranks."""
    pairs = [
        (_shard(a), _shard(b))
        for first, second in zip(one.params, other.params, strict=True)
        for a, b in zip(_held(one, first), _held(other, second), strict=True)
    ]
    # Composer keeps the number of the step on the GPU, LocalStep on the CPU.
    equal = [a.dtype == b.dtype and torch.equal(a, b.to(a.device)) for a, b in pairs]
    same = torch.tensor(float(all(equal)))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def _held(stepped: Stepped, param: nn.Parameter) -> list[torch.Tensor]:
    state = stepped.optimizer.state[param]
    values = [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return [param, *([param.grad] if param.grad is not None else []), *values]


def measure(wanted: Wanted, over: str, steps: int, warmup: int) -> None:
    """Steps both on every rank and prints the line of rank 0."""
    ours = PEERS[wanted.peer](wanted)
    theirs = _plain(wanted, ours.params) if over == "plain" else _fsdp1(wanted)
    gradients = Gradients(ours.params)

    def give(stepped: Stepped) -> None:
        if stepped is ours or over == "plain":
            gradients.give(stepped.params)

    gc.collect()
    gc.freeze()
    _alternating(ours, theirs, give, warmup)
    value = _alternating(ours, theirs, give, steps)
    gc.unfreeze()
    same = {"same_bits": _same_bits(ours, theirs)} if over == "plain" else {}
    if dist.get_rank() == 0:
        told = {"optimizer": wanted.optimizer, "parameters": len(ours.params), "over": over}
        told |= {"peer": wanted.peer, "local_step": wanted.local_step, "device": wanted.device}
        told |= {"ranks": dist.get_world_size(), "steps": steps}
        _emit({**told, **value, **same}, wanted)


def _emit(value: dict[str, Any], wanted: Wanted) -> None:
    if value["over"] != "plain":
        shapes.emit("optimizer_over_fsdp1", value)
    elif wanted.parameters == 147:
        shapes.emit("optimizer", value, FUSED_GOAL if "fused" in wanted.optimizer else GOAL)
    else:
        shapes.emit("optimizer_seconds", value)


def measure_all(names: Sequence[str], options: argparse.Namespace) -> None:
    """Measures one after the other in one process group."""
    warnings.simplefilter("ignore")  # FSDP1 is deprecated and knows better devices than CPUs
    for name in names:
        told = (options.parameters, options.peer, options.local_step, options.device)
        wanted = Wanted(name, *told)
        measure(wanted, options.over, options.steps, options.warmup)


def _local_step(text: str) -> bool | str:
    known: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    if text not in known:
        raise argparse.ArgumentTypeError("is auto, true or false")
    return known[text]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=["all", *OPTIMIZERS, CLIPPING], default="all")
    parser.add_argument("--parameters", type=int, default=147)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peer", choices=list(PEERS), default="ours")
    parser.add_argument("--over", choices=["plain", "fsdp1"], default="plain")
    parser.add_argument("--local-step", type=_local_step, default=None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    if options.parameters != 147 and (
        options.parameters <= 0 or options.parameters % A_LAYER_OF_EXPERTS
    ):
        parser.error(f"--parameters is 147, or a multiple of {A_LAYER_OF_EXPERTS}, as 18900 is")
    if options.over == "fsdp1" and options.device == "cuda":
        parser.error("--over fsdp1 is for --device cpu")
    if options.over == "fsdp1" and not hasattr(torch.distributed.fsdp, "FullyShardedDataParallel"):
        parser.error(f"torch {torch.__version__} has no FSDP1")
    return options


def main() -> None:
    options = _parse()
    names = [*OPTIMIZERS, CLIPPING] if options.optimizer == "all" else [options.optimizer]
    if "decoupled_lionw" in names and options.optimizer == "all":
        try:
            import llmfoundry.optim  # noqa: F401
        except ImportError:
            sys.stderr.write("decoupled_lionw is left out: LLM Foundry is not installed\n")
            names.remove("decoupled_lionw")
    ranks = shapes.ranks_on(options.device)
    shapes.run_ranks(measure_all, ranks, names, options, device=options.device)


if __name__ == "__main__":
    main()
