"""Sequence parallelism: activations of a rank and bytes on the wire, against their theory.

Method: a Llama of transformers (`--blocks` blocks of width 256, 8 heads, 2 of keys and
values, fp32, blocks recomputed in backward, loss in chunks) takes two steps on one rank of a fake
group of 8, with fake tensors, so that nothing is computed or sent and every size is real. `peak` is
that of the second step less what there is before it.

`--figure activations`: bytes at a degree times the degree, over those of degree 1. Goal 1.1.
`--figure longest`: the peak with a sequence 0.9 x degree as long, over that of degree 1. Goal 1.0.
`--figure memory`: the peak for each degree, method and length, which the picture in the docs shows.
`--figure bytes`: what attention sends in a step over theory. Goal 1.005. Of `ulysses`
(n - 1)/n x S/n x (2 heads + 2 key and value heads) x size in each direction; of `gather_kv`
(n - 1) x S/n x 2 key and value heads x size. Recomputation exchanges a second time in backward.
"""

from __future__ import annotations

import argparse
from typing import Any

import shapes
import torch
import transformers
from memory import Tracker
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

WORLD, HEADS, KV_HEADS, SIZE = 8, 8, 2, 32
GOALS = {"activations": 1.1, "longest": 1.0, "bytes": 1.005, "memory": None}
METHODS = ("ulysses", "gather_kv")


class Sent(TorchDispatchMode):
    """Adds up the bytes that a sequence group exchanges."""

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.size_bytes, self._degree = 0.0, degree

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, n = func.overloadpacket.__name__, self._degree
        if name == "alltoall_base_":
            self.size_bytes += _nbytes(args[1]) * (n - 1) / n
        elif name == "_allgather_base_" and args[0].numel() == n * args[1].numel() and n < WORLD:
            self.size_bytes += _nbytes(args[0]) * (n - 1) / n
        return result


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _model(blocks: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=HEADS * SIZE,
        intermediate_size=512,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 20,
    )
    return transformers.LlamaForCausalLM(config)


def _step(
    degree: int, method: str, length: int, blocks: int, *, recompute: bool
) -> dict[str, float]:
    from composer_fsdp2 import prepare_fully_shard

    with shapes.fake_group(WORLD):
        with torch.device("meta"):
            model = _model(blocks)
        settings: dict[str, Any] = {
            "activation_checkpointing": recompute,
            "chunked_loss": {"chunks": 8},
            "order_check": "never",
            "reshard_after_forward": True,
        }
        if degree > 1:
            settings["sequence_parallel"] = {"degree": degree, "method": method}
        prepare_fully_shard(model, None, settings, precision="fp32", device="cpu")
        tracker, sent = Tracker(), Sent(degree)
        with FakeTensorMode(allow_non_fake_inputs=True), tracker.watching():
            model = model.to_empty(device="cpu")
            ids = torch.zeros(1, length, dtype=torch.long)
            for _ in range(2):
                for param in model.parameters():
                    param.grad = None
                before, tracker.peak = tracker.now, tracker.now
                sent.size_bytes = 0.0
                with sent:
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                    after = tracker.now
                    loss.backward()
                    del loss
        return {"peak": tracker.peak - before, "kept": after - before, "bytes": sent.size_bytes}


def _theory(degree: int, method: str, length: int, blocks: int) -> float:
    """Bytes of one direction in all layers."""
    n, share = degree, length // degree
    if method == "ulysses":
        elements = (n - 1) / n * share * (2 * HEADS + 2 * max(KV_HEADS, n)) * SIZE
    else:
        elements = (n - 1) * share * 2 * KV_HEADS * SIZE
    return elements * 4 * blocks


def _memory(degrees: list[int], blocks: int) -> None:
    for degree, method in ((1, "none"), *((n, method) for n in degrees for method in METHODS)):
        for length in (2048 << power for power in range(6)):
            peak = _step(degree, method, length, blocks, recompute=True)["peak"]
            found = {"degree": degree, "method": method, "length": length, "peak": peak}
            shapes.emit("sequence memory", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", choices=GOALS, default="activations")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--blocks", type=int, default=8)
    args = parser.parse_args()
    if args.figure == "memory":
        _memory(args.degrees, args.blocks)
        return
    recompute = args.figure != "bytes"
    one = _step(1, "", args.length, args.blocks, recompute=recompute)
    for degree in args.degrees:
        for method in METHODS:
            longer = int(0.9 * degree * args.length) if args.figure == "longest" else args.length
            got = _step(degree, method, longer, args.blocks, recompute=recompute)
            if args.figure == "bytes":
                # In backward as well; gathered keys and values are gathered there a second time.
                times = 2 if method == "ulysses" else 3
                expected = times * _theory(degree, method, longer, args.blocks)
                ratio = got["bytes"] / expected
            elif args.figure == "longest":
                ratio = got["peak"] / one["peak"]
            else:
                ratio = got["peak"] * degree / one["peak"]
            found = {"degree": degree, "method": method, "length": longer, **got, "ratio": ratio}
            shapes.emit(f"sequence {args.figure}", found, GOALS[args.figure])


if __name__ == "__main__":
    main()
