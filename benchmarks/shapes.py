"""Models, process groups and small measuring tools shared by the benchmarks.

Every model is plain `torch.nn`, so that a benchmark measures sharding and nothing else. Parameters
are registered in the order of the forward pass; `comm.py` relies on that to know which units a
backward reaches.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from composer_fsdp2.plan.wrap_plan import WrapPlan

# --- models ---


class RMSNorm(nn.Module):
    """Scale by the root mean square."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank update."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Causal self-attention with four square projections."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            p(x).view(batch, seq, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, d_model: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(d_model)
        self.attn = Attention(d_model, heads)
        self.norm2 = RMSNorm(d_model)
        self.mlp = MLP(d_model, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaLike(nn.Module):
    """A small Llama-like language model; `forward(tokens)` returns the next-token loss."""

    def __init__(
        self,
        blocks: int = 8,
        d_model: int = 256,
        vocab: int = 2048,
        hidden: int = 672,
        heads: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads, hidden) for _ in range(blocks))
        self.norm = RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Leaf(nn.Module):
    """The smallest module worth a unit of its own; stands for an expert."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Parent(nn.Module):
    """A container with a forward and `children` wrapped modules in a list."""

    def __init__(self, children: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Leaf() for _ in range(children))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Nested(nn.Module):
    """`modules` wrapped leaves, `per_parent` to a parent, plus a norm that only the root holds."""

    def __init__(self, modules: int, per_parent: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parent(per_parent) for _ in range(modules // per_parent))
        self.norm = RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class QwenAttention(nn.Module):
    """Grouped-query projections of Qwen3-235B-A22B (shape only)."""

    def __init__(self, d_model: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(d_model, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x))


class Expert(MLP):
    """One expert of a mixture."""


class Mixture(nn.Module):
    """Router and experts (shape only: the forward uses every expert)."""

    def __init__(self, d_model: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, experts, bias=False)
        self.experts = nn.ModuleList(Expert(d_model, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class QwenLayer(nn.Module):
    """One layer of the Qwen3 mixture-of-experts shape."""

    def __init__(self, experts: int, d_model: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(d_model)
        self.self_attn = QwenAttention(d_model, heads=64, kv_heads=4, head_dim=128)
        self.post_attention_layernorm = RMSNorm(d_model)
        self.mlp = Mixture(d_model, experts, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenMoE(nn.Module):
    """Qwen3-235B-A22B by its published sizes: 235e9 parameters, so build it on meta."""

    def __init__(
        self,
        layers: int = 94,
        experts: int = 128,
        d_model: int = 4096,
        hidden: int = 1536,
        vocab: int = 151936,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, d_model)
        self.layers = nn.ModuleList(QwenLayer(experts, d_model, hidden) for _ in range(layers))
        self.norm = RMSNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def add_lora(model: LlamaLike, rank: int = 8) -> LlamaLike:
    """Freezes `model` and puts trainable low-rank updates on q and v of every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.q = LoRALinear(block.attn.q, rank)
        block.attn.v = LoRALinear(block.attn.v, rank)
    return model


# --- sharding by hand ---


def shard_by_hand(
    model: nn.Module,
    classes: tuple[str, ...],
    mesh: DeviceMesh,
    reshard_after_forward: bool | int = True,
) -> nn.Module:
    """What a careful user writes: `fully_shard` on every module of `classes`, then on the root.

    The root is left to torch's default, so that it keeps its parameters until backward.
    """
    for module in reversed([m for m in model.modules() if type(m).__name__ in classes]):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh)


# --- tensor parallelism of `LlamaLike` ---

COLUMNS, ROWS = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"), ("attn.o", "mlp.down")


def with_heads_of(degree: int) -> LlamaLike:
    """A model whose forward splits by the heads of one rank."""
    return LlamaLike(heads=4 // degree)


def tensor_setting(degree: int) -> dict[str, Any]:
    """What stands under `tensor_parallel` in a YAML for the division of `divide_by_hand`."""
    plan = {f"*.{name}": "colwise" for name in COLUMNS} | {f"*.{name}": "rowwise" for name in ROWS}
    return {"degree": degree, "layer_plan": plan | {"head": "colwise_rep"}}


def divide_by_hand(model: nn.Module, degree: int, replicate: int = 1) -> nn.Module:
    """What a careful user of torch writes: `parallelize_module`, then `fully_shard`."""
    shard = dist.get_world_size() // degree // replicate
    names = ("replicate", "shard", "tensor")[replicate == 1 :]
    mesh = init_device_mesh("cpu", (replicate, shard, degree)[-len(names) :], mesh_dim_names=names)
    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ROWS}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], plan)
    return shard_by_hand(model, ("Block",), mesh[names[:-1]])


# --- sharding by this package ---


def plan(model: nn.Module, classes: tuple[str, ...], **options: Any) -> WrapPlan:
    """The plan of the same units as `shard_by_hand`, but for untied ends."""
    from composer_fsdp2.config.wrapping import WrapPolicy
    from composer_fsdp2.plan.module_tree import ModuleTree
    from composer_fsdp2.plan.planner import plan_wrapping
    from composer_fsdp2.plan.rules import by_class, find_embedding_and_head, root_rule

    ends = find_embedding_and_head(ModuleTree.read(model), WrapPolicy())
    rules = [by_class(*classes), lambda _name, module: ends.get(id(module)), root_rule]
    return plan_wrapping(model, rules, **options)


