"""The FSDP2 configuration: what it may say, and every mistake in it reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import torch

from composer_fsdp2.core.config_blocks import (
    ActivationSpec,
    ChunkingSpec,
    CompileSpec,
    Float8Spec,
    TilingSpec,
    check_activation,
    check_block_combinations,
    check_chunking,
    check_compile,
    check_float8,
    check_tiling,
    parse_activation,
    parse_chunking,
    parse_compile,
    parse_float8,
    parse_tiling,
)
from composer_fsdp2.core.mistakes import (
    check_bool,
    check_patterns,
    is_count,
    is_string,
    nearest,
    parse_spec,
    shown,
    unknown_key,
    wrong,
)
from composer_fsdp2.errors import ConfigError

__all__ = [
    "DTYPES",
    "CPUOffload",
    "Communication",
    "FSDP2Config",
    "GradientSync",
    "PrecisionSpec",
    "Selector",
    "UnitSettings",
    "WrapPolicy",
    "nearest",
    "parse_config",
    "parse_unit_settings",
    "plain",
]

Reshard = bool | int | Literal["auto"]
GradientSync = Literal["every", "last", "reduce_scatter_only"]
OrderCheck = Literal["first", "always", "never"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "torch.float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "amp_bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "torch.float16": torch.float16,
    "amp_fp16": torch.float16,
    # Composer computes amp_fp8 runs in bf16: torch has no fp8 parameters to gather.
    "amp_fp8": torch.bfloat16,
}
_DTYPE_CHOICES = ("fp32", "bf16", "fp16")
_PRESETS = ("DEFAULT", "PURE", "FULL")
_PATTERNS = "a list of patterns, or a mapping of pattern: settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Mixed precision of one unit; ``None`` keeps the parameters' own dtype."""

    param_dtype: str | None = None
    """dtype that is gathered and computed in"""
    reduce_dtype: str | None = None
    """dtype of the gradient reduction"""
    output_dtype: str | None = None
    """dtype of the floating point outputs of the unit's forward; said for the whole run, it is
    that of the top-level units alone, because blocks hand their outputs to each other"""
    buffer_dtype: str | None = None
    """dtype that floating point buffers are cast to for good, in checkpoints too"""
    cast_forward_inputs: bool = True
    """casts floating point inputs to `param_dtype`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUOffload:
    """How shards of parameters, gradients and optimizer state are kept in CPU memory."""

    pin_memory: bool = True
    """copies overlap with computation; the memory is then nobody else's"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Switches of newer torch; asking an older one for them is an error."""

    reduce_scatter_buffers: int | None = None
    """gradients of so many units may be on their way; torch's 1 waits for the one before"""
    separate_reduce_scatter_group: bool = False
    """a communicator of its own, so that reducing and gathering overlap"""
    allocate_from_process_group: bool = False
    """buffers from NCCL's own allocator"""
    symmetric_memory: bool = False
    """buffers for gathering in symmetric memory (NCCL)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """Settings of single units; a field left `None` follows the run's."""

    reshard_after_forward: Reshard | None = None
    mixed_precision: str | PrecisionSpec | None = None


