"""Writes docs/reference/api.md: `python -m tests.support.api_page`.

The page names the public objects. Signatures and docstrings are put in when the site is built.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import composer_fsdp2

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"

GROUPS = {
    "Shard a model": (
        "prepare_fully_shard",
        "full_tensor",
        "summon_full_params",
        "ModelWeights",
        "sequence_attention",
        "install",
        "installed",
        "uninstall",
    ),
    "Settings": ("FSDP2Config", "parse_config", "TrainerFSDP2Config"),
    "Plan without sharding": (
        "plan_wrapping",
        "apply_plan",
        "WrapPlan",
        "ShardUnit",
        "tied_groups",
    ),
    "Activation checkpointing on any module": (
        "plan_activation",
        "apply_activation",
        "ActivationSpec",
        "ActivationPlan",
    ),
    "In a loop of your own": ("clip_grad_norm_",),
    "Callback": ("FSDP2Monitor",),
    "Optimizer": ("Muon",),
    "Errors": ("ConfigError", "PlanError", "CheckpointError", "PatchError"),
}

WITHOUT_MEMBERS = {"FSDP2Config", "FSDP2Monitor", "TrainerFSDP2Config"}
"""whose attributes are settings, or whose methods are called by Composer"""

HEAD = """\
# Python API

These names are the public API. Import them from `composer_fsdp2`. Importing the package has no side
effect. The changelog lists every change of a public name.

`python -m tests.support.api_page` writes this page.

"""


def page() -> str:
    """The page as Markdown."""
    return HEAD + "\n".join(_group(title, names) for title, names in GROUPS.items())


def _group(title: str, names: tuple[str, ...]) -> str:
    rows = "".join(f"| `{name}` | {_summary(getattr(composer_fsdp2, name))} |\n" for name in names)
    objects = "\n".join(map(_object, names))
    return f"## {title}\n\n| name | |\n|---|---|\n{rows}\n{objects}"


def _object(name: str) -> str:
    options = "    options:\n      members: false\n" if name in WITHOUT_MEMBERS else ""
    return f"::: {_home(name)}\n{options}"


def _home(name: str) -> str:
    value = getattr(composer_fsdp2, name)
    return f"{value.__module__}.{value.__qualname__}"


def _summary(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0].replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page())
