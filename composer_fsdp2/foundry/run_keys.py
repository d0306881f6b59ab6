"""Top-level keys of a run: which LLM Foundry would refuse, found without importing LLM Foundry.

[Note: keys of a run] LLM Foundry imports `code_paths`, applies every registered config transform,
and only then refuses keys that it does not know. A transform may take any key out. So a key is
refused here where no transform but ours can be registered, and where the code that registers one
does not name it and a key that LLM Foundry knows, and the run lacks, is written almost alike.
Everywhere else the run decides, and a line says what may come. An evaluation asks no registered
transform.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_fsdp2.config.messages import ascii_repr, nearest
from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["OUR_KEY", "check_keys", "describe_unknown", "known_keys", "words_in", "words_of"]

OUR_KEY = "parallelism_config"
_CLASSES = {"train": "TrainConfig", "eval": "EvalConfig"}
# LLM Foundry's evaluation moves these under `models`, as its `allow_toplevel_keys` says.
_MOST = 5
_OF_TRAINING = {"eval": ("model", "tokenizer", "model_name", "load_path")}
_WORK = {"train": "training", "eval": "evaluation"}
_GROUP = "llmfoundry_config_transforms"
# Packages that register no config transform. Whoever imports others may import one that does.
_HARMLESS = frozenset(
    (
        *("PIL", "composer", "composer_fsdp2", "datasets", "einops", "huggingface_hub"),
        *("llmfoundry", "numpy", "omegaconf", "pandas", "peft", "pyarrow", "requests"),
        *("safetensors", "scipy", "sklearn", "streaming", "tokenizers", "torch", "torchmetrics"),
        *("torchvision", "tqdm", "transformers", "typing_extensions", "yaml"),
    )
)
_REGISTRY = "config_transforms"
_WORD = re.compile(r"[^\s.,:'\"()\[\]{}]+")
# What imports or runs code that may register one.
_SUSPECT = frozenset(("import_file", "import_module", "runpy"))
_SUSPECT_NAMES = frozenset(("__import__", "exec", "eval"))


def check_keys(cfg: DictConfig, command: str) -> str | None:
    """Checks the top-level keys of a run. Imports nothing of LLM Foundry.

    Args:
        cfg: the run with its overrides, interpolations as they are written.
        command: "train" or "eval".

    Returns:
        A line for the user where a config transform decides; else `None`.

    Raises:
        ConfigError: LLM Foundry would refuse keys of it.
    """
    known = known_keys(command)
    unknown = [key for key in cfg if key not in known] if known else []
    if not unknown:
        return None
    work = _WORK[command]
    what = " ".join(describe_unknown(key, known, work) for key in unknown[:_MOST])
    if len(unknown) > _MOST:
        what += f" {len(unknown) - _MOST} more are none either."
    if command == "train" and _may_be_taken(unknown, cfg, known):
        return f"{what} The run will stop, unless a config transform takes it out."
    raise ConfigError(f"{what} Correct it, or put values of your own under `variables`.")


def describe_unknown(key: Any, known: Iterable[str], command: str = "training") -> str:
    """Returns the sentences about a key that LLM Foundry does not know."""
    start = f"{ascii_repr(key)} is not a key of LLM Foundry's {command}."
    if key == "fsdp2":
        return f"{start} FSDP2's settings belong one level deeper: {OUR_KEY}: {{fsdp2: ...}}."
    return f"{start} It would stop the run.{nearest(str(key), known)}"


def known_keys(command: str) -> frozenset[str]:
    """Returns the keys that LLM Foundry and this package take; empty where that cannot be read."""
    fields = _read_fields(_CLASSES[command])
    return frozenset((*fields, *_OF_TRAINING.get(command, ()), OUR_KEY)) if fields else frozenset()


def _read_fields(name: str) -> list[str]:
    """Returns the fields of a class of LLM Foundry as its source declares them."""
    spec = importlib.util.find_spec("llmfoundry")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    for folder in folders:
        tree = _parse(Path(folder, "utils", "config_utils.py"))
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == name and not node.bases:
                targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


# --- Whether a config transform of somebody else may be registered. ---


def _may_be_taken(unknown: list[Any], cfg: DictConfig, known: frozenset[str]) -> bool:
    others = importlib.metadata.entry_points(group=_GROUP)
    if any(entry.value.partition(".")[0] != "composer_fsdp2" for entry in others):
        return True
    words = words_of(_code_paths(cfg))
    if words is None:
        return True
    if _REGISTRY not in words:
        return False
    lacking = known.difference(map(str, cfg))
    return any(str(key) in words or not nearest(str(key), lacking) for key in unknown)


def words_of(paths: Iterable[Path]) -> set[str] | None:
    """Returns names, and words of texts, of files; `None` where they may run code of others."""
    words = set[str]()
    for path in paths:
        tree = _parse(path)
        if tree is None or _brings_other_code(tree):
            return None
        words |= _all_words(tree)
    return words


def words_in(paths: Iterable[Path]) -> set[str]:
    """Returns names, and words of texts, of files; nothing of a file that cannot be read."""
    trees = filter(None, map(_parse, paths))
    return {word for tree in trees for word in _all_words(tree)}


def _code_paths(cfg: DictConfig) -> list[Path]:
    """Returns the files; for what only the run can work out, or refuse, a place that is no file."""
    from omegaconf import ListConfig
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = cfg.get("code_paths") or ListConfig([])
        return [Path(str(path)) for path in found] if isinstance(found, ListConfig) else [Path()]
    except OmegaConfBaseException:
        return [Path()]


def _brings_other_code(tree: ast.Module) -> bool:
    """Whether a file may run code of others that registers config transforms."""
    for node in ast.walk(tree):
        packages: list[str] = []
        if isinstance(node, ast.Import):
            packages = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            packages = [(node.module or "").partition(".")[0] if not node.level else ""]
        elif isinstance(node, ast.Name) and node.id in _SUSPECT_NAMES:
            return True
        if not _HARMLESS.union(sys.stdlib_module_names).issuperset(packages):
            return True
    return not _SUSPECT.isdisjoint(_all_words(tree))


def _all_words(tree: ast.Module) -> set[str]:
    """Returns names, and words of texts, of a file."""
    fields = (value for node in ast.walk(tree) for _, value in ast.iter_fields(node))
    return {word for value in fields if isinstance(value, str) for word in _WORD.findall(value)}


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