@dataclass(frozen=True, slots=True)
class Selector:
    """A pattern that picks modules and the settings of the units made of them."""

    pattern: str
    settings: UnitSettings = field(default_factory=UnitSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapPolicy:
    """Which modules become FSDP units, as far as the configuration says so."""

    classes: tuple[Selector, ...] = ()
    """class names; every instance becomes a unit"""
    names: tuple[Selector, ...] = ()
    """module names: a glob (`model.layers.*`), or `re:` and a regular expression"""
    min_num_params: int | None = None
    """smallest number of elements that makes a module a unit, counted without nested units"""
    embeddings: UnitSettings | Literal[False] | None = None
    """input embeddings as units of their own; `None` where that saves memory and moves no more
    bytes (see `rules.ends_of_models`), false never"""
    lm_head: UnitSettings | Literal[False] | None = None
    """the output head as a unit of its own; `None` and false as for `embeddings`"""
    min_unit_bytes: int | None = None
    """a smaller unit joins the one around it, unless it has settings of its own"""
    max_unit_bytes: int | None = None
    """of what one collective gathers: a larger unit gives its largest modules away as units"""

    @property
    def selects_blocks(self) -> bool:
        """Whether it says itself what a block is, so that the model's own hooks are not asked."""
        return bool(self.classes or self.names) or self.min_num_params is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Config:
    """Settings of one FSDP2 run. Build it directly or with `parse_config` from YAML.

    Raises:
        ConfigError: from the constructor too, with every mistake in one message.
    """

    data_parallel_shard_degree: int = -1
    """ranks that share one copy of the parameters; -1 takes what the other degrees leave"""
    data_parallel_replicate_degree: int | None = None
    """number of copies (HSDP); `None` is one copy on a 1-D mesh"""
    reshard_after_forward: Reshard = "auto"
    """`auto`: top-level units with something to train keep their parameters until backward, all
    others free them. `true` frees them in every unit, `false` in none. An int reshards to groups
    of that many ranks (top-level units as with `auto`)"""
    eval_reshard_after_forward: bool | None = None
    """in the Trainer's evaluations: `false` gathers every unit once and keeps all of them to the
    end, `true` frees each after its forward; `None` is as in training"""
    forward_prefetch: int = 0
    """how many units ahead forward gathers, in the order of the first step; 0 is torch's own: the
    next one, as soon as the CPU gets there"""
    backward_prefetch: int = 0
    """likewise in backward; torch's own is one unit, in reverse order of forward"""
    gradient_sync: GradientSync = "every"
    """of the microbatches of a batch: `every` one reduces gradients; or the `last` one only, and
    units that keep their parameters keep them until then; or, with HSDP, every one reduce-scatters
    and the last one averages over the copies"""
    order_check: OrderCheck = "first"
    """when ranks compare which collective comes next before they enter it: in the `first` step, in
    which a difference shows, `always`, or `never`"""
    mixed_precision: str | PrecisionSpec = "DEFAULT"
    """`DEFAULT`: compute in the trainer's precision, reduce in fp32; `PURE`: reduce in it too;
    `FULL`: everything in the parameters' own dtype; or a `PrecisionSpec`"""
    keep_fp32: tuple[str, ...] | None = None
    """patterns (as in `wrap_policy.names`) of modules that compute in fp32 in a run of lower
    precision, as units of their own; `None` is what Hugging Face models list for that"""
    unused_parameters: bool | Literal["auto"] | tuple[str, ...] = "auto"
    """parameters that get a gradient on some ranks only: `auto` reduces them in units that hold
    experts or a tower, and in those where the first step finds any; patterns (as in
    `wrap_policy.names`) add modules that a rank may leave out; `true` is all units, `false` none"""
    tied_weights: Literal["lift", "error"] = "lift"
    """a weight shared between units moves to their lowest common parent, or is an error"""
    wrap_policy: WrapPolicy = field(default_factory=WrapPolicy)
    ignored_params: tuple[str, ...] = ()
    """name globs of parameters FSDP leaves alone; a trainable one must be a DTensor already"""
    forward_methods: tuple[str, ...] = ()
    """methods besides `forward` that compute with parameters, `path.to.module.method`"""
    activation_checkpointing: bool | ActivationSpec = False
    """what is computed again in backward; true: what the model says, else its FSDP blocks"""
    activation_cpu_offload: bool = False
    """keeps in CPU memory what these modules save for backward"""
    compile: bool | CompileSpec = False
    """`torch.compile` of each FSDP block"""
    tiled_mlp: TilingSpec | None = None
    """runs MLPs on one part of the sequence after the other"""
    chunked_loss: ChunkingSpec | None = None
    """runs head and loss on one part of the tokens after the other"""
    fp8: bool | Float8Spec = False
    """linear layers of blocks multiply in fp8, by torchao"""
    cpu_offload: bool | CPUOffload = False
    """shards live in CPU memory, where the optimizer steps; units are copied to be gathered"""
    communication: Communication = field(default_factory=Communication)
    pretrained_weights: str | None = None
    """a local folder in Hugging Face's safetensors layout; every rank reads only what its shards
    hold, in place of the weights the model was built with on any rank"""
    state_dict_type: Literal["full", "sharded"] = "sharded"
    load_monolith_rank0_only: bool = False
    load_planner: Any = None
    save_planner: Any = None
    sharded_ckpt_prefix_dir: str = "ep{epoch}-ba{batch}"
    async_save: bool = False
    """training goes on while a checkpoint is written; one at a time"""
    verbose: bool = False
    """logs the plan on rank 0"""

    def __post_init__(self) -> None:
        """Applies the checks of `parse_config` to a config built by hand."""
        errors: list[str] = []
        for name, (_, check) in _FIELDS.items():
            check(name, getattr(self, name), errors)
        _check_combinations({name: getattr(self, name) for name in _FIELDS}, errors)
        _raise_all(errors)


def parse_config(config: Mapping[str, Any]) -> FSDP2Config:
    """Parses the mapping under `parallelism_config.fsdp2`.

    Args:
        config: plain values as YAML gives them; mappings and sequences of any type.

    Raises:
        ConfigError: with every unknown key, wrong type and impossible value in one message.
    """
    errors: list[str] = []
    values: dict[str, Any] = {}
    for key, raw in plain(config).items():
        if key not in _FIELDS:
            errors.append(unknown_key(key, _FIELDS, "parallelism_config.fsdp2"))
            continue
        parse, check = _FIELDS[key]
        values[key] = parse(key, raw, errors)
        check(key, values[key], errors)
    _check_combinations(values, errors)
    _raise_all(errors)
    return FSDP2Config(**values)


def parse_unit_settings(where: str, raw: Any) -> UnitSettings:
    """Parses the settings of one unit, as `fsdp_wrap_fn` returns them.

    Raises:
        ConfigError: for an unknown key or an impossible value; `where` names the place.
    """
    errors: list[str] = []
    settings = _unit_settings(where, plain(raw), errors)
    _check_unit(where, settings, errors)
    _raise_all(errors)
    return settings


def plain(value: Any) -> Any:
    """Copies nested mappings and sequences of any type into dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _raise_all(errors: list[str]) -> None:
    if not errors:
        return
    if len(errors) == 1:
        raise ConfigError(errors[0])
    lines = "\n".join(f"  {number}. {text}" for number, text in enumerate(errors, 1))
    raise ConfigError(f"{len(errors)} settings are wrong:\n{lines}")


# --- One check per type. Each appends to `errors` and never raises. ---


def _as_is(_key: str, raw: Any, _errors: list[str]) -> Any:
    return raw


def _check_bool_or_none(key: str, value: Any, errors: list[str]) -> None:
    if value is not None:
        check_bool(key, value, errors)


def _check_name_inside(key: str, value: Any, errors: list[str]) -> None:
    if not _is_path(value):
        errors.append(wrong(key, value, "the name of a folder"))
    elif PurePath(value).is_absolute() or ".." in PurePath(value).parts:
        errors.append(
            f"'{key}' is {shown(value)}, which leads out of save_folder. Checkpoints would be "
            "where nobody looks for them. Write a name, such as ep{epoch}-ba{batch}."
        )


def _check_path(key: str, value: Any, errors: list[str]) -> None:
    if value is not None and not _is_path(value):
        errors.append(wrong(key, value, "the path of a folder"))


def _is_path(value: Any) -> bool:
    """Whether a system could have such a path."""
    encodable = is_string(value) and not any("\ud800" <= char <= "\udfff" for char in value)
    return encodable and "\0" not in value


def _check_anything(_key: str, _value: Any, _errors: list[str]) -> None:
    """Planners are objects of torch or names from a registry; the trainer checks them."""


def _check_shard_degree(key: str, value: Any, errors: list[str]) -> None:
    if not is_count(value) and not (type(value) is int and value == -1):
        errors.append(wrong(key, value, "a positive number of ranks, or -1 for all that are left"))


def _check_replicate_degree(key: str, value: Any, errors: list[str]) -> None:
    if value is not None:
        _check_shard_degree(key, value, errors)


def _check_reshard(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, bool) or value == "auto":
        return
    if not is_count(value):
        errors.append(wrong(key, value, "true, false, auto, or a number of ranks >= 1"))


def _check_units_ahead(key: str, value: Any, errors: list[str]) -> None:
    if not is_count(value) and not (type(value) is int and value == 0):
        errors.append(wrong(key, value, "a number of units ahead, or 0 for torch's own prefetch"))


def _choice(*choices: str) -> Callable[[str, Any, list[str]], None]:
    def check(key: str, value: Any, errors: list[str]) -> None:
        if value not in choices:
            hint = nearest(value, choices) if isinstance(value, str) else ""
            errors.append(wrong(key, value, " or ".join(choices)) + hint)

    return check


def _parse_precision(key: str, raw: Any, errors: list[str]) -> Any:
    if isinstance(raw, str):
        return raw.upper()
    if not isinstance(raw, dict):
        return raw
    known = [f.name for f in dataclasses.fields(PrecisionSpec)]
    errors += [unknown_key(name, dict.fromkeys(known), key) for name in raw if name not in known]
    dtypes = {name: value for name, value in raw.items() if name.endswith("_dtype")}
    values = {name: _dtype_name(value) for name, value in dtypes.items() if name in known}
    if "cast_forward_inputs" in raw:
        values["cast_forward_inputs"] = raw["cast_forward_inputs"]
    return PrecisionSpec(**values)


def _dtype_name(value: Any) -> Any:
    return str(value) if isinstance(value, torch.dtype) else value


def _check_precision(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, PrecisionSpec):
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(value, name)
            if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
                errors.append(wrong(f"{key}.{name}", dtype, " or ".join(_DTYPE_CHOICES)))
        check_bool(f"{key}.cast_forward_inputs", value.cast_forward_inputs, errors)
    elif value not in _PRESETS:
        hint = nearest(shown(value).strip("'").upper(), _PRESETS)
        expected = f"{', '.join(_PRESETS)} or a mapping with param_dtype and reduce_dtype"
        errors.append(wrong(key, value, expected) + hint)


def _parse_offload(key: str, raw: Any, errors: list[str]) -> Any:
    return parse_spec(CPUOffload, key, raw, errors)


def _check_offload(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, CPUOffload):
        check_bool(f"{key}.pin_memory", value.pin_memory, errors)
    elif not isinstance(value, bool):
        errors.append(wrong(key, value, "true, false or a mapping with pin_memory"))


def _parse_communication(key: str, raw: Any, errors: list[str]) -> Any:
    return parse_spec(Communication, key, {} if raw is None else raw, errors)


def _check_communication(key: str, value: Any, errors: list[str]) -> None:
    if not isinstance(value, Communication):
        choices = ", ".join(f.name for f in dataclasses.fields(Communication))
        errors.append(wrong(key, value, f"a mapping with {choices}"))
        return
    if value.reduce_scatter_buffers is not None:
        buffers = value.reduce_scatter_buffers
        _check_count(f"{key}.reduce_scatter_buffers", buffers, "buffers", errors)
    for name in (
        "separate_reduce_scatter_group",
        "allocate_from_process_group",
        "symmetric_memory",
    ):
        check_bool(f"{key}.{name}", getattr(value, name), errors)


def _parse_names(_key: str, raw: Any, _errors: list[str]) -> Any:
    if raw is None:
        return ()
    return tuple(raw) if isinstance(raw, list) else raw


def _check_names(key: str, value: Any, errors: list[str]) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) and name for name in value):
        errors.append(wrong(key, value, "a list of names"))


def _parse_patterns(_key: str, raw: Any, _errors: list[str]) -> Any:
    return tuple(raw) if isinstance(raw, list) else raw


def _check_patterns(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, tuple):
        check_patterns(key, value, errors)
    elif value is not None:
        errors.append(wrong(key, value, "a list of patterns"))


def _check_unused(key: str, value: Any, errors: list[str]) -> None:
    if isinstance(value, tuple):
        check_patterns(key, value, errors)
    elif not isinstance(value, bool) and value != "auto":
        errors.append(wrong(key, value, "auto, true, false, or a list of patterns"))


def _unit_settings(where: str, raw: Any, errors: list[str]) -> Any:
    """Settings of one pattern: nothing, `true`, or a mapping."""
    if raw is None or raw is True:
        return UnitSettings()
    if not isinstance(raw, dict):
        return raw
    known = {f.name: None for f in dataclasses.fields(UnitSettings)}
    errors += [unknown_key(key, known, where) for key in raw if key not in known]
    key = f"{where}.mixed_precision"
    return UnitSettings(
        reshard_after_forward=raw.get("reshard_after_forward"),
        mixed_precision=_parse_precision(key, raw.get("mixed_precision"), errors),
    )


def _check_unit(where: str, value: Any, errors: list[str]) -> None:
    if not isinstance(value, UnitSettings):
        errors.append(wrong(where, value, "a mapping with reshard_after_forward, mixed_precision"))
        return
    if value.reshard_after_forward is not None:
        _check_reshard(f"{where}.reshard_after_forward", value.reshard_after_forward, errors)
    if value.mixed_precision is not None:
        _check_precision(f"{where}.mixed_precision", value.mixed_precision, errors)


def _selectors(where: str, raw: Any, errors: list[str]) -> tuple[Selector, ...]:
    """A list of patterns, or a mapping from pattern to unit settings."""
    written = [raw] if isinstance(raw, str) else raw
    if isinstance(written, list) and all(isinstance(item, str) for item in written):
        written = dict.fromkeys(written)
    if not isinstance(written, dict) or not written:
        errors.append(wrong(where, raw, _PATTERNS))
        return ()
    return tuple(
        Selector(pattern, _unit_settings(f"{where}.{pattern}", settings, errors))
        for pattern, settings in written.items()
    )


def _check_selectors(where: str, value: Any, errors: list[str]) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, Selector) for item in value):
        errors.append(wrong(where, value, _PATTERNS))
        return
    check_patterns(where, [selector.pattern for selector in value], errors)
    for selector in value:
        _check_unit(f"{where}.{selector.pattern}", selector.settings, errors)


def _toggle(where: str, raw: Any, errors: list[str]) -> Any:
    """`null` leaves it to the rules, `false` is off, `true` or a mapping of unit settings is on."""
    return raw if raw is None or raw is False else _unit_settings(where, raw, errors)


def _parse_wrap_policy(key: str, raw: Any, errors: list[str]) -> Any:
    if raw is None:
        return WrapPolicy()
    if not isinstance(raw, dict):
        return raw
    known = {f.name: None for f in dataclasses.fields(WrapPolicy)}
    errors += [unknown_key(name, known, key) for name in raw if name not in known]
    values: dict[str, Any] = {}
    for name in ("classes", "names"):
        if raw.get(name) is not None:
            values[name] = _selectors(f"{key}.{name}", raw[name], errors)
    for name in ("embeddings", "lm_head"):
        values[name] = _toggle(f"{key}.{name}", raw.get(name), errors)
    for name in _COUNTS:
        values[name] = raw.get(name)
    return WrapPolicy(**values)


def _check_wrap_policy(key: str, value: Any, errors: list[str]) -> None:
    if not isinstance(value, WrapPolicy):
        choices = ", ".join(f.name for f in dataclasses.fields(WrapPolicy))
        errors.append(wrong(key, value, f"a mapping with {choices}"))
        return
    for name in ("classes", "names"):
        _check_selectors(f"{key}.{name}", getattr(value, name), errors)
    for name in ("embeddings", "lm_head"):
        settings = getattr(value, name)
        if settings is not None and settings is not False:
            _check_unit(f"{key}.{name}", settings, errors)
    for name, counted in _COUNTS.items():
        if getattr(value, name) is not None:
            _check_count(f"{key}.{name}", getattr(value, name), counted, errors)


_COUNTS = {"min_num_params": "elements", "min_unit_bytes": "bytes", "max_unit_bytes": "bytes"}


def _check_count(key: str, value: Any, counted: str, errors: list[str]) -> None:
    if not is_count(value):
        errors.append(wrong(key, value, f"a number of {counted} >= 1"))


_Parse = Callable[[str, Any, list[str]], Any]
_Check = Callable[[str, Any, list[str]], None]

_FIELDS: Mapping[str, tuple[_Parse, _Check]] = {
    "data_parallel_shard_degree": (_as_is, _check_shard_degree),
    "data_parallel_replicate_degree": (_as_is, _check_replicate_degree),
    "reshard_after_forward": (_as_is, _check_reshard),
    "eval_reshard_after_forward": (_as_is, _check_bool_or_none),
    "forward_prefetch": (_as_is, _check_units_ahead),
    "backward_prefetch": (_as_is, _check_units_ahead),
    "gradient_sync": (_as_is, _choice("every", "last", "reduce_scatter_only")),
    "order_check": (_as_is, _choice("first", "always", "never")),
    "mixed_precision": (_parse_precision, _check_precision),
    "keep_fp32": (_parse_patterns, _check_patterns),
    "unused_parameters": (_parse_patterns, _check_unused),
    "tied_weights": (_as_is, _choice("lift", "error")),
    "wrap_policy": (_parse_wrap_policy, _check_wrap_policy),
    "ignored_params": (_parse_names, _check_names),
    "forward_methods": (_parse_names, _check_names),
    "activation_checkpointing": (parse_activation, check_activation),
    "activation_cpu_offload": (_as_is, check_bool),
    "compile": (parse_compile, check_compile),
    "tiled_mlp": (parse_tiling, check_tiling),
    "chunked_loss": (parse_chunking, check_chunking),
    "fp8": (parse_float8, check_float8),
    "cpu_offload": (_parse_offload, _check_offload),
    "communication": (_parse_communication, _check_communication),
    "pretrained_weights": (_as_is, _check_path),
    "state_dict_type": (_as_is, _choice("full", "sharded")),
    "load_monolith_rank0_only": (_as_is, check_bool),
    "load_planner": (_as_is, _check_anything),
    "save_planner": (_as_is, _check_anything),
    "sharded_ckpt_prefix_dir": (_as_is, _check_name_inside),
    "async_save": (_as_is, check_bool),
    "verbose": (_as_is, check_bool),
}


def _check_combinations(values: Mapping[str, Any], errors: list[str]) -> None:
    """Settings that are fine alone and cannot hold together."""
    check_block_combinations(values, errors)
    if (
        values.get("load_monolith_rank0_only") is True
        and values.get("state_dict_type", "sharded") == "sharded"
    ):
        errors.append(
            "'load_monolith_rank0_only' is true while 'state_dict_type' is sharded. Only a full "
            "checkpoint can be read by rank 0 alone, so it would have no effect. "
            "Write state_dict_type: full, or leave load_monolith_rank0_only out."
        )
    shard = values.get("data_parallel_shard_degree", -1)
    if shard == -1 and values.get("data_parallel_replicate_degree") == -1:
        errors.append(
            "'data_parallel_shard_degree' and 'data_parallel_replicate_degree' are both -1. "
            "Only one of them can take the ranks the other leaves. Give one of them a number."
        )
