"""Muon that continues from the state of an optimizer of Adam's family.

Both keep an average of past gradients: Adam's first moment is Muon's momentum, with another decay.
So hidden matrices take it over and leave their second moment behind. All other parameters are
stepped by AdamW in both, and take over everything.

Source: `torch.optim.Muon` averages as Adam does, `momentum.lerp_(grad, 1 - beta)`; the length of
what it averages makes no difference to Newton-Schulz.
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
    """Names of the state that Muon takes from a checkpoint of Adam's family. Collective: no.

    Args:
        saved: the checkpoint.
        muon: names of the parameters that Muon makes orthogonal.
        adamw: names of those it steps by AdamW. Frozen ones are in neither.
    """

    def __init__(self, saved: Checkpoint, muon: Collection[str], adamw: Collection[str]) -> None:
        self._muon, self._adamw = frozenset(muon), frozenset(adamw)
        self.source = next(
            (name for name in _optimizers(saved) if self._is_adam(saved, name)), None
        )
        """the optimizer in the checkpoint whose state it is, or `None`"""

    def _is_adam(self, saved: Checkpoint, optimizer: str) -> bool:
        keys: dict[str, set[str]] = {}
        for way in saved.under("state", "optimizers", optimizer, "state").values():
            if len(way) == 2:
                keys.setdefault(str(way[0]), set()).add(str(way[1]))
        asked = self._muon | self._adamw
        return bool(asked) and all(keys.get(name, set()) >= _ADAM for name in asked)

    @property
    def ignored(self) -> list[str]:
        """Globs of what is left in the checkpoint, as in `load_ignore_keys`."""
        start = f"state/optimizers/{self.source}/state"
        left = [f"{start}/{glob.escape(name)}/{_SECOND}" for name in self._muon]
        left += [f"{start}/{glob.escape(name)}/step" for name in self._muon]
        return [*left, f"{start}/*/max_{_SECOND}"]

    @property
    def note(self) -> str:
        """A sentence about what goes on and what starts anew."""
        return (
            f"The run's optimizer is Muon, the checkpoint has the state of {self.source}: "
            f"{len(self._muon)} hidden matrices take its first moment as momentum and leave the "
            f"second, {len(self._adamw)} other parameters continue. Learning rates, weight decay "
            "and schedules are those of this run."
        )

    def to_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Muon's state by parameter, under the names that the checkpoint has."""
        return self._renamed(state, _MOMENTUM, _FIRST)

    def from_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint's state by parameter, under Muon's names and without what it leaves."""
        return self._renamed(state, _FIRST, _MOMENTUM)

    def _renamed(self, state: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name, held in state.items():
            if name in self._muon:
                changed[name] = {new: held[old]}
            else:
                changed[name] = {key: held[key] for key in held if key in _ADAM}
        return changed


def _optimizers(saved: Checkpoint) -> list[str]:
    return sorted({str(way[0]) for way in saved.under("state", "optimizers").values() if way})
