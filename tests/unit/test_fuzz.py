"""Thousands of generated inputs: understood, or refused with a sentence, and nothing else.

The generators are seeded, so a failure is found again; `-s` prints the counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_fsdp2.checkpoint.describe import verify_checkpoint
from composer_fsdp2.checkpoint.source import open_checkpoint
from composer_fsdp2.config import schema, wrapping
from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.foundry.run_file import read_parallelism, read_yaml
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.trainer.config import parse_parallelism_config
from tests.support.data_folder import CONFIGS as COLLECTION
from tests.support.data_folder import ROOT
from tests.support.saved import save_file, save_folder, small_state

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdef", "bcdefg", strict=True)
)
CONFIGS, YAMLS, CHECKPOINTS = 20_000, 2_000, 2_000

SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 4, 8, -7, 10**30, -(10**30), 0.5, -0.0, 1e308),
    *(math.inf, -math.inf, math.nan, "", " ", "auto", "true", "None", "1", "first-2", "i-j"),
    *("DEFAULT", "pure", "bf16", "fp8", "lift", "full", "sharded", "selective", "every", "last"),
    *("model.layers.*", "re:(", "re:.*", "re:(a+)+$", "../../etc/passwd", "/", "~", "{epoch}", "{"),
    *("\x00", "\ud800", "\u202e", "ключ", "数", "e\u0301", "'", '"', "\n", "%s", "${env:HOME}"),
    *(
        b"bytes",
        object,
        1j,
        ...,
        16**5000,
        [math.nan],
        "re:" + "(" * 2000,
        "re:a{99999999999999999999}",
    ),
    *("\u0430uto", "\uff11", "first-" + "9" * 5000, "a\0b", "\u200btrue", -(2**63), 2**63),
]


def nested_keys() -> list[str]:
    """Keys of every mapping the settings may hold."""
    specs = [
        v
        for module in (schema, wrapping)
        for v in vars(module).values()
        if isinstance(v, type) and dataclasses.is_dataclass(v)
    ]
    return sorted({field.name for spec in specs for field in dataclasses.fields(spec)})


KEYS = list(schema.FIELDS)
NESTED = nested_keys()


def value(choose: random.Random, depth: int = 0) -> Any:
    kind = choose.random()
    if depth > 2 or kind < 0.6:
        return choose.choice(SCALARS)
    count = choose.randrange(4)
    if kind < 0.75:
        return [value(choose, depth + 1) for _ in range(count)]
    names = [*NESTED, "Block", "layers.*", "", "re:[", 7, None]
    return {choose.choice(names): value(choose, depth + 1) for _ in range(count)}


def misspelt(choose: random.Random, word: str) -> str:
    at = choose.randrange(len(word))
    odd = ["", "x", "_", "é", "\u0435", "\0", "\ud800", "\u202e", "\u200b"]
    return word[:at] + choose.choice(odd) + word[at + 1 :]


RIGHT: dict[str, list[Any]] = {
    "reshard_after_forward": ["auto", True, False, 1],
    "mixed_precision": ["PURE", "full", {"param_dtype": "bf16"}],
    "wrap_policy": [{"classes": ["Block"]}, {"names": "a.*"}, {"embeddings": True}],
    "state_dict_type": ["full", "sharded"],
    "tied_weights": ["lift", "error"],
    "data_parallel_shard_degree": [-1, 1],
}


def all_right(choose: random.Random) -> dict[str, Any]:
    keys = choose.sample(sorted(RIGHT), 2)
    return {key: choose.choice(RIGHT[key]) for key in keys}


def settings(choose: random.Random) -> dict[Any, Any]:
    keys = [choose.choice(KEYS) for _ in range(choose.randrange(1, 5))]
    if choose.random() < 0.1:
        keys.append(misspelt(choose, choose.choice(KEYS)))
    right = choose.random() < 0.5
    return {k: choose.choice(RIGHT[k]) if right and k in RIGHT else value(choose) for k in keys}


def count(what: Counter[str], limit: int, name: str) -> None:
    print(f"{name}: {dict(what)}")
    assert sum(what.values()) == limit
    assert "refused in silence" not in what


def told(error: Exception) -> str:
    """A refusal is a sentence that can be printed anywhere."""
    str(error).encode()
    assert "\0" not in str(error)
    assert "\u202e" not in str(error)
    return "refused" if str(error) else "refused in silence"


@pytest.mark.matrix
def test_configurations():
    choose, met = random.Random(1), Counter[str]()
    defaults = FSDP2Config()
    for _ in range(CONFIGS):
        given = settings(choose)
        try:
            parsed = parse_config(given)
        except ConfigError as error:
            met[told(error)] += 1
            continue
        met["understood"] += 1
        for key, raw in given.items():
            found = getattr(parsed, key)
            if raw not in (None, [], {}) and found == getattr(defaults, key):
                # Only where it says what is the default anyway.
                assert parse_config({key: found}) == parse_config({key: raw}), (key, raw)
    count(met, CONFIGS, "configurations")
    assert min(met["refused"], met["understood"]) > CONFIGS / 50


def test_parallelism_configs():
    choose, met = random.Random(2), Counter[str]()
    names = ["fsdp", "fsdp2", "tp", "fspd2", 3, None]
    for _ in range(2_000):
        made = [settings, value, all_right]
        given = {choose.choice(names): choose.choice(made)(choose) for _ in range(2)}
        with contextlib.suppress(ConfigError):
            parse_parallelism_config(given)
            met["understood"] += 1
    assert met["understood"] > 20


# --- Files given to `migrate`. ---


def sources() -> list[str]:
    files = [*(ROOT / "yamls").rglob("*.yaml")]
    files += COLLECTION.rglob("*.yaml")
    texts = [file.read_text() for file in sorted(files)]
    return [text for text in texts if len(text) < 1_500]  # which take milliseconds each


TAGS = ["9" * 5000, "0x" + "f" * 5000, "2024-13-45", ".nan", "1e400", '"\\ud800"', "!!int x"]
TAGS += ["!!python/object/apply:os.system ['true']", "!!binary x", "&a [*a]", "{[]: 1}", "<<: *b"]


def mutated(choose: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(choose.randrange(1, 4)):
        at, kind = choose.randrange(len(lines) or 1), choose.randrange(7)
        if kind == 0:
            del lines[at : at + choose.randrange(1, 4)]
        elif kind == 1:
            lines[at:at] = lines[at : at + 2]
        elif kind == 2 and lines:
            lines[at] = lines[at].partition(":")[0] + f": {choose.choice([*SCALARS[:40], *TAGS])}"
        elif kind == 3 and lines:
            lines[at] = " " * choose.randrange(5) + lines[at].strip()
        elif kind == 4 and lines[at:]:
            place = choose.randrange(len(lines[at]) + 1)
            lines[at] = (
                lines[at][:place] + choose.choice("\t:-[]{}\"'#&*!|>%@`\x07é") + lines[at][place:]
            )
        elif kind == 5:
            lines = lines[:at]
        else:
            choose.shuffle(lines)
        lines = lines or [""]
    return "\n".join(lines) + "\n"


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::ruamel.yaml.error.ReusedAnchorWarning")
def test_files_given_to_migrate():
    choose, met, texts = random.Random(3), Counter[str](), sources()
    for number in range(YAMLS):
        text = mutated(choose, texts[number % len(texts)])
        try:
            migrate(text, world_size=8, gpus_per_node=8)
            met["migrated"] += 1
        except ConfigError as error:
            met[told(error)] += 1
    count(met, YAMLS, "files")
    assert min(met.values()) > YAMLS / 50


@pytest.mark.table("text1", "text2")
@pytest.mark.parametrize("text", ["a: &a [*a]\n", BOMB, "a: " + "[" * 500 + "]" * 500])
def test_values_without_end(text: str):
    with pytest.raises(ConfigError, match=r"without end|valid YAML"):
        migrate(text)


@pytest.mark.parametrize(
    "text",
    [
        "model: {a: 1}\nmodel: {a: 2}\n",
        "model:\n  a: 1\n  a: 1\n",
        "model: [{a: 1, a: 2}]\n",
        '{"model": {"a": 1, "a": 2}}',
        '{"model": 1, "model": 2}',
    ],
)
def test_keys_that_stand_there_twice(text: str, tmp_path: Path):
    text = text if text.startswith("{") else f"fsdp_config:\n  verbose: true\n{text}"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"twice|found duplicate key"):
        read_yaml(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="more than once"):
        migrate(text)


@pytest.mark.parametrize(
    "value", ["2024-13-45", "9" * 5000, "0x" + "f" * 5000, "2001-12-14T99:99:99Z", '"\\ud800"']
)
def test_values_nobody_can_read_or_show(value: str, tmp_path: Path):
    text = f"fsdp_config:\n  data_parallel_shard_degree: {value}\n"
    (tmp_path / "run.yaml").write_text(text)
    with contextlib.suppress(ConfigError):
        read_parallelism(read_yaml(tmp_path / "run.yaml"))
    with contextlib.suppress(ConfigError):
        migrate(text)


# --- Damaged checkpoints. ---


def damaged(choose: random.Random, path: Path) -> None:
    """One byte, a piece, the end, or the whole of one file."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    file = choose.choice(files)
    data, kind = bytearray(file.read_bytes()), choose.randrange(5)
    at = choose.randrange(len(data) or 1)
    if kind == 0 and data:
        data[at] ^= 1 << choose.randrange(8)
    elif kind == 1:
        data[at : at + choose.randrange(1, 200)] = b""
    elif kind == 2:
        data[at:] = choose.randbytes(choose.randrange(64))
    elif kind == 3:
        data[at:at] = choose.randbytes(8)
    else:
        file.unlink()
        return
    file.write_bytes(data)


@pytest.mark.table
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_damaged_checkpoints(tmp_path: Path, kind: str):
    save: Callable[..., Path] = save_folder if kind == "folder" else save_file
    good = save(tmp_path / "good", small_state())
    choose, met, whole = random.Random(4), Counter[str](), 0
    for _ in range(CHECKPOINTS // 2):
        copy = tmp_path / "copy"
        (shutil.copytree if good.is_dir() else shutil.copyfile)(good, copy)
        damaged(choose, copy)
        try:
            if not verify_checkpoint(copy, lambda *_: None)["problems"]:
                whole += 1
            opened = open_checkpoint(copy)
            for name in opened.tensors:
                opened.tensor(name)
            met["read"] += 1
        except CheckpointError as error:
            met[told(error)] += 1
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink(missing_ok=True)
    count(met, CHECKPOINTS // 2, f"checkpoints in a {kind}")
    # What the damage did not reach may be read; a file without checksums shows less of it.
    assert whole <= met["read"]
    assert met["refused"] > CHECKPOINTS / 8
