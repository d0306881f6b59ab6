"""The settings of a run: each is declared here once, parsed and checked with all others at once.

A setting of the package is a field of `FSDP2Config`. A transformation from elsewhere brings its
setting with it and touches no file of the package::

    TOY = Setting(name="toy", default=0, values=count("toys", least=0), meaning="adds toys")
    declare_setting(TOY)

From then on `toy` stands under `parallelism_config.fsdp2` like any other key: it is parsed and
checked, a misspelt one is an error with its name, the tables and the Trainer's config class have
it, and `TOY.of(settings)` reads its value. `with declaring(TOY):` declares it for a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from composer_fsdp2.config.blocks import (
    ACTIVATION,
    CHUNKING,
    COMPILE,
    FLOAT8,
    TILING,
    ActivationSpec,
    ChunkingSpec,
    CompileSpec,
    Float8Spec,
    TilingSpec,
    check_activation_together,
    check_fp8_together,
    check_tiling_together,
)
from composer_fsdp2.config.fsdp1 import FSDP1_ONLY, fsdp1_answer
from composer_fsdp2.config.messages import ascii_repr, raise_errors, unknown_keys
from composer_fsdp2.config.placement import COMMUNICATION, CPU_OFFLOAD, Communication, CPUOffload
from composer_fsdp2.config.precision import PRECISION, PrecisionSpec
from composer_fsdp2.config.setting import Setting, ValueType, setting, settings_of
from composer_fsdp2.config.value_types import (
    BOOLEAN,
    FOLDER,
    FOLDER_NAME,
    NAMES,
    PATTERNS,
    check_patterns,
    choice,
    is_number,
    null_or,
    parse_list,
    plain,
    with_methods,
)
from composer_fsdp2.config.wrapping import RESHARD, WRAP_POLICY, Reshard, WrapPolicy
from composer_fsdp2.errors import ConfigError

__all__ = [
    "FIELDS",
    "FSDP2Config",
    "GradientSync",
    "declare_setting",
    "declaring",
    "known_settings",
    "parse_config",
    "values_of",
]

T = TypeVar("T")

GradientSync = Literal["every", "last", "reduce_scatter_only"]
OrderCheck = Literal["first", "always", "never"]

_DEGREE = ValueType(
    expected="a positive number of ranks, or -1 for all that are left",
    accepts=lambda value: is_number(value) or (type(value) is int and value == -1),
)
_UNITS_AHEAD = ValueType(
    expected="a number of units ahead, or 0 for torch's own prefetch",
    accepts=lambda value: is_number(value, least=0),
)


def _check_unused(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, tuple):
        check_patterns(key, value, errors)


_UNUSED = ValueType(
    expected="auto, true, false, or a list of patterns",
    accepts=lambda value: isinstance(value, bool | tuple) or value == "auto",
    check_inside=_check_unused,
    parse=parse_list,
)


_LOAD_PLANNER = null_or(
    with_methods("a LoadPlanner", "set_up_planner", "create_local_plan", "load_bytes")
)
_SAVE_PLANNER = null_or(
    with_methods("a SavePlanner", "set_up_planner", "create_local_plan", "resolve_data")
)


def _check_degrees(values: Mapping[str, Any], errors: list[str]) -> None:
    names = ("data_parallel_shard_degree", "data_parallel_replicate_degree")
    if all(values[name] == -1 for name in names):
        errors.append(
            "'data_parallel_shard_degree' and 'data_parallel_replicate_degree' are both -1. "
            "Only one of them can take the ranks the other leaves. Give one of them a number."
        )


def _check_monolith(values: Mapping[str, Any], errors: list[str]) -> None:
    if values["load_monolith_rank0_only"] is True and values["state_dict_type"] == "sharded":
        errors.append(
            "'load_monolith_rank0_only' is true while 'state_dict_type' is sharded. Only a full "
            "checkpoint can be read by rank 0 alone, so it would have no effect. "
            "Write state_dict_type: full, or leave load_monolith_rank0_only out."
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
        -1, _DEGREE, "ranks that share one copy of the parameters; -1 takes what is left"
    )
    data_parallel_replicate_degree: int | None = setting(
        None,
        null_or(_DEGREE),
        "copies of the model (HSDP); null is one copy on a one-dimensional mesh",
        check_together=_check_degrees,
    )
    reshard_after_forward: Reshard = setting(
        "auto",
        RESHARD,
        "when a unit frees its gathered parameters. `auto`: top-level units keep them until "
        "backward (unless nothing in them is trained), all others free them after forward; "
        "`true`: all free them; `false`: none; a number: reshards to groups of that many ranks, "
        "top-level units as with `auto`",
    )
    eval_reshard_after_forward: bool | None = setting(
        None,
        null_or(BOOLEAN),
        "in the Trainer's evaluations: `false` gathers each unit once and keeps the whole model "
        "until the end, `true` frees every unit after its forward; null is as in training",
    )
    forward_prefetch: int = setting(
        0,
        _UNITS_AHEAD,
        "how many units ahead forward gathers in training, in the order in which units ran in "
        "the first step; 0 is torch's own: the next one, as soon as the CPU gets there. Each one "
        "ahead is one more unit in memory",
    )
    backward_prefetch: int = setting(
        0,
        _UNITS_AHEAD,
        "the same in backward; torch's own is one unit, in the reverse order of forward",
    )
    gradient_sync: GradientSync = setting(
        "every",
        choice("every", "last", "reduce_scatter_only"),
        "of the microbatches of a batch, `every` one reduces gradients; or the `last` one only "
        "(whole gradients stay in memory until then; units with `reshard_after_forward: false` "
        "and top-level units are gathered once a batch); or, with HSDP, `reduce_scatter_only`: "
        "every one reduces within a copy, the last one averages over the copies",
    )
    order_check: OrderCheck = setting(
        "first",
        choice("first", "always", "never"),
        "when ranks compare which collective comes next before they enter it, so that a "
        "difference is an error on all of them: in the `first` step, in which it shows; `always`, "
        "which costs a small message per collective; `never`",
    )
    mixed_precision: str | PrecisionSpec = setting(
        "DEFAULT",
        PRECISION,
        "`DEFAULT`: computes in the trainer's precision and reduces gradients in fp32; `PURE`: "
        "reduces in the trainer's precision too; `FULL`: everything in the parameters' own dtype",
    )
    keep_fp32: tuple[str, ...] | None = setting(
        None,
        null_or(PATTERNS),
        "globs (or `re:`) of modules that compute in fp32 in a run of lower precision, autocast "
        "or not, as units of their own; null: those that a Hugging Face model lists",
    )
    unused_parameters: bool | Literal["auto"] | tuple[str, ...] = setting(
        "auto",
        _UNUSED,
        "parameters that get a gradient on some ranks only: `auto` reduces a zero for them, and "
        "compares what was used in units with experts or a tower, and in those that left "
        "something out; a list of globs (or `re:`) adds modules that a rank may leave out; `true` "
        "compares in all units; `false`: as torch does it",
        see="experts-and-towers",
    )
    tied_weights: Literal["lift", "error"] = setting(
        "lift",
        choice("lift", "error"),
        "`lift` shards a weight shared between units with their lowest common parent; `error` "
        "refuses",
    )
    wrap_policy: WrapPolicy = setting(
        WrapPolicy(),
        WRAP_POLICY,
        "which modules become units; patterns are globs, or `re:` and a regular expression, and "
        "may carry settings: `classes: {Block: {reshard_after_forward: 2}}`",
    )
    ignored_params: tuple[str, ...] = setting(
        (),
        NAMES,
        "globs of parameters FSDP leaves alone; they must be frozen, or be DTensors already",
    )
    forward_methods: tuple[str, ...] = setting(
        (),
        NAMES,
        "methods besides `forward` that compute with parameters: `path.to.module.method`",
    )
    activation_checkpointing: bool | ActivationSpec = setting(
        False,
        ACTIVATION,
        "modules that are computed again in backward: `true` takes them from "
        "`activation_checkpointing_fn`, else every FSDP block; never reentrant",
        check_together=check_activation_together,
        see="inside-the-blocks",
    )
    activation_cpu_offload: bool = setting(
        False,
        BOOLEAN,
        "keeps in CPU memory what modules with activation checkpointing save for backward, "
        "weights excepted",
    )
    compile: bool | CompileSpec = setting(False, COMPILE, "`torch.compile` of every FSDP block")
    tiled_mlp: TilingSpec | None = setting(
        None,
        TILING,
        "runs MLPs on one part of the sequence after the other",
        check_together=check_tiling_together,
        see="inside-the-blocks",
    )
    chunked_loss: ChunkingSpec | None = setting(
        None,
        CHUNKING,
        "runs output head and loss on one part of the tokens after the other",
        see="inside-the-blocks",
    )
    fp8: bool | Float8Spec = setting(
        False,
        FLOAT8,
        "linear layers of blocks multiply in fp8, by torchao; needs `composer-fsdp2[fp8]` and a "
        "GPU of capability 8.9",
        check_together=check_fp8_together,
        see="inside-the-blocks",
    )
    cpu_offload: bool | CPUOffload = setting(
        False,
        CPU_OFFLOAD,
        "shards, gradients and optimizer state in CPU memory, where the optimizer steps; units "
        "are copied to the GPU to be gathered. GPU only",
    )
    communication: Communication = setting(
        Communication(), COMMUNICATION, "switches of newer torch, an error in an older one"
    )
    state_dict_type: Literal["full", "sharded"] = setting(
        "sharded", choice("full", "sharded"), "kind of the checkpoints"
    )
    pretrained_weights: str | None = setting(
        None,
        null_or(FOLDER),
        "local Hugging Face folder (safetensors): every rank reads only its shards, in place of "
        "the weights the model was built with",
    )
    load_monolith_rank0_only: bool = setting(
        False, BOOLEAN, "only rank 0 reads a full checkpoint", check_together=_check_monolith
    )
    load_planner: Any = setting(
        None, _LOAD_PLANNER, "of torch's distributed checkpoint", same_on_ranks=False
    )
    save_planner: Any = setting(
        None, _SAVE_PLANNER, "of torch's distributed checkpoint", same_on_ranks=False
    )
    sharded_ckpt_prefix_dir: str = setting(
        "ep{epoch}-ba{batch}", FOLDER_NAME, "folder of a sharded checkpoint, inside save_folder"
    )
    async_save: bool = setting(
        False,
        BOOLEAN,
        "training goes on while a checkpoint is written; one at a time, and the end of `fit` waits",
    )
    verbose: bool = setting(False, BOOLEAN, "shows the plan on rank 0")

    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """values of the settings that `declare_setting` added, by name"""

    def __post_init__(self) -> None:
        """Applies the checks of `parse_config` to a config built by hand."""
        where = "FSDP2Config.extra"
        errors = unknown_keys([k for k in self.extra if k not in _DECLARED], _DECLARED, where)
        defaults = {name: declared.default for name, declared in _DECLARED.items()}
        object.__setattr__(self, "extra", {**defaults, **self.extra})
        _check_all(values_of(self), errors)
        raise_errors(errors)


FIELDS: Mapping[str, Setting[Any]] = settings_of(FSDP2Config)
"""The settings of the package, by name."""

_DECLARED: dict[str, Setting[Any]] = {}
"""The settings that transformations from elsewhere have declared, by name."""


def known_settings() -> dict[str, Setting[Any]]:
    """Returns every setting by name, those of `declare_setting` last."""
    return {**FIELDS, **_DECLARED}


def values_of(settings: FSDP2Config) -> dict[str, Any]:
    """Returns the value of every setting by name."""
    values = {name: getattr(settings, name) for name in FIELDS}
    return values | {name: declared.of(settings) for name, declared in _DECLARED.items()}


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


@contextlib.contextmanager
def declaring(*settings: Setting[Any]) -> Generator[None]:
    """Declares settings for a block; afterwards the known ones are those of before."""
    before = dict(_DECLARED)
    try:
        for declared in settings:
            declare_setting(declared)
        yield
    finally:
        _DECLARED.clear()
        _DECLARED.update(before)


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
    known = known_settings()
    errors: list[str] = []
    values: dict[str, Any] = {}
    given = plain(config)
    if not isinstance(given, dict):
        raise ConfigError(
            f"parallelism_config.fsdp2: {ascii_repr(given)} is no mapping. Nothing could be read "
            "from it. Write fsdp2: {} for default settings."
        )
    for key, raw in given.items():
        if key in known:
            values[key] = known[key].values.parsed(key, raw, errors)
        elif (answer := fsdp1_answer(key, raw)) is not None:
            errors.append(answer)
    unknown = [key for key in given if key not in known and key not in FSDP1_ONLY]
    errors += unknown_keys(unknown, known, "parallelism_config.fsdp2")
    _check_all({name: one.default for name, one in known.items()} | values, errors)
    raise_errors(errors)
    fields = {name: value for name, value in values.items() if name in FIELDS}
    extra = {name: value for name, value in values.items() if name in _DECLARED}
    return FSDP2Config(**fields, extra=extra)


def _check_all(values: Mapping[str, Any], errors: list[str]) -> None:
    """Checks every value alone, then beside the others."""
    known = known_settings()
    for name, declared in known.items():
        declared.values.check(name, values[name], errors)
    for declared in known.values():
        # It may rely on values of the right type; that they are not is said already.
        with contextlib.suppress(Exception) if errors else contextlib.nullcontext():
            declared.check_together(values, errors)
