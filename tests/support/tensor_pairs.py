"""What stands beside tensor parallelism: each pair equals one process, or is refused by name.

One table: the tests of `tests/dist/test_tensor_with.py` and the page
docs/reference/tensor-parallel-with.md come from it. `python -m tests.support.tensor_pairs` writes
the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["METHODS", "MODELS", "PAGE", "SETTINGS", "TRAINER", "Pair", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tensor-parallel-with.md"
_WITH, _LOSS = "test_tensor_with.py", "test_tensor_loss.py"
_PARALLEL, _TRAINER = "test_tensor_parallel.py", "test_tensor_trainer.py"
_METHODS = "test_tensor_methods.py"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One row."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """under `fsdp2`, beside `tensor_parallel: 2`"""
    refused: str = ""
    """what the error says"""
    why: str = ""
    """for the page: the reason, or a remark"""
    test: str = ""
    """`file::function` of a test elsewhere, where the row is none of the table's own"""
    near: bool = False
    """whether rounding of a low precision keeps it from being equal to 1e-6"""
    needs: str = ""
    """a module or a method of `FSDPModule` that not every installation has"""


_EMULATED = {"emulate": True, "names": ["*.mlp.*"]}

SETTINGS: dict[str, Pair] = {
    "activation_checkpointing": Pair(settings={"activation_checkpointing": True}),
    "activation_checkpointing, selective": Pair(
        settings={"activation_checkpointing": {"mode": "selective"}}
    ),
    "activation_cpu_offload": Pair(
        settings={"activation_checkpointing": True, "activation_cpu_offload": True}
    ),
    "chunked_loss": Pair(
        test=f"{_LOSS}::test_the_models_own_loss_is_that_of_one_process",
        why="also with one chunk: no rank has the logits of the whole vocabulary",
    ),
    "communication.reduce_scatter_buffers": Pair(
        settings={"communication": {"reduce_scatter_buffers": 2}},
        needs="set_reduce_scatter_max_input_buffers",
    ),
    "communication.separate_reduce_scatter_group": Pair(
        settings={"communication": {"separate_reduce_scatter_group": True}},
        needs="set_separate_reduce_scatter_group",
    ),
    "communication.sum_reductions": Pair(
        settings={"communication": {"sum_reductions": True}},
        needs="set_force_sum_reduction_for_comms",
    ),
    "communication.allocate_from_process_group": Pair(
        settings={"communication": {"allocate_from_process_group": True}},
        refused="NCCL's own memory",
        why="NCCL's own memory for groups of two axes has not been seen on GPUs",
    ),
    "communication.symmetric_memory": Pair(
        settings={"communication": {"symmetric_memory": True}},
        refused="NCCL's own memory",
        why="as above",
    ),
    "compile": Pair(
        settings={"compile": {"backend": "aot_eager"}},
        why="tested with aot_eager; inductor makes kernels of the same graphs",
    ),
    "compile and activation_checkpointing": Pair(
        settings={"compile": {"backend": "aot_eager"}, "activation_checkpointing": True}
    ),
    "cpu_offload": Pair(
        settings={"cpu_offload": True},
        refused="no run on several GPUs has shown it",
        why="it needs GPUs, and no run on several of them has shown it",
    ),
    "fp8": Pair(
        settings={"fp8": _EMULATED},
        needs="torchao",
        why="one scale for a whole weight; in emulation, with SGD: AdamW blows up other casts",
    ),
    "fp8, rowwise": Pair(settings={"fp8": {**_EMULATED, "recipe": "rowwise"}}, needs="torchao"),
    "fp8.all_gather": Pair(
        settings={"fp8": {**_EMULATED, "all_gather": True}},
        refused="scales would be those of one rank's part",
        why="shards would be cast with the scale of one rank's part",
    ),
    "gradient_sync: last": Pair(test=f"{_PARALLEL}::test_microbatches_norms_and_clipping"),
    "ignored_params": Pair(
        settings={"ignored_params": ["model.norm.weight"]},
        refused="nobody would average their gradients",
        why="nobody would average their gradients over the group",
    ),
    "frozen: replicate": Pair(
        settings={"frozen": "replicate"},
        refused="other parts of what they divide",
        why="a frozen weight of a divided layer is another part on each rank of a group",
    ),
    "keep_fp32": Pair(settings={"keep_fp32": ["*norm*"]}),
    "keep_fp32 with bf16": Pair(
        test=f"{_WITH}::test_islands_compute_in_fp32",
        near=True,
        why="loss and gradients of a step beside FSDP2 alone, in bf16",
    ),
    "local_step: true": Pair(settings={"local_step": True}),
    "local_step: false": Pair(settings={"local_step": False}),
    "optimizer_state.dtype": Pair(
        test=f"{_WITH}::test_state_in_bf16_has_the_bits_of_one_process",
        near=True,
        why="the bits of one process that is given the same gradients; which way a moment is "
        "rounded depends on all digits of these",
    ),
    "optimizer_state.bits": Pair(
        settings={"optimizer_state": {"bits": 8}},
        refused="blocks of 8 bits would end where layers are divided",
        why="blocks of 256 elements would end where layers are divided, and lose other bits",
    ),
    "order_check: always": Pair(settings={"order_check": "always"}),
    "prefetching": Pair(settings={"forward_prefetch": 2, "backward_prefetch": 2}),
    "reshard_after_forward: false": Pair(settings={"reshard_after_forward": False}),
    "reshard_after_forward: 2": Pair(
        settings={"reshard_after_forward": 2},
        refused="reshard_after_forward is a number",
        why="groups of some ranks of the other axis have not been tried",
    ),
    "tiled_mlp": Pair(settings={"tiled_mlp": {"shards": 2}}),
    "unused_parameters: true": Pair(settings={"unused_parameters": True}),
    "expert_parallel": Pair(
        test="test_expert_parallel.py::test_other_layers_are_divided_too",
        why="experts stay whole; ranks with the same tokens send a part of them each",
    ),
    "sequence_parallel": Pair(
        test="test_sequence_parallel.py::test_with_tensor_parallel",
        why="of the heads that tensor parallelism leaves a rank",
    ),
}
"""settings under `fsdp2`"""

