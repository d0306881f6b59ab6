"""The settings of a run: each is declared here once, parsed and checked with all others at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from composer_fsdp2.config import blocks, parallel
from composer_fsdp2.config.fsdp1 import FSDP1_ONLY, fsdp1_answer
from composer_fsdp2.config.messages import ascii_repr, raise_errors, unknown_keys
from composer_fsdp2.config.placement import (
    COMMUNICATION,
    CPU_OFFLOAD,
    OPTIMIZER_STATE,
    Communication,
    CPUOffload,
    OptimizerState,
    check_state_together,
)
from composer_fsdp2.config.setting import (
    BOOLEAN,
    FOLDER,
    FOLDER_NAME,
    NAMES,
    PATTERNS,
    Setting,
    ValueType,
    check_patterns,
    choice,
    is_number,
    null_or,
    parse_list,
    plain,
    setting,
    settings_of,
    with_methods,
)
from composer_fsdp2.config.wrapping import (
    PRECISION,
    RESHARD,
    WRAP_POLICY,
    PrecisionSpec,
    Reshard,
    WrapPolicy,
)
from composer_fsdp2.errors import ConfigError

__all__ = [
    "FIELDS",
    "FORECAST",
    "FSDP2Config",
    "GradientSync",
    "declare_setting",
    "describe_values",
    "known_settings",
    "parse_config",
    "values_of",
]

FORECAST = "COMPOSER_FSDP2_FORECAST"
"""variable in which `train` gives rank 0 the step that doctor predicted, for `verbose`"""

T = TypeVar("T")

GradientSync = Literal["every", "last", "reduce_scatter_only"]

_DEGREE = ValueType(
    expected="a positive number of ranks, or -1 for all that are left",
    accepts=lambda value: is_number(value) or (type(value) is int and value == -1),
)
_UNITS_AHEAD = ValueType(
    expected="a number of units ahead, 0 or above",
    accepts=lambda value: is_number(value, least=0),
)


def _check_degrees(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses two degrees that both take the ranks that are left."""
    if values["data_parallel_shard_degree"] == values["data_parallel_replicate_degree"] == -1:
        errors.append(
            "'data_parallel_shard_degree' and 'data_parallel_replicate_degree' are both -1. "
            "Only one of them can take the ranks the other leaves. Give one of them a number."
        )


