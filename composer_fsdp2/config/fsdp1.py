"""Composer's FSDP1 settings, key by key, as FSDP2 settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.errors import ConfigError

__all__ = [
    "FSDP1_KEPT",
    "FSDP1_KEYS",
    "FSDP1_NOT_NEEDED",
    "FSDP1_NOT_SUPPORTED",
    "FSDP1_ONLY",
    "FSDP1_STRATEGIES",
    "Conversion",
    "convert_fsdp1",
    "convert_fsdp1_unit",
    "fsdp1_answer",
]

FSDP1_KEPT = (
    "activation_checkpointing",
    "activation_cpu_offload",
    "cpu_offload",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "load_monolith_rank0_only",
    "load_planner",
    "mixed_precision",
    "save_planner",
    "sharded_ckpt_prefix_dir",
    "verbose",
)
"""Keys that mean the same in both."""

FSDP1_NOT_NEEDED = {
    "backward_prefetch": "FSDP2 gathers the next unit of backward before it computes one",
    "backward_prefetch_limit": "FSDP2 prefetches one unit ahead",
    "forward_prefetch": "FSDP2 prefetches from its own stream without blocking the CPU",
    "forward_prefetch_limit": "FSDP2 prefetches one unit ahead",
    "limit_all_gathers": "FSDP2 frees memory deterministically and needs no rate limit",
    "sync_module_states": "rank 0's weights are always the ones every rank starts from",
    "use_orig_params": "FSDP2 keeps every parameter apart; there are no flat parameters",
    "activation_checkpointing_reentrant": "checkpointing is always non-reentrant",
    "te_checkpoint_wrapper": "checkpointing is always torch's own",
    "device_id": "the device comes from the mesh",
}
"""Key -> why FSDP2 does not need it. Any value may be dropped. `device_id` is of single units."""

FSDP1_LATE_PREFETCH = ("BACKWARD_POST", "NONE", None)
"""Values of `backward_prefetch` with which FSDP1 has one unit in memory: 0 does in FSDP2."""
LATE_PREFETCH = "each unit is gathered when backward comes to it, as FSDP1 has one at a time"

FSDP1_NOT_SUPPORTED = {
    "auto_wrap": (True, "leave FSDP out of the configuration to train without it"),
    "ignored_modules": (None, "name their parameters in `ignored_params`"),
    "keep_low_precision_grads": (
        False,
        "reduce in low precision with `mixed_precision: PURE`",
    ),
    "process_group": (
        None,
        "set `data_parallel_shard_degree` and `data_parallel_replicate_degree`",
    ),
    "te_shard_fp8_weight": (False, "fp8 weights are not supported yet; take it out"),
}
"""Key -> (value that changes nothing, cure for other values)."""

_DEGREES = ("data_parallel_shard_degree", "data_parallel_replicate_degree")

FSDP1_STRATEGIES: dict[str, tuple[Any, str]] = {
    "FULL_SHARD": ("auto", "one"),
    "SHARD_GRAD_OP": (False, "one"),
    "HYBRID_SHARD": ("auto", "per node"),
    "_HYBRID_SHARD_ZERO2": (False, "per node"),
    "NO_SHARD": (False, "all"),
}
"""Strategy -> (reshard_after_forward, replicas of the model)."""

FSDP1_KEYS = frozenset(
    {*FSDP1_KEPT, *FSDP1_NOT_NEEDED, *FSDP1_NOT_SUPPORTED, "sharding_strategy", "state_dict_type"}
    - {"device_id"}
)
"""The keys of Composer's `FSDPConfig`."""

FSDP1_ONLY = frozenset(
    {*FSDP1_NOT_NEEDED, *FSDP1_NOT_SUPPORTED, "sharding_strategy"}
    - {"backward_prefetch", "forward_prefetch"}
)
"""The keys of FSDP1 that are no settings of FSDP2."""


class Conversion(NamedTuple):
    """FSDP2 settings and a line for every key that changed."""

    settings: dict[str, Any]
    notes: tuple[str, ...]


def convert_fsdp1(
    config: Mapping[str, Any], *, world_size: int | None, local_world_size: int
) -> Conversion:
    """Converts Composer's FSDP1 settings.

    Args:
        config: keys of `FSDPConfig`; a missing key has FSDP1's default.
        world_size: ranks in all; `None` where it is not known yet and the number of copies may
            be left to the run.
        local_world_size: ranks per node, the size of one copy under HYBRID_SHARD.

    Raises:
        ConfigError: for an unknown key and for settings FSDP2 has no equal of.
    """
    problems: list[str] = []
    notes: list[str] = []
    settings: dict[str, Any] = {
        # Written out: FSDP1's default is full, FSDP2's is sharded.
        "state_dict_type": config.get("state_dict_type") or "full",
        **{key: config[key] for key in FSDP1_KEPT if config.get(key) is not None},
    }
    for key, value in config.items():
        if key not in FSDP1_KEYS:
            hint = nearest(key, sorted(FSDP1_KEYS)) or " It would have no effect; take it out."
            problems.append(f"'{key}' is not a key of FSDP1's configuration.{hint}")
        elif (
            key == "backward_prefetch"
            and (value.upper() if isinstance(value, str) else value) in FSDP1_LATE_PREFETCH
        ):
            settings[key] = 0
            notes.append(f"'{key}: {value}' becomes 0: {LATE_PREFETCH}.")
        elif key in FSDP1_NOT_NEEDED:
            notes.append(f"'{key}' is no longer needed: {FSDP1_NOT_NEEDED[key]}.")
        elif key in FSDP1_NOT_SUPPORTED and value != FSDP1_NOT_SUPPORTED[key][0]:
            problems.append(
                f"'{key}: {value}' of FSDP1 has no equal in FSDP2. Dropping it would change the "
                f"run. Instead: {FSDP1_NOT_SUPPORTED[key][1]}."
            )
    strategy = config.get("sharding_strategy", "FULL_SHARD")
    settings.update(_convert_strategy(strategy, settings, world_size, local_world_size, problems))
    if problems:
        raise ConfigError(" ".join(problems))
    return Conversion(settings, tuple(notes))


