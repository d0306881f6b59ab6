"""Learning rates that follow from schedules."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["set_rates_by_schedules"]


def set_rates_by_schedules(schedules: Iterable[LRScheduler]) -> None:
    """Sets the rate of each group to what its schedule gives now.

    Collective: no. Composer's schedules are functions of the timestamp, each a `LambdaLR`. When a
    run goes on at a later time without the groups of a checkpoint, they hold the rate of batch 0,
    often 0, until the schedule is asked again, which is after the next step. Other kinds of
    schedules count their own steps, and are left alone.
    """
    for schedule in schedules:
        if not isinstance(schedule, LambdaLR):
            continue
        rules = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        rates = [base * rule(schedule.last_epoch) for base, rule in rules]
        schedule.get_last_lr()[:] = rates
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
