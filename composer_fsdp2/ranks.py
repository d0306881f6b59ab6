"""Exchanges errors and values between ranks: one error on all of them, rank 0's values."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from composer_fsdp2.errors import CheckpointError, ConfigError, PatchError, PlanError

__all__ = [
    "all_gather_tensor",
    "any_rank",
    "broadcast_all_from_rank0",
    "broadcast_from_rank0",
    "installation",
    "is_fake",
    "of_rank0",
    "on_all_ranks",
    "raise_on_all_ranks",
]


Value = TypeVar("Value")


def all_gather_tensor(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gathers equal shards of all ranks into one tensor. Collective: yes, over the group.

    Args:
        output: the shards in the order of the ranks, `(ranks * rows, ...)`.
        shard: of this rank, `(rows, ...)`; the same shape on each rank.
        group: the ranks that hold the shards, in their order.
    """
    # Torch 2.14 warns of the name that older torch has alone.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, shard, group=group)


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the backend only pretends: shapes are right, nothing is sent."""
    return dist.get_backend(group) == "fake"


def raise_on_all_ranks(
    facts: Mapping[str, Any],
    error: BaseException | None = None,
    gather: Callable[[Any], list[Any]] | None = None,
) -> list[Mapping[str, Any]]:
    """Raises one error on every rank when any rank failed or holds other facts.

    Collective: yes, over the default group, or those that `gather` uses.

    Args:
        facts: name -> text. Names that start with `~` are exchanged and may differ, and may be any
            plain value.
        error: what this rank would have raised.
        gather: returns the plain value of each rank, from all ranks. Facts may differ then.

    Returns:
        The facts of every rank; of those that must be equal, a digest of the text.

    Raises:
        ConfigError: `error` of the first rank that had one, of its own type.
        CheckpointError: likewise.
        PatchError: likewise.
        PlanError: likewise, and for a difference.
        Exception: likewise, for an error of any other type, which is a user's or the system's.
    """
    failed = None if error is None else _failure_of(error)
    # Texts are long where a model has many parameters, and every rank would get all of them.
    sent = {
        name: fact if name.startswith("~") else hashlib.sha256(fact.encode()).digest()
        for name, fact in facts.items()
    }
    everyone: list[tuple[_Failure | None, Mapping[str, Any]]] = [(failed, sent)]
    if gather is not None:
        everyone = gather((failed, sent))
    elif dist.is_initialized() and not is_fake() and dist.get_world_size() > 1:
        everyone = [(None, {})] * dist.get_world_size()
        dist.all_gather_object(everyone, (failed, sent))
    _raise_first(everyone, error)
    first = everyone[0][1]
    for rank, (_, theirs) in enumerate(everyone):
        for name in first:
            if not name.startswith("~") and first[name] != theirs.get(name):
                # All ranks are here, because all have the same digests.
                texts = [[facts.get(name, "")] for _ in range(2)]
                for text, source in zip(texts, (0, rank), strict=True):
                    dist.broadcast_object_list(text, source)
                ours, other = (text[0].splitlines() for text in texts)
                lines = difflib.unified_diff(
                    ours, other, "rank 0", f"rank {rank}", lineterm="", n=1
                )
                shown = list(lines)
                more = f"\n... and {len(shown) - 40} more lines" if len(shown) > 40 else ""
                raise PlanError(
                    f"Ranks 0 and {rank} hold a different {name}. They would wait for different "
                    "collectives and hang, or mix gradients of different parameters. Build the "
                    "same model from the same configuration on every rank. The difference:\n"
                    + "\n".join(shown[:40])
                    + more
                )
    return [theirs for _, theirs in everyone]


def on_all_ranks(
    act: Callable[[], Value],
    explain: Callable[[BaseException], BaseException] = lambda error: error,
    gather: Callable[[Any], list[Any]] | None = None,
) -> Value:
    """Calls a function, and raises one error on every rank when it fails on any rank.

    Collective: yes, over the default group, or those that `gather` uses.

    Args:
        act: what this rank does; other ranks may do something else, or nothing.
        explain: returns the error to raise for one of this rank. What it raises ends this rank
            alone: for an error that every rank has.
        gather: collects one object of each rank; over the default group if `None`.

    Returns:
        What this rank's action returns.

    Raises:
        Exception: as `raise_on_all_ranks`.
    """
    result, error = None, None
    try:
        result = act()
    except BaseException as failed:
        from torch.distributed.checkpoint.api import CheckpointException

        # Torch's error of a checkpoint is no Exception.
        if not isinstance(failed, (Exception, CheckpointException)):
            raise
        error = explain(failed)
        if error is not failed:
            error.__cause__ = failed
    raise_on_all_ranks({}, error, gather)
    return result  # pyright: ignore[reportReturnType]


class _Failure(NamedTuple):
    """An error in a form that every rank can read."""

    kind: str
    text: str
    pickled: bytes
    """empty, if it cannot be pickled"""
    where: str


def _failure_of(error: BaseException) -> _Failure:
    pickled = b""
    # Its class may want other arguments than it keeps, or exist on this rank alone.
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        if str(pickle.loads(pickled)) != str(error):
            pickled = b""
    where = ""
    for last in traceback.extract_tb(error.__traceback__)[-1:]:
        where = f"{last.filename}:{last.lineno} in {last.name}: {last.line}"
    return _Failure(type(error).__name__, str(error), pickled, where)


_OWN = {kind.__name__: kind for kind in (CheckpointError, ConfigError, PatchError, PlanError)}


def _raise_first(
    everyone: list[tuple[_Failure | None, Mapping[str, Any]]], error: BaseException | None
) -> None:
    failures = [(rank, failed) for rank, (failed, _) in enumerate(everyone) if failed is not None]
    if not failures:
        return
    rank, failed = failures[0]
    if failed.kind in _OWN:
        where = "" if len(failures) == len(everyone) else f"On rank {rank}: "
        raise _OWN[failed.kind](where + failed.text) from error
    raised: BaseException = PlanError(f"{failed.kind}: {failed.text}")
    if error is not None and (type(error).__name__, str(error)) == (failed.kind, failed.text):
        raised = error
    else:
        with contextlib.suppress(Exception):
            raised = pickle.loads(failed.pickled)
    if hasattr(raised, "add_note"):  # since Python 3.11
        raised.add_note(f"Raised on rank {rank}, at {failed.where}")  # pyright: ignore
    raise raised


_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "FSDP_VERSION",
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""of the environment: ranks with other values compute other numbers, or wait for each other"""


