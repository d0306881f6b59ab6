"""Cuts parameters into the shards of thousands of ranks without making every piece."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.fingerprint import fingerprint

__all__ = ["fast_chunking"]

# Private, and the only two names of torch here that are.
_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"
_FUNCTION = "_chunk_with_empty"
_KNOWN = "7259a2aabd6a7329"
"""fingerprint of the function in torch 2.7.0 to 2.15.0"""


class _Chunks(Sequence[Any]):
    """The pieces of a tensor, each made when it is asked for."""

    def __init__(self, tensor: Any, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        rows = self._tensor.size(self._dim)
        size = -(-rows // self._count)
        start = range(self._count)[index] * size
        if start >= rows:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, rows - start))


def _chunk_lazily(original: Any, tensor: Any, num_chunks: int, dim: int) -> Any:
    rows = tensor.size(dim)
    return _Chunks(tensor, num_chunks, dim) if rows else original(tensor, num_chunks, dim)


@contextlib.contextmanager
def fast_chunking() -> Iterator[None]:
    """Makes `fully_shard` cost the same for any number of ranks, for the duration of a block.

    Collective: no. For each parameter torch cuts out the piece of every rank and takes one, and for
    each unit older torch compares every rank with every other to find a process group it was given
    before. Thousands of parameters on a thousand ranks are minutes of that. It is left as it is
    where its source is not the one that was read: private, so it may change.
    """
    groups: dict[Any, Any] = {}
    get_group = DeviceMesh.get_group

    @functools.wraps(get_group)
    def known_group(mesh: Any, mesh_dim: Any = None) -> Any:
        # With the mesh itself in it, so that no other takes its address meanwhile.
        if (id(mesh), mesh_dim) not in groups:
            groups[id(mesh), mesh_dim] = mesh, get_group(mesh, mesh_dim)
        return groups[id(mesh), mesh_dim][1]

    replaced: list[tuple[Any, str, Any]] = [(DeviceMesh, "get_group", known_group)]
    with contextlib.suppress(ImportError, AttributeError):
        owner = importlib.import_module(_MODULE)
        chunks = getattr(owner, _FUNCTION)
        if fingerprint(chunks) == _KNOWN:
            replaced.append((owner, _FUNCTION, functools.partial(_chunk_lazily, chunks)))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for place in replaced:
            setattr(*place)
        yield
    finally:
        for place in originals:
            setattr(*place)
