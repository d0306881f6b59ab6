"""Weights handed to an inference engine: bytes on the wire over the least, peak over one bucket.

Method: a Llama of four blocks (d=128, vocabulary 1024, fp32) on four real gloo ranks of this
machine. `ModelWeights` is iterated in buckets; each is dropped before the next. The least is what
a rank lacks of the weights in the dtype that is sent. The bytes reach the dispatcher. The peak is
the most that torch's allocator gave out on rank 0 in a second iteration beside what the prepared
model holds, over the size of a bucket. `summon` is `summon_full_params`, which has all weights at
once.

    PYTHONPATH=. python benchmarks/weights_out.py
"""

from __future__ import annotations

import warnings
from typing import Any

import shapes
import torch
import torch.distributed as dist
from comm import CountTraffic
from torch.profiler import ProfilerActivity, profile, record_function

from composer_fsdp2 import ModelWeights, prepare_fully_shard, summon_full_params
from tests.support.plan_layouts import MODELS

BUCKET = 2**20
RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "HSDP": {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
    "TP x FSDP": {"tensor_parallel": 2},
}


def _over(body: Any) -> tuple[int, float]:
    """Peak beside what is there before, and bytes on the wire. Collective: as the body."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        body()
        with record_function("second"):
            body()
    events: Any = recorded.profiler.kineto_results.events()
    start = min(event.start_ns() for event in events if event.name() == "second")
    now = peak = base = 0
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for moment, change in sorted(changes):
        if moment < start:
            base = now + change
        now += change
        peak = max(peak, now - base) if moment >= start else 0
    with CountTraffic() as counter:
        body()
    return peak, counter.traffic.wire


def measure() -> None:
    """Prints a line for each layout and dtype, on rank 0. Collective: yes."""
    warnings.simplefilter("ignore")
    for layout, settings in LAYOUTS.items():
        torch.manual_seed(0)
        model = MODELS["Llama"]()
        prepare_fully_shard(model, None, settings, "fp32", "cpu")
        for dtype in (torch.float32, torch.bfloat16):
            weights = ModelWeights(model, dtype=dtype, bucket_bytes=BUCKET)
            sizes = [info.size_bytes for info in weights.metadata()]

            def iterate(weights: ModelWeights = weights) -> None:
                for bucket in weights.buckets():
                    bucket.clear()

            def summon(model: Any = model) -> None:
                with summon_full_params(model, writeback=False, rank0_only=True):
                    pass

            shards = 2 if layout == "HSDP" else RANKS
            least = sum(sizes) * (1 - 1 / shards)
            for how, body in (("ModelWeights", iterate), ("summon", summon)):
                peak, wire = _over(body)
                if dist.get_rank() == 0:
                    shapes.emit(
                        "weights_out",
                        {
                            "how": how,
                            "layout": layout,
                            "dtype": str(dtype).removeprefix("torch."),
                            "largest_weight": max(sizes),
                            "all_weights": sum(sizes),
                            "wire_over_least": wire / least,
                            "peak_over_bucket": peak / BUCKET,
                        },
                    )


def main() -> None:
    torch.set_num_threads(1)
    shapes.run_ranks(measure, RANKS)


if __name__ == "__main__":
    main()
