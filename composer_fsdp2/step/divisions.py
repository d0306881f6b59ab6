"""Tells the divisions of a model between ranks that a forward begins."""

from __future__ import annotations

from composer_fsdp2.step.run import Run, StepListener

__all__ = ["Divisions"]


class Divisions(StepListener):
    """Lets ranks that compute one batch compare it, and draw alike; see `parallel.division`."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Where a model is divided."""
        return bool(run.divisions)

    def begin_forward(self) -> None:
        """Collective: as `Divided.before_forward`."""
        for division in self.run.divisions:
            division.before_forward(self.run.model, self.run.inputs)