def _convert_strategy(
    strategy: Any,
    settings: Mapping[str, Any],
    world_size: int | None,
    local_world_size: int,
    problems: list[str],
) -> dict[str, Any]:
    name = str(strategy).upper()
    if name not in FSDP1_STRATEGIES:
        hint = nearest(name, FSDP1_STRATEGIES) or f" Use one of {', '.join(FSDP1_STRATEGIES)}."
        problems.append(
            f"sharding_strategy is {strategy!r}, which FSDP1 does not know. The mesh depends on it."
            f"{hint}"
        )
        return {}
    reshard, replicas = FSDP1_STRATEGIES[name]
    converted: dict[str, Any] = {"reshard_after_forward": reshard}
    everywhere = -1 if world_size is None else world_size  # -1: what the run has
    shard, replicate = _DEGREES
    if replicas == "all":
        degrees = {shard: 1, replicate: everywhere}
        fixed = {k: settings.get(k) for k in _DEGREES if settings.get(k) not in (None, -1)}
        if not fixed.items() <= degrees.items():
            problems.append(
                f"sharding_strategy NO_SHARD holds a replica on each of {everywhere} ranks, and "
                f"{fixed} says otherwise. One of them would be ignored. Take out the degrees, or "
                "choose FULL_SHARD or HYBRID_SHARD."
            )
        converted |= degrees
    elif replicas == "per node" and settings.get(replicate) is None:
        degree = settings.get(shard)
        if degree in (None, -1):
            converted[shard] = degree = local_world_size
        if isinstance(degree, int) and degree > 0:  # else `parse_config` says what is wrong
            converted[replicate] = -1 if world_size is None else world_size // degree
    return converted


def fsdp1_answer(key: str, value: Any) -> str | None:
    """Returns the sentence about a key of FSDP1 among FSDP2's; `None` for any other key."""
    if key not in FSDP1_ONLY:
        return None
    if key in FSDP1_NOT_NEEDED:
        cure = f"{FSDP1_NOT_NEEDED[key]}. Take it out."
    elif key in FSDP1_NOT_SUPPORTED:
        harmless, instead = FSDP1_NOT_SUPPORTED[key]
        same = type(value) is type(harmless) and value == harmless
        cure = "at this value it says nothing. Take it out." if same else f"instead, {instead}."
    elif (name := value.upper() if isinstance(value, str) else "") in FSDP1_STRATEGIES:
        reshard, replicas = FSDP1_STRATEGIES[name]
        shard, replicate = _DEGREES
        degrees = {
            "one": "",
            "per node": f", {shard}: the number of GPUs of a node, and {replicate}: -1",
            "all": f", {shard}: 1, and {replicate}: -1",
        }
        cure = f"for {name} write reshard_after_forward: {str(reshard).lower()}{degrees[replicas]}."
    else:
        cure = (
            f"{ascii_repr(value)} is none of its values, {', '.join(FSDP1_STRATEGIES)}. Write "
            "reshard_after_forward and the degrees of data parallelism instead."
        )
    return (
        f"'{key}' is a key of FSDP1 and has no effect in FSDP2: {cure} "
        "`composer-fsdp2 migrate` converts a whole file."
    )


def convert_fsdp1_unit(where: str, config: Mapping[str, Any]) -> Conversion:
    """Converts what `fsdp_wrap_fn` returned for one module; FSDP2 keys pass through.

    Raises:
        ConfigError: for FSDP1 settings of a single module that FSDP2 has no equal of.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in config.items():
        name = str(getattr(value, "name", value)).upper()
        if key in FSDP1_NOT_NEEDED:
            notes.append(f"'{key}' of {where} is no longer needed: {FSDP1_NOT_NEEDED[key]}.")
        elif key == "process_group":
            raise ConfigError(
                f"fsdp_wrap_fn gives {where} its own 'process_group'. FSDP2 units share the mesh "
                "of the run, and this one would be averaged over the wrong ranks. Take it out, or "
                "set the degrees of the whole run."
            )
        elif key != "sharding_strategy":
            settings[key] = value
        elif name in ("FULL_SHARD", "SHARD_GRAD_OP"):
            settings["reshard_after_forward"] = name == "FULL_SHARD"
        else:
            raise ConfigError(
                f"fsdp_wrap_fn gives {where} sharding_strategy {name}. One module cannot be "
                "replicated differently from the rest of its mesh. Use FULL_SHARD or SHARD_GRAD_OP "
                "there, and set `data_parallel_replicate_degree` for the run."
            )
    return Conversion(settings, tuple(notes))