def prepare(
    model: nn.Module,
    classes: tuple[str, ...],
    optimizer: torch.optim.Optimizer | None = None,
    device: str = "cpu",
    **config: Any,
) -> Iterable[str]:
    """Shards `model` through the drop-in; returns the names of its units.

    Args:
        model: any module.
        classes: of the modules that become units beside the root.
        optimizer: of the model.
        device: of the ranks.
        config: what else stands under `fsdp2` in a YAML.
    """
    from composer_fsdp2 import prepare_fully_shard

    policy = {"wrap_policy": {"classes": list(classes)}, **config}
    return prepare_fully_shard(model, optimizer, policy, "fp32", composers(device))[1]


def composers(device: str) -> str:
    """Returns Composer's name of a device."""
    return "cpu" if device == "cpu" else "gpu"


# --- accumulating gradients ---


def accumulate(model: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
    """Forward and backward of a batch as Composer's Trainer runs them; returns the last loss."""
    from composer_fsdp2.step.run import run_of

    sharding = run_of(model)
    assert sharding is not None
    loss = torch.zeros(())
    with sharding.accumulation.batch():
        for index, tokens in enumerate(microbatches, 1):
            with sharding.accumulation.microbatch(last=index == len(microbatches)):
                loss = model(tokens)
                (loss / len(microbatches)).backward()
    return loss


def shard_by_composer(model: nn.Module, classes: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Composer's own function; it asks the modules themselves which of them to wrap.

    The model is the child of a holder, as of a ComposerModel: nothing would own the rest otherwise.
    """
    from composer.core import Precision
    from composer.distributed.fsdp2 import prepare_fully_shard
    from composer.utils.parallelism import FSDP2Config

    for module in model.modules():
        module._fsdp_wrap = module is model or type(module).__name__ in classes
    holder = nn.Module()
    holder.model = model
    config = FSDP2Config(device_mesh=mesh, reshard_after_forward=True)
    prepare_fully_shard(holder, config, Precision.FP32)


def accumulate_by_hand(
    model: nn.Module, microbatches: list[torch.Tensor], sync: str = "every", *, kept: bool = False
) -> torch.Tensor:
    """What a careful user writes with torch's own methods."""
    loss = torch.zeros(())
    for index, tokens in enumerate(microbatches, 1):
        last = index == len(microbatches)
        if sync == "last":
            model.set_requires_gradient_sync(last)
        elif sync == "reduce_scatter_only":
            model.set_requires_all_reduce(last)
        if kept:
            model.set_reshard_after_backward(last)
        loss = model(tokens)
        (loss / len(microbatches)).backward()
    return loss


# --- process groups ---


@contextmanager
def fake_group(world_size: int) -> Iterator[DeviceMesh]:
    """A group of `world_size` ranks in one process that moves no data; yields its 1-D CPU mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(LOCAL_RANK="0")  # Composer chooses a GPU by it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def _rank_main(
    rank: int,
    body: Callable[..., None],
    world_size: int,
    store: str,
    device: str,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Libraries of the stack read these instead of asking torch.distributed.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        body(*args)
    finally:
        dist.destroy_process_group()


def ranks_on(device: str, on_cpu: int = 2) -> int:
    """Returns the number of ranks of a benchmark: on GPUs, as many as there are."""
    return on_cpu if device == "cpu" else torch.cuda.device_count()


def run_ranks(body: Callable[..., None], world_size: int, *args: Any, device: str = "cpu") -> None:
    """Runs `body(*args)` on `world_size` ranks of this machine (loopback, no port)."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(
            _rank_main, (body, world_size, store, device, args), nprocs=world_size
        )


# --- measuring ---


def now(device: str) -> float:
    """CPU seconds of this process; of a GPU seconds on the clock, when all of its work is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def warm_up() -> None:
    """Has the GPU's libraries take the memory that they keep, in forward and in backward.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/aten/src/ATen/cuda/CublasHandlePool.cpp
    """
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device="cuda", dtype=dtype)
        layer(torch.ones(64, 64, device="cuda", dtype=dtype)).sum().backward()
    torch.cuda.synchronize()


def cpu_seconds(body: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds of `now` for `body()`; its result is dropped after the clock stops."""
    gc.collect()
    start = now(device)
    kept = body()
    elapsed = now(device) - start
    del kept
    return elapsed


def paired(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> tuple[list[float], list[float]]:
    """What both measured, the order swapped every time so that drift cancels."""
    ours_seconds, theirs_seconds = [], []
    for index in range(pairs):
        order = [(ours, ours_seconds), (theirs, theirs_seconds)]
        for measure, into in order if index % 2 == 0 else reversed(order):
            into.append(measure())
    return ours_seconds, theirs_seconds


def paired_ratio(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int
) -> dict[str, float]:
    """Median of `ours() / theirs()`."""
    ours_seconds, theirs_seconds = paired(ours, theirs, pairs)
    ratios = [a / b for a, b in zip(ours_seconds, theirs_seconds, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        **spread(ratios),
        "ours_seconds": statistics.median(ours_seconds),
        "theirs_seconds": statistics.median(theirs_seconds),
    }


def spread(values: list[float]) -> dict[str, float]:
    """First and third quartile of `values`; equal to the extremes where there are too few."""
    if len(values) < 4:
        return {"low": min(values), "high": max(values)}
    low, _, high = statistics.quantiles(values, n=4)
    return {"low": low, "high": high}


def standard_error(values: list[float]) -> float:
    """Of the median, by resampling."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(values), (1000, len(values)), generator=generator)
    medians = torch.tensor(values, dtype=torch.float64)[chosen].quantile(0.5, dim=1)
    return medians.std().item()


def emit(figure: str, value: Mapping[str, Any], goal: float | None = None) -> None:
    """Prints one JSON line for one figure."""
    line = {"figure": figure, "torch": torch.__version__.split("+")[0], **value}
    if goal is not None:
        line["goal"] = goal
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")
    sys.stdout.flush()
