"""Ranks that compute one batch together: they compare it, and draw the same random numbers."""

from __future__ import annotations

from composer_fsdp2.step.run import Run, StepListener

__all__ = ["OneBatch"]


class OneBatch(StepListener):
    """Tells the groups of a run that a forward begins; see `parallel.division: RankGroup`."""

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Where ranks read one batch."""
        return run.batch_group is not None

    def begin_forward(self) -> None:
        """Collective: as `RankGroup.before_forward`."""
        assert self.run.batch_group is not None
        for part in self.run.batch_group.parts:
            part.before_forward(self.run.model, self.run.inputs)
