"""Sends tokens to the ranks of their experts, and the results of local experts back.

[Note: exchange] A rank sorts its pairs of token and expert by the expert, and sends the rows of
each expert to the rank that has it. Ranks first tell each other how many rows come, which the host
reads once for both exchanges. Sorting is stable, so an expert sees its tokens in the order of the
ranks and of their batches. Results come back in the order in which rows were sent, and the sender
multiplies them by the router's weights: their gradient needs no other rank.

Every rank of the group takes part in every exchange of forward and backward, also with no row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from composer_fsdp2.parallel.exchange import exchange_tensor
from composer_fsdp2.parallel.expert.views import show_all_experts
from composer_fsdp2.parallel.form import ExpertForm, ExpertMesh, rows_of, set_form
from composer_fsdp2.parallel.parallelism import DistributedExperts
from composer_fsdp2.ranks import is_fake
from composer_fsdp2.torch_private.tensors import empty_parameter
from composer_fsdp2.torch_private.units import backward_number

__all__ = ["ExpertLayer", "Experts", "Routing", "send_rows"]


# --- Exchanges ---


@dataclass(frozen=True, eq=False)  # no slots: experts hold weak references to it
class Routing:
    """The ranks that the rows of one forward go to. A row is a token for one of its experts."""

    chosen: torch.Tensor
    """experts of each token, (tokens, experts of a token)"""
    counts: torch.Tensor
    """rows for each expert of the group"""
    order: torch.Tensor
    """pairs of token and expert, sorted by the expert"""
    sent: list[int]
    """rows for each rank"""
    received: list[int]
    """rows from each rank"""
    sizes: list[int]
    """rows for each expert of this rank"""
    by_expert: torch.Tensor
    """received rows, sorted by the expert"""

    @classmethod
    @torch.no_grad()
    def agree(
        cls, chosen: torch.Tensor, count: int, group: dist.ProcessGroup, part: slice
    ) -> Routing:
        """Tells the ranks of a group how many rows come to each of their experts.

        Collective: yes, over the group.

        Args:
            chosen: experts of each token on this rank.
            count: experts of the group.
            group: has as many experts on each rank.
            part: the tokens that this rank sends.
        """
        ranks, pairs = group.size(), chosen[part].flatten()
        order = torch.argsort(pairs, stable=True) + part.start * chosen.shape[1]
        mine = torch.zeros(count, dtype=torch.int64, device=chosen.device)
        mine.index_add_(0, pairs, torch.ones_like(pairs))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        if is_fake(group):  # nothing is sent: experts get equally many rows
            share, rest = divmod(pairs.numel(), count)
            sizes = [share + (number < rest) for number in range(count)]
            by_rank = [sizes[at : at + count // ranks] for at in range(0, count, count // ranks)]
            numbers = [by_rank, [by_rank[group.rank()]] * ranks]
        else:  # the one time that the host waits for the device
            numbers = torch.stack((mine, theirs)).view(2, ranks, -1).tolist()
        sent, received = ([sum(rows) for rows in side] for side in numbers)
        local_experts = torch.arange(count // ranks, device=chosen.device).repeat(ranks)
        by_expert = torch.argsort(
            local_experts.repeat_interleave(theirs, output_size=sum(received)), stable=True
        )
        sizes = [sum(rows) for rows in zip(*numbers[1], strict=True)]
        return cls(chosen, mine, order, sent, received, sizes, by_expert)


def send_rows(
    rows: torch.Tensor, routing: Routing, group: dist.ProcessGroup, *, back: bool = False
) -> torch.Tensor:
    """Sends rows to the ranks of their experts, or back to those of their tokens.

    Collective: yes, over the group, in forward and in backward.

    Args:
        rows: (rows, width), sorted by the rank that they go to.
        routing: made in this forward.
        group: ranks that have all experts of the layer between them.
        back: sends results from the experts to the ranks of the tokens.
    """
    # The graph of this forward keeps the routing: see `ExpertLayer.recall`.
    there = functools.partial(_send, routing, group, back)
    return exchange_tensor(rows, there, functools.partial(_send, routing, group, not back))


def _send(
    routing: Routing, group: dist.ProcessGroup, back: bool, rows: torch.Tensor
) -> torch.Tensor:
    row_counts = routing.sent, routing.received
    sent, received = row_counts[::-1] if back else row_counts
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


# --- Layers ---


class ExpertLayer(DistributedExperts):
    """The experts of one layer, to which ranks send their tokens."""

    _routings: Sequence[weakref.ref[Routing]] = ()
    """routings of forwards whose graph lives, which keeps them alive"""

    @property
    def share(self) -> int:
        """Experts of each rank."""
        return self.count // self.mesh.degree

    def made_of(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Returns the outputs of this rank's experts. Collective: no.

        Args:
            rows: (rows, width), sorted by the expert.
            sizes: rows for each expert.
        """
        raise NotImplementedError

    def is_trained(self) -> bool:
        """Says whether an expert of this rank is trained."""
        raise NotImplementedError

    @torch.compiler.disable  # ranks exchange, and the host reads how many rows
    def compute(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns for each token the sum of its experts' outputs, each times its weight.

        Collective: yes, over the ranks that share the experts; see [Note: exchange].

        Args:
            tokens: (tokens, width), of this rank.
            chosen: experts of each token, (tokens, experts of a token).
            weights: weights of these experts, in the shape of `chosen`.
            dtype: dtype of the sum.
        """
        group, tensor = self.mesh.group, self.mesh.tensor
        sent = range(len(tokens))
        if tensor is not None:
            # Each rank sends a part of the tokens, and has a part of their gradients.
            sent = rows_of(len(tokens), tensor.size(), tensor.get_local_rank())
            tokens, weights = (
                DTensor.from_local(value, tensor, [Replicate()], run_check=False).to_local(
                    grad_placements=[Partial()]
                )
                for value in (tokens, weights)
            )
        routing = Routing.agree(chosen, self.count, group, slice(sent.start, sent.stop))
        if torch.is_grad_enabled() and backward_number() < 0:
            self._load = self._load + routing.counts
            alive = [ref for ref in self._routings if ref() is not None]
            self._routings = [*alive, weakref.ref(routing)]
        token = routing.order // chosen.shape[1]
        rows = tokens.index_select(0, token)
        if torch.is_grad_enabled() and not rows.requires_grad and self.is_trained():
            # Backward must come to both exchanges on a rank without a token for its experts too.
            rows.requires_grad_()
        arrived = send_rows(rows, routing, group).index_select(0, routing.by_expert)
        made = self.made_of(arrived, routing.sizes)
        made = made.index_select(0, torch.argsort(routing.by_expert))
        returned = send_rows(made, routing, group, back=True)
        weighted = returned * weights.flatten()[routing.order, None]
        total = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
        total = total.index_add(0, token, weighted.to(dtype))
        if tensor is not None:
            parts = DTensor.from_local(total, tensor, [Partial()], run_check=False)
            total = parts.redistribute(placements=[Replicate()]).to_local()
        return total

    def recall(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns the experts that were chosen in forward, where a block is computed again.

        A router that rounds otherwise the second time would send other rows than those for which
        gradients come. After several forwards the right one is not known. Collective: no.

        Args:
            chosen: experts that the router chooses now, (tokens, experts of a token).
        """
        if backward_number() < 0:
            return chosen
        routings = [routing for ref in self._routings if (routing := ref()) is not None]
        is_certain = len(routings) == 1 and routings[0].chosen.shape == chosen.shape
        return routings[0].chosen if is_certain else chosen


class Experts(ExpertLayer, nn.Module):
    """Replaces a list of experts; has all of them until `drop_remote` is called.

    A plain module, because torch 2.7 takes no kind of list as a unit, with a forward or without:
    https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fully_shard.py#L185

    Args:
        experts: the list of one layer.
        mesh: the ranks that share the experts.
        calls_all: whether the model calls an expert without a token, which then has a gradient of
            zeros; otherwise it has no gradient.
    """

    def __init__(self, experts: nn.ModuleList, mesh: ExpertMesh, *, calls_all: bool) -> None:
        super().__init__()
        self.mesh, self.count = mesh, len(experts)
        self.training = experts.training
        for number, (name, expert) in enumerate(experts.named_children()):
            self.add_module(name, expert)
            for param in expert.parameters():
                set_form(param, ExpertForm(mesh, number // self.share))
        show_all_experts(self)
        self._calls_all = calls_all
        self._all_experts: dict[str, nn.Module] = {}
        """experts by name, while those of other ranks are hidden"""

    @property
    def _local_experts(self) -> list[nn.Module]:
        """The experts of this rank."""
        begin = self.mesh.group_rank * self.share
        return list(self.children())[begin : begin + self.share]

    def drop_remote(self) -> None:
        """Frees the experts of other ranks, and hides them until `show_remote`.

        See [Note: remote experts]. Torch walks all modules below each unit several times while it
        shards, and would find nothing of its own in these.
        """
        local_experts, remote = set(self._local_experts), self.mesh.remote
        alike: dict[Any, DTensor] = {}
        """shape, strides and dtype -> an empty DTensor, whose layout others take"""
        self._all_experts = dict(self.named_children())
        for expert_name, expert in self._all_experts.items():
            if expert in local_experts:
                continue
            for part in expert.modules():
                for name, param in part._parameters.items():
                    if param is not None:
                        key = param.shape, param.stride(), param.dtype
                        if key not in alike:
                            alike[key] = DTensor.from_local(
                                torch.empty(0, dtype=param.dtype, device=remote.device_type),
                                remote,
                                [Shard(0)],
                                run_check=False,
                                shape=param.shape,
                                stride=param.stride(),
                            )
                        part._parameters[name] = empty_parameter(alike[key], param.requires_grad)
            del self._modules[expert_name]

    def show_remote(self) -> None:
        """Puts the experts of other ranks back, in the order of the list."""
        self._modules.update(self._all_experts)
        self._modules.update({name: self._modules.pop(name) for name in self._all_experts})
        self._all_experts = {}

    def made_of(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Calls the unit, which gathers the experts of this rank."""
        made: torch.Tensor = self(rows, sizes)
        return made

    def forward(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Computes the rows of each expert of this rank, one expert after the other.

        Args:
            rows: (rows, width), sorted by the expert.
            sizes: rows for each expert.
        """
        parts = zip(self._local_experts, rows.split(list(sizes)), strict=True)
        made = [expert(part) for expert, part in parts if len(part) or self._calls_all]
        # An empty result that depends on the rows, so that backward passes through the unit. A
        # copy, because a block may add to the result in place.
        return torch.cat(made) if made else rows.clone()

    def is_trained(self) -> bool:
        """Says whether an expert of this rank is trained."""
        return any(
            param.requires_grad for expert in self._local_experts for param in expert.parameters()
        )
