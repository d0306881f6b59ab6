"""Continues Muon from the state of an optimizer of Adam's family.

Both keep an average of past gradients: Adam's first moment is Muon's momentum, with another
decay. So hidden matrices take it over and leave their second moment behind. All other
parameters are stepped by AdamW in both, and take over everything.

Source: `torch.optim.Muon` averages as Adam does, `momentum.lerp_(grad, 1 - beta)`; the length
of what it averages makes no difference to Newton-Schulz.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping
from typing import Any

from composer_fsdp2.checkpoint.source import Checkpoint

__all__ = ["MuonFromAdamW"]

_MOMENTUM, _FIRST, _SECOND = "momentum_buffer", "exp_avg", "exp_avg_sq"
_ADAM = frozenset({"step", _FIRST, _SECOND})


class MuonFromAdamW:
    """Finds the state that Muon takes from a checkpoint of Adam's family. Collective: no.

    Args:
        saved: an open checkpoint.
        muon: names of the parameters that Muon makes orthogonal.
        adamw: names of those it steps by AdamW. Frozen ones are in neither.

    Attributes:
        source: the optimizer in the checkpoint whose state it is, or `None`.
    """

    def __init__(self, saved: Checkpoint, muon: Collection[str], adamw: Collection[str]) -> None:
        self._muon, self._adamw = frozenset(muon), frozenset(adamw)
        stepped = self._muon | self._adamw
        saved_paths = set(saved.under("state", "optimizers").values())
        needed = [("state", param, key) for param in stepped for key in _ADAM]
        of_adam = [
            name
            for name in sorted({str(path[0]) for path in saved_paths if path})
            if stepped and all((name, *path) in saved_paths for path in needed)
        ]
        self.source = of_adam[0] if of_adam else None

    @property
    def ignored(self) -> list[str]:
        """Returns globs of the state that stays in the checkpoint, as in `load_ignore_keys`."""
        start = f"state/optimizers/{self.source}/state"
        starts = [f"{start}/{glob.escape(name)}" for name in self._muon]
        unused = [f"{start}/{key}" for start in starts for key in (_SECOND, "step")]
        return [*unused, f"{start}/*/max_{_SECOND}"]

    @property
    def note(self) -> str:
        """Returns a sentence about the state that goes on and the settings that start anew."""
        return (
            f"The run's optimizer is Muon, the checkpoint has the state of {self.source}: "
            f"{len(self._muon)} hidden matrices take its first moment as momentum and leave the "
            f"second, {len(self._adamw)} other parameters continue. Learning rates, weight decay "
            "and schedules are those of this run."
        )

    def to_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns Muon's state by parameter, under the names that the checkpoint has."""
        return self._renamed(state, _MOMENTUM, _FIRST)

    def from_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the checkpoint's state by parameter, under the names that Muon has."""
        return self._renamed(state, _FIRST, _MOMENTUM)

    def _renamed(self, state: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
        return {
            name: {new: values[old]}
            if name in self._muon
            else {key: values[key] for key in values if key in _ADAM}
            for name, values in state.items()
        }
