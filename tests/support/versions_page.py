"""Writes docs/reference/versions.md: `python -m tests.support.versions_page`."""

from __future__ import annotations

from pathlib import Path

from composer_fsdp2.patches import NEEDS
from composer_fsdp2.shard.communication import METHODS
from composer_fsdp2.torch_private.members import PRIVATE_MEMBERS
from tests.support.supported_table import table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "versions.md"

HEAD = """\
# Versions

`python -m tests.support.versions_page` writes this page.

## Tested versions

`.ci/run` installs and runs every row of this table but the last, in a copy of the repository.
Python is 3.10, 3.11 or 3.12. The pins for torch 2.15 need 3.11 or 3.12.

"""

NEWER = """
The oldest versions that the package accepts are {needs}. The package sets no upper bound on torch.
`.ci/newest` runs the tests marked `smoke` on the newest versions of all packages.

An unknown version of Composer, LLM Foundry, transformers or PEFT may have other functions than
those that the package replaces. The feature that needs an unknown function is then switched off. A
run that asks for the feature is refused by name. `composer-fsdp2 doctor` lists what is off.

## Settings that need a newer torch

An older torch refuses these settings by name.

| setting | needs in `FSDPModule` |
|---|---|
"""

MEMBERS = """
## Private members of torch

Some features read or replace members of torch that are not public. If the installed torch lacks
one, a run that needs it is refused before the model is changed. `fully_shard` stands for every run.

| feature | members |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    needs = " and ".join(f"{name} {'.'.join(map(str, v))}" for name, v in NEEDS.items())
    switches = "".join(f"| `communication.{k}` | `{name}` |\n" for k, name in METHODS.items())
    return HEAD + table() + NEWER.format(needs=needs) + switches + MEMBERS + _members()


def _members() -> str:
    titles: dict[str, dict[str, None]] = {}
    for member in PRIVATE_MEMBERS:
        titles.setdefault(member.feature, {})[f"`{member.title}`"] = None
    return "".join(f"| `{feature}` | {', '.join(found)} |\n" for feature, found in titles.items())


if __name__ == "__main__":
    PAGE.write_text(page())
