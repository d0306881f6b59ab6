"""Parameters that get a gradient on some ranks only, or on none.

[Note: unused parameters] FSDP2 reduces the parameters that have a gradient. Where ranks differ in
that, it reduces tensors of different sizes, or silently adds one parameter's gradient to another's.
So every unit that took part in backward reduces a zero where a parameter got no gradient. That is
local, and costs nothing where all have one. A unit that ran several times before a backward reduces
each time it is left, though its gradients may all come the last time: which of them come earlier
may differ between ranks. What needs the other ranks is only whether nobody used a parameter: it is
left without a gradient then, as in one process, so that momentum and weight decay leave it alone.

Units with experts or a tower compare that in a collective after each backward, and so do the units
in which the first backward left anything out. Elsewhere nothing is sent. A rank that has to fill in
a zero there says so in the store of the process group before it reduces. When its reduction is
done, every rank has begun that reduction, so every rank that filled in too has said so. If all
have, nobody used the parameter. `must_compare` asks for the collective from then on.

Source: what torch reduces is the parameters with a gradient,
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py#L397
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from composer_fsdp2.parallel.parallelism import experts_of
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.step.agreement import agreement_of
from composer_fsdp2.step.run import Run, StepListener
from composer_fsdp2.torch_private.tensors import default_store
from composer_fsdp2.torch_private.units import (
    add_zero_gradients,
    all_reduces,
    has_gradient,
    has_run,
    params_of,
    reduces,
    runs_backward,
    sharded_param,
    trained_params,
    will_get_gradient,
)

__all__ = ["UnusedParameters"]

_READ = 2**32
"""counts, beside the ranks that wrote a key of the store, those that have read it"""


class UnusedParameters(StepListener):
    """Has units reduce every parameter of theirs on every rank; see [Note: unused parameters].

    The end of a backward that reduces is a collective over the default group for units in which
    ranks often use different parameters, and for all units in the first step.
    """

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Says whether other ranks may use other parameters."""
        alone = dist.get_world_size() == 1 or is_fake()
        return run.settings.unused_parameters is not False and not alone and bool(run.groups)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._groups = [group for groups in run.groups.values() for group in groups]
        often = run.groups if run.settings.unused_parameters is True else run.conditional
        self._given = {group for name in often for group in run.groups.get(name, ())}
        self._always = set(self._given)
        """groups that compare after each backward which parameters were used"""
        self._size = dist.get_world_size()
        self._agreement = agreement_of(run.device)
        self._comparing = True
        """whether the next backward compares all units"""
        self.must_compare = False
        """whether this rank filled in zeros where no rank compares"""
        self._ran: set[Any] = set()
        self._used: set[Any] = set()
        self._fresh: set[Any] = set()
        """parameters without a gradient before the reductions that are still to be agreed on"""
        self._told: dict[Any, str] = {}
        """parameters of which the store knows that this rank filled in a zero, with their keys"""
        self._uses: dict[Any, int] = {}
        """forwards of each group since the last backward"""
        self._left = False
        """whether backward has left a group since its last end"""
        self._complete = 0
        """number of the backward for the store's keys, the same on all ranks"""
        self._places = {
            param: (experts.mesh.group_rank, experts.mesh.degree)
            for name, groups in run.groups.items()
            if (experts := experts_of(run.units[name])) is not None
            for param in self._params(groups)
        }
        """of an expert parameter: this rank's index in the expert mesh, and the mesh's size"""
        self._indices = {id(param): n for n, param in enumerate(self._params(self._groups))}
        # Of the store's keys: ranks prepare the same models in the same order.
        rank = dist.get_rank()
        self._prefix = f"fsdp2/unused/{default_store().add(f'fsdp2/unused/{rank}', 1)}"

    def compare(self) -> None:
        """Has the next backward compare all units. Every rank must call it. Collective: no."""
        self._comparing = True
        self.must_compare = False

    def before_forward(self, unit: str, group: Any) -> None:
        """Counts how often a group runs. Collective: no."""
        if torch.is_grad_enabled():
            self._uses[group] = self._uses.get(group, 0) + 1

    def after_backward(self, unit: str, group: Any) -> None:
        """Fills gradients in where the group is about to reduce. Collective: no."""
        self._left = True
        # Torch also calls this at the end of backward, for units that backward did not reach.
        if runs_backward(group):
            self._ran.add(group)
        params = [param for param in trained_params(group) if has_run(param)]
        # Of an earlier microbatch too: torch keeps those that are not reduced yet.
        missing = [param for param in params if not has_gradient(param)]
        self._used.update(set(params).difference(missing))
        if not reduces(group) or group not in self._ran:
            return
        self._ran.discard(group)
        self._fresh.update(param for param in params if sharded_param(param).grad is None)
        if missing and not self._compares(group):
            unused = missing
            if self._uses.get(group, 0) > 1:
                # It comes here as often as it ran, and other uses may be left. A zero is reduced
                # all the same: this may have been the parameter's last use on another rank.
                unused = [param for param in missing if not will_get_gradient(param)]
            self.must_compare = self.must_compare or bool(unused)
            for param in unused if all_reduces(group) else ():
                # Nobody may have used it. Said before the reduction.
                if param in self._fresh and param not in self._used and param not in self._told:
                    key = f"{self._prefix}/{self._complete}/{self._indices[id(param)]}"
                    self._told[param] = key
                    default_store().add(key, 1)
        if missing:
            add_zero_gradients(params, missing)

    def _compares(self, group: Any) -> bool:
        return self._comparing or group in self._always

    @torch.no_grad()
    def end_of_backward(self) -> None:
        """Takes back the gradients that nobody computed. Collective: yes, see the class."""
        if not self._left:
            return  # gradients wait for another backward
        self._left = False
        self._complete += 1
        self._uses.clear()
        self._take_back_told()
        complete = [group for group in self._groups if all_reduces(group)]
        groups = [group for group in complete if self._compares(group)]
        params = self._params(groups)
        if params:
            counts = self._agree(params)
            for param, count in zip(params, counts, strict=True):
                if count == 0 and param in self._fresh:
                    sharded_param(param).grad = None
            if self._comparing:
                self._comparing = False
                left_out = {
                    param
                    for param, count in zip(params, counts, strict=True)
                    if count * self._places.get(param, (0, 1))[1] < self._size
                }
                self._always.update(g for g in groups if left_out.intersection(params_of(g)))
        for waiting in (self._used, self._fresh):
            if len(complete) == len(self._groups):
                waiting.clear()
            else:
                waiting.difference_update(self._params(complete))

    def _take_back_told(self) -> None:
        """Removes the zero gradients that every rank filled in. Collective: no."""
        if not self._told:
            return
        # A reduction that is done has heard of every rank, and every rank spoke before its own.
        if (device := self.run.device).type != "cpu":
            # At the end of backward torch has this stream wait for them, not the host.
            torch.get_device_module(device).current_stream(device).synchronize()
        for param, key in self._told.items():
            read, told = divmod(default_store().add(key, _READ), _READ)
            if told == self._size:
                sharded_param(param).grad = None
            if read == told:
                default_store().delete_key(key)  # nobody is left to read it
        self._told.clear()

    def _agree(self, params: list[Any]) -> list[int]:
        """Returns by how many ranks each parameter was used. Collective: yes."""
        flags, indices = list[int](), list[int]()
        for param in params:
            index, holders = self._places.get(param, (0, 1))
            indices.append(len(flags) + index)
            flags += [int(param in self._used and index == other) for other in range(holders)]
        # A sum with one summand is rank 0's number, in the collective that is sent anyway.
        number = 0 if dist.get_rank() else self._complete
        self.run.tell("before_agreement", "the agreement on unused parameters")
        *counts, number = self._agreement.total([*flags, number])
        if self._comparing:
            # After a step that was aborted ranks may be a backward apart, and old keys be left.
            self._complete = number + 2
        return [counts[index] for index in indices]

    def aborted(self) -> None:
        """Starts anew. Collective: no."""
        self._left = False
        for heard in (self._used, self._fresh, self._ran, self._told, self._uses):
            heard.clear()
        # Ranks may have heard different answers in that step: all units are compared again.
        self._always = set(self._given)
        self._comparing = True

    @staticmethod
    def _params(groups: Iterable[Any]) -> list[Any]:
        return [param for group in groups for param in trained_params(group)]