TRAINER: dict[str, Pair] = {
    "microbatches, GradientClipping (norm, value), SpeedMonitor": Pair(
        test=f"{_TRAINER}::test_clipping_and_microbatches"
    ),
    "data that ends unevenly, evaluation": Pair(
        test=f"{_TRAINER}::test_evaluation_and_data_that_ends_unevenly"
    ),
    "metrics that read logits": Pair(
        test=f"{_LOSS}::test_metrics_and_evaluation_are_those_of_whole_logits"
    ),
    "device_train_microbatch_size: auto": Pair(
        test=f"{_TRAINER}::test_items_that_have_not_been_tried_are_refused",
        refused="is auto, and tensor",
        why="a rank that runs out of memory inside a divided layer would leave its group waiting",
    ),
    "EMA, SWA": Pair(
        test=f"{_WITH}::test_averages_go_on_in_another_layout",
        why="averages too, in a checkpoint and in another layout",
    ),
    "GradientClipping (adaptive)": Pair(
        test=f"{_WITH}::test_adaptive_clipping_is_that_of_one_process"
    ),
    "SAM, LayerFreezing": Pair(
        test=f"{_WITH}::test_items_are_refused_by_name",
        refused="in an order of its own",
        why="not tried over the steps and epochs in which they change a layer",
    ),
    "algorithms that change the batch": Pair(
        test=f"{_WITH}::test_items_are_refused_by_name",
        refused="draws on each rank by itself",
        why="they draw on each rank by itself, and a group needs one batch",
    ),
    "amp_fp16": Pair(
        test=f"{_WITH}::test_scaled_gradients_are_refused",
        refused="some of them would step",
        why="torch does not tell all ranks of both axes of an infinite gradient: with one on one "
        "of four ranks, weights moved by 0.015 where they should have stayed",
    ),
}
"""what the Trainer is given"""

