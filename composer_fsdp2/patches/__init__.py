"""Replaces functions of Composer, LLM Foundry, transformers and PEFT, one table a subject.

No other folder replaces attributes of other packages. Rows of LLM Foundry count once it has been
imported: a run without it does not need them, and `transform`, which every run with it calls,
installs them.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from composer_fsdp2.patches import engine
from composer_fsdp2.patches.engine import (
    Feature,
    PatchPoint,
    PatchState,
    check_feature,
    describe_patches,
)
from composer_fsdp2.patches.extensions import (
    ALGORITHM_ROWS,
    CALLBACK_ROWS,
    HUGGINGFACE_ROWS,
)
from composer_fsdp2.patches.foundry import FOUNDRY_ROWS, GROUPS, ONE_RANK
from composer_fsdp2.patches.trainer import CHECKPOINT_ROWS, TRAINER_ROWS
from composer_fsdp2.patches.transformers5 import TRANSFORMERS5_ROWS
from composer_fsdp2.torch_private.reading import stop_guarding

__all__ = [
    "GROUPS",
    "NEEDS",
    "ONE_RANK",
    "PATCHES",
    "Feature",
    "PatchPoint",
    "PatchState",
    "check_feature",
    "describe_patches",
    "install",
    "install_for_foundry",
    "install_for_models",
    "installed",
    "patch_states",
    "uninstall",
]

PATCHES: tuple[PatchPoint, ...] = (
    *TRAINER_ROWS,
    *CHECKPOINT_ROWS,
    *CALLBACK_ROWS,
    *ALGORITHM_ROWS,
    *FOUNDRY_ROWS,
    *HUGGINGFACE_ROWS,
    *TRANSFORMERS5_ROWS,
)

NEEDS = {"torch": (2, 7), "mosaicml": (0, 32)}
"""the oldest versions of packages that were tried"""


def install() -> None:
    """Replaces every target of the table; a feature whose source is unknown is switched off.

    Calling it again does nothing, or what has become possible since: see the head of this file.

    Collective: no.

    Raises:
        PatchError: nothing was replaced: torch or Composer is too old, or a function that every run
            with FSDP2 goes through is not one its replacement was written for.

    Example:
        >>> import composer_fsdp2
        >>> composer_fsdp2.install()
        >>> composer_fsdp2.uninstall()
    """
    engine.check_versions(NEEDS)
    engine.install_rows(PATCHES)


def install_for_foundry() -> None:
    """Lets LLM Foundry, which has to be loaded, run with transformers 5, also without FSDP2.

    Collective: no.
    """
    engine.install_rows(TRANSFORMERS5_ROWS)


def install_for_models() -> None:
    """Replaces `save_pretrained`, `generate` and their like, which users call on a sharded model.

    Of packages that are loaded, as they are where a model comes from one of them. Collective: no.
    """
    packages = {"transformers", "peft"}.intersection(sys.modules)
    engine.install_rows(
        [row for row in HUGGINGFACE_ROWS if row.target.partition(".")[0] in packages]
    )


def uninstall() -> None:
    """Puts every original back. Does nothing without `install()`.

    DTensor's methods too, which `prepare_fully_shard` replaces: a number that is read out of shards
    of a model that is still there is this rank's alone from then on. Collective: no.

    Example:
        >>> import composer_fsdp2
        >>> composer_fsdp2.uninstall()
    """
    engine.uninstall_rows()
    stop_guarding()


def installed() -> AbstractContextManager[None]:
    """Installs the patch rows while a block runs.

    Collective: no.

    Returns:
        A context manager that yields nothing.

    Raises:
        PatchError: as `install_rows`, when the function is called or the block begins.

    Example:
        >>> import composer_fsdp2
        >>> with composer_fsdp2.installed():
        ...     pass  # build and run a Trainer
    """
    engine.check_versions(NEEDS)
    return engine.rows_installed(PATCHES)


def patch_states() -> tuple[PatchState, ...]:
    """Returns the state of every row whose package there is. It changes nothing but imports.

    Collective: no.
    """
    return engine.states(PATCHES)