def _check_monolith(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses a setting for full checkpoints in a run with sharded ones."""
    if values["load_monolith_rank0_only"] is True and values["state_dict_type"] == "sharded":
        errors.append(
            "'load_monolith_rank0_only' is true while 'state_dict_type' is sharded. Only a full "
            "checkpoint can be read by rank 0 alone, so it would have no effect. "
            "Write state_dict_type: full, or leave load_monolith_rank0_only out."
        )


def _check_frozen(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses frozen parameters on every device beside parameters in CPU memory."""
    if values["frozen"] == "replicate" and values["cpu_offload"]:
        errors.append(
            "'frozen' is replicate while 'cpu_offload' is set. One keeps the frozen part on every "
            "device to save gathers, the other keeps parameters in CPU memory to save the device. "
            "Take one of them out."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Config:
    """Settings of one FSDP2 run. Build it directly or with `parse_config` from YAML.

    Collective: no. Each field is a setting; `docs/reference/settings.md` lists them with bounds.

    Raises:
        ConfigError: from the constructor too, with every mistake in one message.

    Example:
        >>> from composer_fsdp2 import FSDP2Config
        >>> FSDP2Config(data_parallel_replicate_degree=2).data_parallel_shard_degree
        -1
    """

    data_parallel_shard_degree: int = setting(
        -1,
        _DEGREE,
        "Number of ranks that share one replica of the model. -1 takes the ranks that "
        "`data_parallel_replicate_degree` leaves.",
        example="{data_parallel_shard_degree: 8, data_parallel_replicate_degree: -1}",
        saves="With N ranks, a rank holds 1/N of parameters, gradients and optimizer state.",
        costs="Each gather and reduction goes over N ranks.",
    )
    data_parallel_replicate_degree: int | None = setting(
        None,
        null_or(_DEGREE),
        "Number of replicas of the model (HSDP). null is one on a mesh with one axis.",
        check_together=_check_degrees,
        see="recipes/several-nodes.md",
        example="{data_parallel_replicate_degree: -1, data_parallel_shard_degree: 8}",
        saves="Weights are gathered inside a replica only, for example inside a node.",
        costs="A rank holds 1/shard degree of the model. Gradients are averaged between replicas.",
    )
    reshard_after_forward: Reshard = setting(
        "auto",
        RESHARD,
        "When a unit frees its gathered parameters. `auto`: top-level units keep them until "
        "backward (unless nothing in them is trained), all others free them after forward. "
        "`true`: all units free them. `false`: no unit does. A number: units reshard to groups of "
        "that many ranks, top-level units as with `auto`.",
        see="memory-and-speed.md",
        example="reshard_after_forward: false",
        saves="`true`: memory of the top-level unit. `false`: the second gather.",
        costs="`false` holds all weights until backward. A number N holds 1/N of them.",
    )
    eval_reshard_after_forward: bool | None = setting(
        None,
        null_or(BOOLEAN),
        "When units free parameters in the Trainer's evaluations. `false` gathers each unit once "
        "and keeps it until the end. `true` frees it after its forward. null: as in training.",
        see="recipes/export.md",
        since="0.2.0",
        example="eval_reshard_after_forward: false",
        saves="`false` saves all gathers of an evaluation but one of each unit.",
        costs="`false` holds the whole model during the evaluation.",
    )
    forward_prefetch: int = setting(
        0,
        _UNITS_AHEAD,
        "Number of units that forward gathers ahead in training, in the order in which units ran "
        "in the first step. 0 is torch's own: the next unit, as soon as the CPU gets there.",
        see="memory-and-speed.md",
        since="0.2.0",
        example="forward_prefetch: 2",
        saves="Time where a profile shows gaps. Not measured on GPUs.",
        costs="One more unit in memory for each unit ahead.",
    )
    backward_prefetch: int | None = setting(
        None,
        null_or(_UNITS_AHEAD),
        "Number of units that backward gathers ahead. null is torch's own: one, in reverse order. "
        "0 gathers each unit only when backward comes to it.",
        see="memory-and-speed.md",
        since="0.2.0",
        example="backward_prefetch: 2",
        saves="0: memory of one unit. Others: time where a profile shows gaps, not measured on "
        "GPUs.",
        costs="0: backward waits for each gather. Others: one more unit in memory for each unit "
        "ahead.",
    )
    gradient_sync: GradientSync = setting(
        "every",
        choice("every", "last", "reduce_scatter_only"),
        "Which microbatches of a batch reduce gradients. `every`: each of them. `last`: the last "
        "one only; units with `reshard_after_forward: false` and top-level units are gathered once "
        "a batch. `reduce_scatter_only`, with HSDP: each reduces within a replica, the last one "
        "averages over the replicas.",
        see="memory-and-speed.md",
        since="0.2.0",
        example="gradient_sync: last",
        saves="With 4 microbatches: 3/4 of the reduced bytes, or of the all-reduces.",
        costs="Whole gradients until the last microbatch, or one more sharded gradient.",
    )
    order_check: Literal["first", "always", "never"] = setting(
        "first",
        choice("first", "always", "never"),
        "When ranks compare which collective comes next, so that a difference is an error on all "
        "of them. `first`: in the first step. `always`: in every step. `never`: not at all.",
        see="how-it-works.md",
        since="0.2.0",
        example="order_check: always",
        saves="Hangs that end in a timeout without a reason.",
        costs="`always` sends a small message before each collective.",
    )
    mixed_precision: str | PrecisionSpec = setting(
        "DEFAULT",
        PRECISION,
        "`DEFAULT` computes in the trainer's precision and reduces gradients in fp32. `PURE` "
        "reduces in that precision too. `FULL` uses the parameters' own dtype everywhere.",
        saves="`PURE` halves the bytes of reductions against `DEFAULT` in bf16.",
        costs="`PURE` sums gradients in low precision.",
    )
    keep_fp32: tuple[str, ...] | None = setting(
        None,
        null_or(PATTERNS),
        "Globs (or `re:`) of modules that compute in fp32 in a run of lower precision, autocast or "
        "not, as units of their own. null takes those that a Hugging Face model lists.",
        since="0.2.0",
        example="keep_fp32: ['*.router', '*norm*']",
        saves="Accuracy of norms and routers.",
        costs="One unit for each module, gathered in fp32.",
    )
    unused_parameters: bool | Literal["auto"] | tuple[str, ...] = setting(
        "auto",
        ValueType(
            expected="auto, true, false, or a list of patterns",
            accepts=lambda value: isinstance(value, bool | tuple) or value == "auto",
            check_inside=check_patterns,
            parse=parse_list,
        ),
        "Parameters that get a gradient on some ranks only. `auto` reduces a zero for them, and "
        "compares what was used in units with experts or a tower and in units that left something "
        "out. A list of globs (or `re:`) adds modules that a rank may leave out. `true` compares "
        "in all units. `false` does as torch does.",
        see="recipes/experts.md",
        since="0.2.0",
        example="unused_parameters: [vision_tower, bridge]",
        saves="Wrong gradients and runs that stop.",
        costs="Units that compare reduce one number a parameter and wait for the device.",
    )
    tied_weights: Literal["lift", "error"] = setting(
        "lift",
        choice("lift", "error"),
        "`lift` moves a weight that several units share to their lowest common parent. `error` "
        "refuses such a model.",
        see="how-it-works.md",
        example="tied_weights: error",
    )
    wrap_policy: WrapPolicy = setting(
        WrapPolicy(),
        WRAP_POLICY,
        "Which modules become units. Patterns are globs, or `re:` and a regular expression. They "
        "may carry settings of the unit: `classes: {Block: {reshard_after_forward: 2}}`.",
        see="how-it-works.md",
        saves="Smaller units need less memory.",
        costs="Smaller units need more collectives.",
    )
    ignored_params: tuple[str, ...] = setting(
        (),
        NAMES,
        "Globs of parameters that FSDP leaves alone. They must be frozen, or be DTensors already.",
        example="ignored_params: ['*.rotary.inv_freq']",
        costs="They stay whole on every rank.",
    )
    frozen: Literal["shard", "replicate"] = setting(
        "shard",
        choice("shard", "replicate"),
        "Parameters that are frozen when the run is built. `shard` gathers them with their unit. "
        "`replicate` keeps them on every rank, in their own dtype; training them later is an "
        "error.",
        check_together=_check_frozen,
        see="recipes/lora.md",
        since="0.3.0",
        example="frozen: replicate",
        saves="With LoRA only adapters are gathered.",
        costs="All bytes of the frozen part on every rank.",
    )
    forward_methods: tuple[str, ...] = setting(
        (),
        NAMES,
        "Methods besides `forward` that compute with parameters, as `path.to.module.method`.",
        example="forward_methods: [model.encode]",
    )
    tensor_parallel: parallel.TensorSpec | None = setting(
        None,
        parallel.TENSOR_PARALLEL,
        "Divides each layer between ranks, as `parallelism_config.tp` does. FSDP2 takes the rest.",
        check_together=parallel.check_tensor_parallel_together,
        see="recipes/tensor-parallel.md",
        since="0.3.0",
        saves="Degree 2: half of each gathered unit and of what a layer keeps.",
        costs="Two exchanges of activations a block in forward, and in backward.",
    )
    sequence_parallel: parallel.SequenceSpec | None = setting(
        None,
        parallel.SEQUENCE_PARALLEL,
        "Divides each sequence between ranks, which exchange in attention. All read one batch.",
        check_together=parallel.check_sequence_parallel_together,
        see="recipes/long-sequences.md",
        since="0.3.0",
        saves="Degree 4: three quarters of the activations of a sequence.",
        costs="Two exchanges an attention layer in forward, and in backward.",
    )
    expert_parallel: parallel.ExpertSpec | None = setting(
        None,
        parallel.EXPERT_PARALLEL,
        "Ranks hold the experts of a layer between them; tokens travel to their experts.",
        check_together=parallel.check_expert_parallel_together,
        see="recipes/experts.md",
        since="0.3.0",
        saves="Degree 4: three quarters of the experts that a rank gathers for a layer.",
        costs="Two exchanges of tokens a layer of experts in forward, and in backward.",
    )
    activation_checkpointing: bool | blocks.ActivationSpec = setting(
        False,
        blocks.ACTIVATION,
        "Modules that are computed again in backward. `true` takes them from "
        "`activation_checkpointing_fn` of the model, else every FSDP block. Never reentrant.",
        check_together=blocks.check_activation_together,
        see="memory-and-speed.md",
        saves="78 % of the activations of four blocks; `mode: selective` 33 %.",
        costs="Chosen modules run twice.",
    )
    activation_cpu_offload: bool = setting(
        False,
        BOOLEAN,
        "Keeps in CPU memory what modules with activation checkpointing save for backward, weights "
        "excepted.",
        see="memory-and-speed.md",
        example="{activation_checkpointing: true, activation_cpu_offload: true}",
        saves="The device's copies of these activations.",
        costs="One copy to the CPU and one back.",
    )
    compile: bool | blocks.CompileSpec = setting(
        False,
        blocks.COMPILE,
        "Compiles every FSDP block with `torch.compile`.",
        see="memory-and-speed.md",
        since="0.2.0",
        saves="Time, where the compiler finds some. Not measured on GPUs.",
        costs="Compilation of one graph for all blocks of a class, and one more for evaluation.",
    )
    tiled_mlp: blocks.TilingSpec | None = setting(
        None,
        blocks.TILING,
        "Runs MLPs on one part of the sequence after the other.",
        check_together=blocks.check_tiling_together,
        see="recipes/long-sequences.md",
        since="0.2.0",
        saves="8 tiles: 88 % of what an MLP keeps.",
        costs="The MLP runs twice.",
    )
    chunked_loss: blocks.ChunkingSpec | None = setting(
        None,
        blocks.CHUNKING,
        "Runs output head and loss on one part of the tokens after the other.",
        see="recipes/long-sequences.md",
        since="0.2.0",
        saves="16 chunks: nine tenths of the peak of logits and loss.",
        costs="The head runs twice, and its unit stays gathered from forward to backward.",
    )
    fp8: bool | blocks.Float8Spec = setting(
        False,
        blocks.FLOAT8,
        "Multiplies in fp8 in linear layers of blocks. Needs torchao and a GPU of capability 8.9.",
        check_together=blocks.check_fp8_together,
        see="memory-and-speed.md",
        since="0.2.0",
        saves="Time; with `all_gather: true` half the bytes of gathers. Not measured on GPUs.",
        costs="Rounding; one small reduction a gather.",
    )
    cpu_offload: bool | CPUOffload = setting(
        False,
        CPU_OFFLOAD,
        "Keeps shards, gradients and state in CPU memory, where the optimizer steps. GPU only.",
        see="memory-and-speed.md",
        since="0.2.0",
        saves="All shards, gradients and optimizer state on the device.",
        costs="The optimizer steps on the CPU. Not measured on GPUs.",
    )
    local_step: bool | Literal["auto"] = setting(
        "auto",
        ValueType(
            expected="auto, true or false",
            accepts=lambda value: isinstance(value, bool) or value == "auto",
            choices=("auto",),
        ),
        "Whether the optimizer steps this rank's shards as plain tensors. `auto`: if that is known "
        "to give the same bits, or two steps of a small copy show it.",
        see="optimizers.md",
        since="0.3.0",
        example="local_step: true",
        saves="Up to four fifths of the CPU time of a step.",
    )
    optimizer_state: OptimizerState = setting(
        OptimizerState(),
        OPTIMIZER_STATE,
        "Form of the optimizer's state between steps, the same on any number of ranks.",
        check_together=check_state_together,
        see="optimizers.md",
        since="0.3.0",
        saves="`bf16` half of the state, `bits: 8` three quarters, `device: cpu` all of it.",
        costs="Time of the step, and rounding.",
    )
    communication: Communication = setting(
        Communication(),
        COMMUNICATION,
        "Switches of newer torch. An older torch refuses them.",
        since="0.2.0",
        saves="Time of collectives. Not measured on GPUs.",
    )
    state_dict_type: Literal["full", "sharded"] = setting(
        "sharded",
        choice("full", "sharded"),
        "Kind of the checkpoints that are written. Loading reads the kind from the path.",
        see="checkpoints.md",
        example="state_dict_type: full",
        saves="`sharded`: every rank writes its part.",
        costs="`full`: rank 0 gathers the whole model in CPU memory.",
    )
    pretrained_weights: str | None = setting(
        None,
        null_or(FOLDER),
        "Local Hugging Face folder (safetensors). Every rank reads only its shards, in place of "
        "the weights the model was built with.",
        see="checkpoints.md",
        example="pretrained_weights: models/llama-3.1-8b",
        saves="No rank holds the whole model.",
    )
    load_monolith_rank0_only: bool = setting(
        False,
        BOOLEAN,
        "Only rank 0 reads a full checkpoint.",
        check_together=_check_monolith,
        example="{load_monolith_rank0_only: true, state_dict_type: full}",
        saves="CPU memory and reads of all other ranks.",
        costs="Rank 0 sends the weights to the others.",
    )
    load_planner: Any = setting(
        None,
        null_or(with_methods("a LoadPlanner", "set_up_planner", "create_local_plan", "load_bytes")),
        "Load planner of torch's distributed checkpoint.",
        same_on_ranks=False,
    )
    save_planner: Any = setting(
        None,
        null_or(
            with_methods("a SavePlanner", "set_up_planner", "create_local_plan", "resolve_data")
        ),
        "Save planner of torch's distributed checkpoint.",
        same_on_ranks=False,
    )
    sharded_ckpt_prefix_dir: str = setting(
        "ep{epoch}-ba{batch}",
        FOLDER_NAME,
        "Folder of a sharded checkpoint, inside `save_folder`.",
        example="sharded_ckpt_prefix_dir: step{batch}",
    )
    async_save: bool = setting(
        False,
        BOOLEAN,
        "Training continues while a checkpoint is written. One save runs at a time, and the end of "
        "`fit` waits for it.",
        see="checkpoints.md",
        example="async_save: true",
        saves="Training stands still for 15 % of the time of a save.",
        costs="CPU memory for a copy of the shards.",
    )
    verbose: bool = setting(
        False,
        BOOLEAN,
        "Shows the plan on rank 0, and the second step as predicted and as measured.",
        see="plan.md",
        example="verbose: true",
    )

    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """values of the settings that `declare_setting` added, by name"""

    @property
    def units_ahead(self) -> int:
        """Units that a rank gathers ahead by a setting, at most."""
        return max(self.forward_prefetch, self.backward_prefetch or 0)

    def __post_init__(self) -> None:
        """Applies the checks of `parse_config` to a config built by hand."""
        unknown = [key for key in self.extra if key not in _DECLARED]
        errors = [*unknown_keys(unknown, _DECLARED, "FSDP2Config.extra")]
        defaults = {name: declared.default for name, declared in _DECLARED.items()}
        object.__setattr__(self, "extra", {**defaults, **self.extra})
        _check_all(values_of(self), errors)
        raise_errors(errors)


FIELDS: Mapping[str, Setting[Any]] = settings_of(FSDP2Config)
"""The settings of the package, by name."""

_DECLARED: dict[str, Setting[Any]] = {}
"""The settings that transformations from elsewhere have declared, by name."""


def known_settings() -> dict[str, Setting[Any]]:
    """Returns every setting by name, in order; settings of `declare_setting` are last."""
    return {**FIELDS, **_DECLARED}


def values_of(settings: FSDP2Config) -> dict[str, Any]:
    """Returns the value of every setting by name."""
    values = {name: getattr(settings, name) for name in FIELDS}
    return values | {name: declared.of(settings) for name, declared in _DECLARED.items()}


def describe_values(settings: FSDP2Config) -> str:
    """Returns a line for each setting; the same on all ranks that have the same settings."""
    declared = known_settings()
    return "\n".join(
        f"{name}: {value}"
        for name, value in values_of(settings).items()
        if declared[name].same_on_ranks
    )


def declare_setting(declared: Setting[T]) -> Setting[T]:
    """Adds a setting to those that a run may have, and returns it.

    Raises:
        ConfigError: there is another setting of that name.
    """
    existing = known_settings().get(declared.name)
    if existing is not None and existing != declared:
        raise ConfigError(
            f"The setting '{declared.name}' is declared a second time. One of the two would have "
            "no effect. Give it another name."
        )
    _DECLARED[declared.name] = declared
    return declared


def parse_config(config: Mapping[str, Any]) -> FSDP2Config:
    """Parses the mapping under `parallelism_config.fsdp2`.

    Collective: no.

    Args:
        config: plain values as YAML gives them; mappings and sequences of any type.

    Returns:
        The settings, with the defaults of those that are not given.

    Raises:
        ConfigError: with every unknown key, wrong type and impossible value in one message.

    Example:
        >>> from composer_fsdp2 import parse_config
        >>> config = parse_config({"reshard_after_forward": True})
        >>> config.reshard_after_forward, config.gradient_sync
        (True, 'every')
    """
    declared = known_settings()
    errors: list[str] = []
    values: dict[str, Any] = {}
    block = plain(config)
    if not isinstance(block, dict):
        raise ConfigError(
            f"parallelism_config.fsdp2: {ascii_repr(block)} is no mapping. Nothing could be read "
            "from it. Write fsdp2: {} for default settings."
        )
    for key, raw in block.items():
        if key in declared:
            values[key] = declared[key].values.parse(key, raw, errors)
        elif (answer := fsdp1_answer(key, raw)) is not None:
            errors.append(answer)
    unknown = [key for key in block if key not in {*declared, *FSDP1_ONLY}]
    errors += unknown_keys(unknown, declared, "parallelism_config.fsdp2")
    _check_all({name: setting.default for name, setting in declared.items()} | values, errors)
    raise_errors(errors)
    extra = {name: values.pop(name) for name in _DECLARED if name in values}
    return FSDP2Config(**values, extra=extra)


def _check_all(values: Mapping[str, Any], errors: list[str]) -> None:
    """Checks every value alone, then beside the others."""
    settings = known_settings()
    for name, declared in settings.items():
        declared.values.check(name, values[name], errors)
    for declared in settings.values():
        # It may rely on values of the right type; that they are not is said already.
        with contextlib.suppress(Exception) if errors else contextlib.nullcontext():
            declared.check_together(values, errors)