MODELS: dict[str, Pair] = {
    "two parameter groups, state from before": Pair(
        test=f"{_PARALLEL}::test_groups_and_state_from_before_are_carried"
    ),
    "frozen and unused weights": Pair(test=f"{_PARALLEL}::test_frozen_and_unused_weights"),
    "experts (Mixtral)": Pair(
        test=f"{_WITH}::test_experts_train_like_one_process",
        why="each expert is divided like an MLP",
    ),
    "experts that a group leaves out": Pair(
        test=f"{_WITH}::test_experts_that_a_group_leaves_out",
    ),
    "towers": Pair(
        test=f"{_WITH}::test_a_tower_is_refused",
        refused="a tower",
        why="a rank may leave a tower out, and the ranks of a group would wait for each other",
    ),
    "Muon": Pair(
        test="test_tensor_muon.py::test_steps_like_one_process",
        why="each matrix is whole on one rank for a moment, brought from all ranks of both axes",
    ),
    "optimizers that are not known": Pair(
        test=f"{_PARALLEL}::test_an_optimizer_that_is_not_known_is_refused",
        refused="is not known to compute each element by itself",
        why="they look across a matrix, of which a rank has a part",
    ),
    "LoRA adapters": Pair(
        test=f"{_WITH}::test_adapters_train_like_one_process",
        why="divided with the layer that they are beside; a head with an adapter stays whole",
    ),
    "LoRA with dropout, DoRA": Pair(
        test=f"{_WITH}::test_adapters_that_are_refused",
        refused="whose numbers ranks would not draw alike",
        why="dropout of an adapter lies between layers where ranks draw numbers of their own; DoRA "
        "needs norms of whole layers",
    ),
    "ALiBi": Pair(
        test=f"{_WITH}::test_alibi_is_refused",
        refused="uses ALiBi",
        why="its slopes are those of all heads",
    ),
}

METHODS: dict[str, Pair] = {
    "clip_grad_norm_": Pair(test=f"{_PARALLEL}::test_microbatches_norms_and_clipping"),
    "save_pretrained": Pair(
        test=f"{_PARALLEL}::test_save_pretrained_writes_the_order_of_the_model"
    ),
    "generate": Pair(
        test=f"{_METHODS}::test_generates_what_one_process_does",
        why="the ranks of a group have the same prompts, and draw the same words",
    ),
    "summon_full_params": Pair(
        test=f"{_METHODS}::test_full_parameters_are_those_of_one_process",
        why="a divided layer cannot be called by itself meanwhile",
    ),
}

HEAD = """\
# What goes with tensor parallelism

Each row is a test, on four ranks with `tensor_parallel: 2`. *Equal* means: losses, and weights
after several steps with SGD or AdamW (mostly with both), are within 1e-6 of one process that sees
the same global batches. *Within rounding* is a low precision. *Refused* is an error on every rank
that names the setting, before the model is changed.

`python -m tests.support.tensor_pairs` writes this page.
"""
_SECTIONS = {
    "Settings of `fsdp2`": SETTINGS,
    "Composer's Trainer": TRAINER,
    "Models and optimizers": MODELS,
    "Methods": METHODS,
}


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for title, pairs in _SECTIONS.items():
        rows = [
            f"| {_code(name)} | {_outcome(pair)} | {pair.why} |" for name, pair in pairs.items()
        ]
        parts.append(f"\n## {title}\n\n| With | Outcome | Why |\n|---|---|---|\n")
        parts.append("".join(f"{row}\n".replace("|  |", "| |") for row in rows))
    return "".join(parts)


def _code(name: str) -> str:
    words = ("prefetching", "towers")
    return f"`{name}`" if re.fullmatch(r"[a-z][\w.]+(: \w+)?", name) and name not in words else name


def _outcome(pair: Pair) -> str:
    if pair.refused:
        return "refused"
    return "within rounding" if pair.near else "equal"


if __name__ == "__main__":
    PAGE.write_text(page())
