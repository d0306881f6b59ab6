"""Peak memory of a training step on one rank, predicted or measured.

Method: a Llama-like model is prepared by this package in one process of a fake group and takes
steps of AdamW; the second step counts. On a GPU the peak is what the allocator says. Without one,
all tensors are fake and a tracker adds up their storages as they appear, grow, shrink and die: that
is deterministic, and leaves out what allocators, streams and kernels add.

`--figure modes` prints a line for each way to treat activations and parameters: the peak against
the sum of its parts, which are the shards of weights and of Adam's two moments (the gradients are
not there yet), the units that are kept from forward to backward, the activations that the forward
leaves behind, and two gradients as large as the logits (of the loss, and through the softmax).

`--figure 8b` predicts the peak of an 8B shape in fp32, every block recomputed, sequences of 4,096,
for 8 and for 512 ranks, against the same blocks with embedding and head in the root unit, as
Composer wraps them.

`--figure logits` prints a line for each degree of tensor parallelism, with and without
`chunked_loss`: the largest tensor as wide as a rank's part of the vocabulary or wider, and the peak
of all of them together, in units of the logits of the whole vocabulary. A rank that has no more
than its part has a largest of 1 / degree / chunks.

Goal: the parts within 10 % of the peak; 8b <= 0.84 on 8 ranks and <= 0.80 on 512; the largest of
logits with `chunked_loss` 1.00 times what a rank's part is.
"""

from __future__ import annotations

import argparse
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import shapes
import torch
import torch.distributed._tools.fake_collectives  # older torch knows none without it
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARTS_GOAL = 0.10
GOALS = {8: 0.84, 512: 0.80}
IN_ROOT = {"wrap_policy": {"classes": ["Block"], "embeddings": False, "lm_head": False}}

MODES: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"activation_checkpointing": True},
    "every other block": {"activation_checkpointing": {"every": 2}},
    "the first two blocks": {"activation_checkpointing": {"target": "first-2"}},
    "by class": {"activation_checkpointing": {"classes": ["Block"]}},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
}
"""how activations are treated: settings of a run"""
GPU_MODES: dict[str, dict[str, Any]] = {
    "activations offloaded": {"activation_cpu_offload": True},
    "parameters offloaded": {"cpu_offload": True},
}


class Tracker(TorchDispatchMode):
    """Bytes of all storages that operators have returned, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if isinstance(local, torch.Tensor):
                self.note(local.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        """Takes up a storage, or its new size."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen[key] = (weakref.ref(storage, lambda _: self._drop(key)), 0)
        reference, before = self._seen[key]
        self._seen[key] = (reference, size)
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._seen.pop(key)[1]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """FSDP2 frees and refills its buffers by resizing, which is no operator."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._seen:
                self.note(storage)
            return result

        torch.UntypedStorage.resize_ = resize
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = original


class Logits(Tracker):
    """The same of tensors with rows for tokens and columns for words of the vocabulary."""

    def __init__(self, tokens: int, rows: int, columns: int, words: int) -> None:
        """Takes all tokens and those of a chunk, a rank's part of the vocabulary and all of it."""
        super().__init__()
        self.largest = 0
        self._columns = (columns, words)
        self._rows = {rows * n for n in range(1, words // columns * tokens // rows + 1)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls again, with what a rank has
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._is_wide(leaf):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
                self.note(leaf.untyped_storage())
        return result

    def _is_wide(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):  # DTensor asks them for shapes; they have no memory
            return False
        columns = tensor.shape[-1] if tensor.ndim else 0
        return columns in self._columns and tensor.numel() // columns in self._rows


class Allocator:
    """The same on a GPU, from the allocator: blocks that nothing else may use.

    Those that another stream has not done with count, which `memory_allocated` leaves out.
    """

    def __init__(self) -> None:
        self._base = 0
        shapes.warm_up()
        self._base = self.now

    def _bytes(self, which: str) -> int:
        return torch.cuda.memory_stats()[f"active_bytes.all.{which}"] - self._base

    @property
    def now(self) -> int:
        return self._bytes("current")

    @property
    def peak(self) -> int:
        return self._bytes("peak")

    @peak.setter
    def peak(self, _now: int) -> None:
        torch.cuda.reset_peak_memory_stats()

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _memory() -> Iterator[Tracker | Allocator]:
    """What tells the bytes in use; without a GPU all tensors inside are fake."""
    if torch.cuda.is_available():
        yield Allocator()
        return
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True), tracker.watching():
        yield tracker


def _ours(model: nn.Module, config: dict[str, Any]) -> Any:
    from composer_fsdp2 import prepare_fully_shard
    from composer_fsdp2.step.run import run_of

    policy = {"wrap_policy": {"classes": ["Block"]}, **config}
    device = "gpu" if torch.cuda.is_available() else "cpu"
    prepare_fully_shard(model, None, policy, precision="fp32", device=device)
    sharding = run_of(model)
    assert sharding is not None
    return sharding.plan


def _peak(
    build: Callable[[], nn.Module], config: dict[str, Any], tokens: tuple[int, int], world: int
) -> dict[str, int]:
    """Bytes of a model in its second step: the peak, and what its parts are."""
    with shapes.fake_group(world):
        with torch.device("meta"):
            model = build()
        plan = _ours(model, config)
        with _memory() as memory:
            place = "cpu" if config.get("cpu_offload") else _device()
            return _step(model.to_empty(device=place), plan, tokens, memory)


def _step(
    model: nn.Module, plan: Any, tokens: tuple[int, int], memory: Tracker | Allocator
) -> dict[str, int]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 8, tokens, device=_device())
    before = after = 0
    for _ in range(2):
        optimizer.zero_grad()
        memory.peak = before = memory.now
        loss = model(ids)
        after = memory.now
        loss.backward()
        optimizer.step()
    kept = sum(unit.numel for unit in plan.units if not unit.reshard_after_forward) * 4
    return {
        "peak": memory.peak,
        "shards": sum(param.to_local().numel() for param in model.parameters()) * 4,
        "kept_units": kept,
        "activations": after - before - kept,
    }


