"""Keys that are about sharding and stand where no table of the dialect speaks of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from composer_fsdp2.tools.migrate.report import Path

__all__ = ["foreign_sign", "sharding_in"]

_BLOCKS = frozenset(
    {
        *("fsdp", "fsdp_config", "deepspeed", "deepspeed_config", "zero_optimization"),
        *("parallelism_config", "tp_config", "megatron_lm_config"),
    }
)
"""keys that trainers read settings of sharding from"""
_KINDS = "tensor|sequence|context|pipeline|expert|data"
_SIZES = re.compile(
    rf"({_KINDS})_(model_)?parallel(ism)?_([a-z]+_)?(size|degree)"
    r"|(dp|hsdp|fsdp|tp|sp|cp|pp|ep)_([a-z]+_)?(size|degree)"
    r"|ulysses_([a-z]+_)?(size|degree)|fsdp_[a-z0-9_]+"
)
"""names of numbers of ranks, and keys of FSDP in front of which a trainer writes its name"""
_WRITTEN = re.compile(
    r"\b(fsdp_config|sharding_strategy|zero_optimization|zero_stage)\b.{0,3}[:=.]"
)
"""settings inside a text, such as a command that writes them to a file"""
_ENGINES = re.compile(
    r"([a-z0-9_.]*[._])?(fsdp|hsdp|fully_?shard|megatron|deepspeed|zero_?[123]|veomni|modelparallel)"
    r"[a-z0-9_.]*",
    re.IGNORECASE,
)
"""values that name what shards a run, as a word or the path of a class"""
_CHOICES = re.compile(
    r".*(strategy|backend|engine|plugin|parallel|distributed|dist_config|_target_|class_path).*"
)
"""keys that hold such a value, or a block that does"""
_FOREIGN = re.compile(
    r"parallelism|dist_config|dtensor_cfg|(.+_)?megatron(_.+)?|(use_|enable_)?fsdp(_.+)?|veomni"
    r"|.*_model_parallel_size|.*sharded_data_parallel.*|.*_parallel_(mode|dim)"
)
"""keys of other trainers' blocks and sizes, whatever they hold"""
_SERVERS = frozenset({"rollout", "vllm", "sglang", "inference", "generation", "actor_infer"})
"""blocks about engines that generate"""
_ALONE = (0, 1, "0", "1", "no", "none", "off")


def sharding_in(data: Mapping[str, Any], path: Path, value: Any, sites: Collection[Path]) -> str:
    """Says why a key that nothing was written for is about sharding all the same.

    Args:
        data: the whole file.
        path: of the key.
        value: its value, a list with all that is in it.
        sites: mappings that hold settings of sharding, whose other keys are read with them.

    Returns:
        A sentence, or "" where the key is about something else.
    """
    if _is_empty(value) or _is_ours(data, path):
        return ""
    block = next((name for name in path if name in _BLOCKS), None) or _block_within(value)
    if block is not None:
        return f"`{block}` shards a run, and nothing was written for it where it stands"
    if path[:-1] in sites and _SIZES.fullmatch(path[-1]) and value not in _ALONE:
        return "is about ranks, and is no key that this dialect is known to have"
    if isinstance(value, str) and (found := _WRITTEN.search(value)):
        return f"its text holds `{found[1]}`, and what is inside a text is not read"
    return ""


def foreign_sign(data: Mapping[str, Any], path: Path = ()) -> str:
    """The first key that says how another trainer shards a run, with dots; "" if there is none."""
    for key, value in data.items():
        here = (*path, key)
        if key in _SERVERS or _is_empty(value):
            continue
        name = key.lower().replace("-", "_")
        sized = _SIZES.fullmatch(name) is not None and value not in _ALONE
        word = isinstance(value, str) and _ENGINES.fullmatch(value) is not None
        chosen = any(_CHOICES.fullmatch(part.lower()) for part in here)
        if sized or _FOREIGN.fullmatch(name) or (word and chosen):
            return ".".join(here)
        if isinstance(value, Mapping) and (found := foreign_sign(value, here)):
            return found
    return ""


def _is_empty(value: Any) -> bool:
    return value is False or value in (None, "", {}, [])


def _is_ours(data: Any, path: Path) -> bool:
    """Whether it is inside of what the other dialects become."""
    for name in path:
        data = data[name]
        if name == "fsdp2" or (
            name == "fsdp_config" and isinstance(data, Mapping) and str(data.get("version")) == "2"
        ):
            return True
    return False


def _block_within(value: Any) -> str | None:
    """The first key of a list's mappings that is a block with settings."""
    return next(
        (key for key, item in _inside(value) if key in _BLOCKS and not _is_empty(item)), None
    )


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys at any depth, without recursion: files may be nested deeply."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            yield from item.items()
            left += item.values()
        elif isinstance(item, list):
            left += item