def installation(packages: Iterable[str]) -> dict[str, str]:
    """Returns the facts, besides the model, that must be the same on all ranks of a run."""
    variables = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    return {
        "set of packages": _versions(tuple(packages), tuple(sys.path)),
        "environment": "\n".join(variables),
    }


@functools.cache
def _versions(packages: tuple[str, ...], path: tuple[str, ...]) -> str:
    """Reads versions along `path`, which is Python's, once: each takes milliseconds."""
    versions = [f"Python {platform.python_version()}"]
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join(versions)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank. Collective: yes, over the default group.

    For setup, before a run has an `Agreement`, and where a device may wait; in a step take
    `step.agreement.Agreement.any_rank`, which no device waits for.
    """
    if dist.get_world_size() == 1:
        return flag
    any_flag = torch.tensor([int(flag)], device=device)
    dist.all_reduce(any_flag, op=dist.ReduceOp.MAX)
    return bool(any_flag.item())


def of_rank0(value: Any) -> Any:
    """Returns rank 0's plain value. Collective: yes, over the default group.

    For setup and checkpoints; in a step take `step.agreement.Agreement.of_rank0`.
    """
    holder = [value]
    if dist.is_initialized() and not is_fake() and dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    return holder[0]


@torch.no_grad()
def broadcast_from_rank0(tensor: torch.Tensor, device: torch.device) -> None:
    """Overwrites a tensor with rank 0's values.

    Collective: yes, over the default group. Any dtype: bytes are sent, because backends do not
    know all of them. A tensor elsewhere than on `device` travels through it.
    """
    if dist.get_world_size() == 1 or tensor.numel() == 0:
        return
    flat = tensor.detach().to(device).contiguous().view(-1)
    dist.broadcast(flat.view(torch.uint8), src=0)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


_BUCKET_BYTES = 2**26
"""of tensors that are broadcast together"""


@torch.no_grad()
def broadcast_all_from_rank0(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Overwrites tensors with rank 0's values, small ones together. The bits are rank 0's.

    Collective: yes, over the default group. The same shapes and dtypes in the same order on every
    rank. See `broadcast_from_rank0`.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if size + tensor.nbytes > _BUCKET_BYTES:
            _broadcast_bucket(bucket, device)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    _broadcast_bucket(bucket, device)


def _broadcast_bucket(bucket: Sequence[torch.Tensor], device: torch.device) -> None:
    bucket = [tensor for tensor in bucket if tensor.numel()]
    if len(bucket) < 2 or dist.get_world_size() == 1:
        for tensor in bucket:
            broadcast_from_rank0(tensor, device)
        return
    parts = [
        tensor.detach().to(device).contiguous().view(-1).view(torch.uint8) for tensor in bucket
    ]
    together = torch.cat(parts)
    dist.broadcast(together, src=0)
    if dist.get_rank() == 0:
        return
    for tensor, part in zip(bucket, together.split([part.numel() for part in parts]), strict=True):
        # A copy, because a tensor of a larger dtype begins at a multiple of its size.
        tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))