def modes(world: int = 8) -> None:
    """A line for each mode: the peak against the sum of its parts."""
    shape, tokens = {"vocab": 8192}, (2, 257)
    if torch.cuda.is_available():  # large enough that blocks of the allocator do not count
        shape = {"vocab": 32000, "d_model": 1024, "hidden": 2816, "heads": 16}
        tokens = (2, 1025)
    logits = tokens[0] * (tokens[1] - 1) * shape["vocab"] * 4
    found = {**MODES, **(GPU_MODES if torch.cuda.is_available() else {})}
    for name, config in found.items():
        seen = _peak(lambda: shapes.LlamaLike(**shape), config, tokens, world)
        state = 0 if config.get("cpu_offload") else 3 * seen["shards"]
        parts = {
            "state": state,
            "kept_units": seen["kept_units"],
            "activations": seen["activations"],
            "logits": 2 * logits,
        }
        value = {
            "mode": name,
            "ranks": world,
            "device": _device(),
            "peak_bytes": seen["peak"],
            **{f"{part}_bytes": size for part, size in parts.items()},
            "ratio": sum(parts.values()) / seen["peak"],
        }
        shapes.emit("memory.modes", value, PARTS_GOAL)


def predicted_8b(worlds: tuple[int, ...] = (8, 512)) -> None:
    """A line for each number of ranks: the peak against that of Composer's wrapping."""

    def build() -> nn.Module:
        return shapes.LlamaLike(blocks=32, d_model=4096, vocab=128256, hidden=14336, heads=32)

    recomputed = {"activation_checkpointing": True}
    for world in worlds:
        ours = _peak(build, recomputed, (1, 4097), world)
        root = _peak(build, {**IN_ROOT, **recomputed}, (1, 4097), world)
        value = {
            "ranks": world,
            "peak_gib": ours["peak"] / 2**30,
            "ends_in_root_gib": root["peak"] / 2**30,
            "ratio": ours["peak"] / root["peak"],
        }
        shapes.emit("memory.8b", value, GOALS[world])


def prefetch(world: int = 8) -> None:
    """A line for each number of units that backward gathers ahead: the peak, and units in it."""
    shape = {"blocks": 8, "d_model": 512, "vocab": 512, "hidden": 2048, "heads": 8}
    block = sum(p.numel() for p in shapes.LlamaLike(**{**shape, "blocks": 1}).blocks.parameters())
    peaks = {
        ahead: _peak(
            lambda: shapes.LlamaLike(**shape),
            {"activation_checkpointing": True, "backward_prefetch": ahead},
            (1, 65),
            world,
        )["peak"]
        for ahead in (0, None, 1, 2)
    }
    for ahead, peak in peaks.items():
        value = {
            "backward_prefetch": ahead,
            "peak_bytes": peak,
            "unit_bytes": block * 4,
            "ratio": (peak - peaks[0]) / (block * 4),
        }
        shapes.emit("memory.prefetch", value, None)


def logits(words: int = 2048, tokens: int = 96, world: int = 8) -> None:
    """A line for each degree and number of chunks; none of them is a plain loss."""
    whole = tokens * words * 4
    for degree in (1, 2, 4):
        for chunks in (None, 4) if degree == 1 else (None, 1, 4):
            torch.manual_seed(0)
            model = shapes.with_heads_of(degree)
            config: dict[str, Any] = {}
            if degree > 1:
                config["tensor_parallel"] = shapes.tensor_setting(degree)
            if chunks is not None:
                config["chunked_loss"] = {"chunks": chunks}
            with shapes.fake_group(world):
                shapes.prepare(model, ("Block",), **config)
                with Logits(tokens, tokens // (chunks or 1), words // degree, words) as seen:
                    model(torch.randint(0, words, (1, tokens + 1))).backward()
            part = whole // degree // (chunks or 1)
            value = {
                "degree": degree,
                "chunks": chunks,
                "whole_bytes": whole,
                "largest_bytes": seen.largest,
                "peak_bytes": seen.peak,
                "largest": seen.largest / whole,
                "peak": seen.peak / whole,
                "ratio": seen.largest / part,
            }
            shapes.emit("memory.logits", value, None if chunks is None else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=["modes", "8b", "logits", "prefetch"], default="modes")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 512], help="of 8b")
    options = parser.parse_args()
    if options.figure == "8b":
        predicted_8b(tuple(options.ranks))
    else:
        {"modes": modes, "logits": logits, "prefetch": prefetch}[options.figure]()


if __name__ == "__main__":
    main()
