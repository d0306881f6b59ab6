"""Reads settings from every object that holds them, into a class that Composer accepts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from composer.utils import dist
from composer.utils.parallelism import FSDP2Config as ComposerFSDP2Config
from composer.utils.parallelism import FSDPConfig

from composer_fsdp2.config.fsdp1 import convert_fsdp1
from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.errors import ConfigError

__all__ = ["TrainerFSDP2Config", "from_fsdp1", "resolve_settings"]

T = TypeVar("T")


_FIELDS = tuple(ours.name for ours in dataclasses.fields(FSDP2Config))


def _with_fields_of_settings(cls: type[T]) -> type[T]:
    """Makes a class a dataclass with every field of our `FSDP2Config`, keyword only.

    A field of this class hides the property of the same name that Composer's class has.
    """
    types = get_type_hints(FSDP2Config)
    for ours in dataclasses.fields(FSDP2Config):
        # A `Field` belongs to one class; only one of the two defaults is given.
        copied: Any = field(default=ours.default, default_factory=ours.default_factory)  # pyright: ignore[reportCallIssue, reportArgumentType]
        cls.__annotations__[ours.name] = types[ours.name]
        setattr(cls, ours.name, copied)
    return dataclass(kw_only=True)(cls)


@_with_fields_of_settings
class TrainerFSDP2Config(ComposerFSDP2Config):
    """`FSDP2Config` as a subclass of Composer's, so that its `isinstance` checks accept it.

    Composer's class answers some of these with fixed properties; here they are real, which alone
    gives HSDP, planners and checkpoint folders to the Trainer. The fields, their meaning and their
    defaults are those of `composer_fsdp2.FSDP2Config`.

    Example:
        >>> from composer_fsdp2 import TrainerFSDP2Config
        >>> TrainerFSDP2Config(reshard_after_forward=False).settings.reshard_after_forward
        False
    """

    def __post_init__(self) -> None:
        """Checks the values; Composer's note that FSDP2 is experimental does not apply."""
        self.settings  # noqa: B018  (built to be checked)

    @property
    def settings(self) -> FSDP2Config:
        """Returns the same settings as the core's type.

        Raises:
            ConfigError: when a value is wrong.
        """
        return FSDP2Config(**{name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def of(cls, settings: FSDP2Config) -> TrainerFSDP2Config:
        """Wraps settings of the core."""
        return cls(**{name: getattr(settings, name) for name in _FIELDS})


def resolve_settings(config: Any) -> FSDP2Config:
    """Reads settings in any of the forms users have them.

    Collective: no.

    Args:
        config: a mapping, our config (core or trainer), Composer's `FSDP2Config`, or an FSDP1
            `FSDPConfig`, which is converted with a warning for each key that is no longer needed.

    Raises:
        ConfigError: for anything else, and for wrong values.
    """
    if isinstance(config, FSDP2Config):
        return config
    if isinstance(config, TrainerFSDP2Config):
        return config.settings
    if isinstance(config, ComposerFSDP2Config):
        values: dict[str, Any] = {
            name: getattr(config, name)
            for name in (
                "activation_checkpointing",
                "activation_cpu_offload",
                "state_dict_type",
                "load_monolith_rank0_only",
                "mixed_precision",
                "verbose",
            )
        }
        # Composer's `True` is torch's default, which keeps the root gathered.
        reshard = config.reshard_after_forward
        values["reshard_after_forward"] = "auto" if reshard is True else reshard
        mesh = config.device_mesh
        if mesh is not None:
            # FSDP2 replicates over the first axis of a 2-D mesh, and shards over the second.
            values["data_parallel_shard_degree"] = mesh.size(mesh.ndim - 1)
            values["data_parallel_replicate_degree"] = mesh.size(0) if mesh.ndim == 2 else None
        return parse_config(values)
    if isinstance(config, FSDPConfig):
        # Composer's class takes every keyword, a misspelt one as well.
        keys = {key: value for key, value in vars(config).items() if key != "_device_mesh"}
        if keys.get("backward_prefetch") == FSDPConfig.backward_prefetch:
            del keys["backward_prefetch"]  # nobody has to have asked for a default
        return from_fsdp1(keys)
    if isinstance(config, Mapping):
        return parse_config(config)
    raise ConfigError(
        f"The FSDP2 configuration is a {type(config).__name__}. Its settings cannot be read. Give "
        "a mapping, composer_fsdp2.FSDP2Config, or Composer's FSDP2Config or FSDPConfig."
    )


def from_fsdp1(config: Mapping[str, Any]) -> FSDP2Config:
    """Converts FSDP1 settings, with a warning for each that is no longer needed. Collective: no."""
    conversion = convert_fsdp1(
        config, world_size=dist.get_world_size(), local_world_size=dist.get_local_world_size()
    )
    for note in conversion.notes:
        warnings.warn(f"FSDP1 to FSDP2: {note}", stacklevel=3)
    return parse_config(conversion.settings)
