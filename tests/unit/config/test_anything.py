"""`parse_config` raises nothing but ConfigError, soon and at a length a person reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from composer_fsdp2.config.fsdp1 import FSDP1_KEYS, FSDP1_ONLY
from composer_fsdp2.config.schema import FIELDS, parse_config
from composer_fsdp2.errors import ConfigError
from tests.support.limits import Limit

LONGEST = 20_000


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError


class NoEquality:
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError


class NoHash:
    def __hash__(self) -> int:
        raise RuntimeError


class NoTruth:
    def __bool__(self) -> bool:
        raise RuntimeError


class OddWord(str):
    __slots__ = ()

    def __hash__(self) -> int:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __str__(self) -> str:
        raise RuntimeError


class NoItems(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(NoRepr())

    def __iter__(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return 3


class NoElements(Sequence[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError

    def __len__(self) -> int:
        return 3


def cycle(kind: type) -> Any:
    around: Any = kind()
    if isinstance(around, dict):
        around["wrap_policy"] = around
    else:
        around.append(around)
    return around


def deep(kind: type) -> Any:
    inner: Any = kind()
    for _ in range(3000):
        inner = {"a": inner} if kind is dict else [inner]
    return inner


ODD: dict[str, Any] = {
    "no repr": NoRepr(),
    "no equality": NoEquality(),
    "no hash": NoHash(),
    "no truth": NoTruth(),
    "odd word": OddWord("auto"),
    "no items": NoItems(),
    "no elements": NoElements(),
    "dict in itself": cycle(dict),
    "list in itself": cycle(list),
    "deep dict": deep(dict),
    "deep list": deep(list),
    "nan": math.nan,
    "infinity": -math.inf,
    "huge number": 10**5000,
    "bytes": b"\xff",
    "bytearray": bytearray(b"x"),
    "surrogate": "\ud800",
    "null character": "a\0b",
    "tensor": torch.zeros(3),
    "class": int,
    "complex": 1j,
    "set": {1, 2},
    "generator": itertools.count(),
    "endless": range(10**12),
    "long word": "x" * 10**7,
    "long list": ["a"] * 10**6,
    "long mapping": {str(number): 1 for number in range(10**5)},
    "open expression": "re:" + "(" * 200,
    "missing": OmegaConf.create({"a": "???"}),
    "leads nowhere": OmegaConf.create({"a": "${nowhere}"}),
    "leads to itself": OmegaConf.create({"a": "${a}"}),
}
NESTED = (
    ("wrap_policy", "classes"),
    ("wrap_policy", "embeddings"),
    ("mixed_precision", "param_dtype"),
    ("communication", "symmetric_memory"),
    ("activation_checkpointing", "target"),
    ("compile", "blocks"),
)


def said(config: Any) -> str:
    """What `parse_config` says; '' where it takes the settings."""
    limit = Limit(5)
    try:
        parse_config(config)
    except ConfigError as error:
        text = str(error)
        assert len(text) < LONGEST
        assert text
        return text
    finally:
        assert limit.left()
    return ""


@pytest.mark.table("no equality", "deep dict", "huge number", "long word")
@pytest.mark.parametrize("kind", ODD)
def test_nothing_but_configerror(kind: str):
    value = ODD[kind]
    said(value)
    for name in (*FIELDS, *FSDP1_ONLY, "no_setting"):
        said({name: value})
    for outer, inner in NESTED:
        said({outer: {inner: value}})
    said({"wrap_policy": {"classes": {"Block": value}}})
    said({"wrap_policy": {"names": [value]}})
    try:
        keyed = {value: 1}
    except Exception:
        return
    said(keyed)
    said({"wrap_policy": keyed})


@pytest.mark.parametrize("value", [None, 3, "fsdp2", [], ["a"], NoRepr(), b""])
def test_settings_that_are_no_mapping(value: Any):
    assert "no mapping" in said(value)


class Counted(dict[str, int]):
    """Counts how many of its keys are looked at."""

    looked = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.looked += 1
            yield key

    def keys(self) -> Any:
        return iter(self)

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


@pytest.mark.matrix
def test_a_million_unknown_keys():
    """They are not all read, and still less compared with the names of settings."""
    given = Counted({f"key{number}": number for number in range(10**6)})
    assert len(said(given)) < 1000
    assert given.looked < 300_000


def test_thousands_of_unknown_keys_are_cut():
    text = said({f"key{number}": number for number in range(5000)})
    assert "4990 more are not keys" in text
    assert "'key0'" in text


def test_settings_that_are_read_lazily():
    config = OmegaConf.create({"a": True, "verbose": "${a}", "wrap_policy": {"names": ["${b}"]}})
    del config["a"]
    assert "nowhere" in said({"wrap_policy": ODD["leads nowhere"]})
    assert "verbose" in said(config) or "a" in said(config)


# --- Keys of FSDP1 among those of FSDP2. ---


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("use_orig_params", False, ("keeps every parameter apart", "Take it out")),
        ("limit_all_gathers", True, ("needs no rate limit",)),
        ("sync_module_states", True, ("rank 0's weights",)),
        ("sharding_strategy", "FULL_SHARD", ("reshard_after_forward: auto",)),
        ("sharding_strategy", "shard_grad_op", ("reshard_after_forward: false",)),
        ("sharding_strategy", "HYBRID_SHARD", ("data_parallel_replicate_degree: -1", "node")),
        ("sharding_strategy", "NO_SHARD", ("data_parallel_shard_degree: 1",)),
        ("sharding_strategy", "ZERO", ("none of its values", "FULL_SHARD")),
        ("ignored_modules", ["a"], ("ignored_params",)),
        ("auto_wrap", True, ("Take it out",)),
        ("process_group", "node", ("data_parallel_shard_degree",)),
    ],
)
def test_a_key_of_fsdp1_is_answered(key: str, value: Any, words: tuple[str, ...]):
    text = said({key: value})
    assert f"'{key}' is a key of FSDP1" in text
    assert "composer-fsdp2 migrate" in text
    assert "Did you mean" not in text
    assert "Valid keys" not in text
    for word in words:
        assert word in text


def test_every_key_of_fsdp1_has_an_answer():
    for key in FSDP1_KEYS - FIELDS.keys():
        assert "is a key of FSDP1" in said({key: None}), key
