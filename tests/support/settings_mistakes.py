"""Writes mistakes into docs/reference/errors.md: `python -m tests.support.settings_mistakes`.

A line is what stands under `fsdp2` and the error that the parser raises for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from composer_fsdp2 import config
from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
MARK = re.compile(r"(<!-- mistakes -->\n)(.*?)<!-- end of mistakes -->", re.DOTALL)

WRITTEN = (
    "forward_prefetch: BACKWARD_PRE",
    "use_orig_params: true",
    "sharding_strategy: HYBRID_SHARD",
    "ignored_modules: [head]",
    "gradient_sync: lasts",
    "mixed_precision: {buffer_dtype: int8}",
    "communication: {reduce_scatter_buffers: 0}",
    "wrap_policy: {max_unit_bytes: 1GB}",
    "cpu_offload: {pin_memory: 1}",
    "tensor_parallel: {degree: 2, layer_plan: {model.norm: sequence_parallel}}",
    "tensor_parallel: 2, cpu_offload: true",
    "sequence_parallel: {degree: 2, method: ring}",
    "sequence_parallel: 2, compile: {fullgraph: true}",
    "sequence_parallel: 2, compile: true, activation_checkpointing: {mode: selective}",
    "expert_parallel: 2, fp8: true",
    "tiled_mlp: {shards: 1}",
    "chunked_loss: {chunks: 0}",
    "compile: inductor",
    "compile: {blocks: false}",
    "compile: true, tiled_mlp: {shards: 4}",
    "activation_checkpointing: blocks",
    "activation_checkpointing: {every: 2, target: last-4}",
    "activation_checkpointing: {memory_budget: 0.5}",
    "activation_checkpointing: {memory_budget: 0.5, every: 2}, compile: true",
    "keep_fp32: ['re:(norm']",
    "fp8: tensorwise",
    "fp8: {recipe: rowwise, all_gather: true}",
    "fp8: true, tiled_mlp: {shards: 4}",
    "fp8: {all_gather: true}, cpu_offload: true",
    "optimizer_state: {bits: 8, dtype: bf16}",
    "optimizer_state: {dtype: bf16}, local_step: false",
    "optimizer_state: {device: cpu}, cpu_offload: true",
    "frozen: replicate, cpu_offload: true",
    "load_monolith_rank0_only: true",
    "sharded_ckpt_prefix_dir: ../elsewhere",
    "data_parallel_shard_degree: -1, data_parallel_replicate_degree: -1",
)


def message(written: str) -> str:
    """What the parser says to it."""
    try:
        parse_config(yaml.safe_load(f"{{{written}}}"))
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{written} is no mistake")


def table() -> str:
    """All of them as Markdown."""
    lines = ["| written | error |", "|---|---|"]
    for written in WRITTEN:
        said = message(written).replace("|", "&#124;").replace("<", "&lt;")
        lines.append(f"| `{written}` | {said} |")
    return "\n".join(lines) + "\n"


def sentences() -> Iterator[tuple[str, ...]]:
    """The fixed words of every error of its own that the parser has, in the order of the code.

    Not those of `invalid_value`, which all settings share.
    """
    for file in sorted(Path(str(config.__file__)).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "errors.append":
                continue
            (text,) = node.args
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            fixed = [part.value for part in parts if isinstance(part, ast.Constant)]
            if fixed:
                yield tuple(map(str, fixed))


def page() -> str:
    """Returns the page with the table made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}{table()}<!-- end of mistakes -->", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
