"""Runs training on tensors without memory, in one process that is one of any number of ranks.

[Note: known values] A fake tensor has a shape and no values, and models ask for some values:
whether a mask is full, how often an optimizer has stepped. So small tensors that follow from known
data, such as ones or positions, are computed beside the fake tensors. Values that follow from
weights or activations are not known: reading them raises `UntraceableError`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Older torch has fake collectives only after this import.
import torch.distributed._tools.fake_collectives  # pyright: ignore[reportUnusedImport]
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["UntraceableError", "Watch", "fake_group_named", "fake_ranks", "gpu_autocast"]

_DEVICE: Any = torch.ops.prim.device.default  # pyright: ignore
_aten: Any = torch.ops.aten
_FREQUENT = {
    *(_aten.detach, _aten.view, _aten._unsafe_view, _aten.t, _aten.transpose, _aten.as_strided),
    *(_aten.select, _aten.slice, _aten.squeeze, _aten.unsqueeze, _aten.clone, _aten.copy_),
    *(_aten.empty_like, _aten.zeros_like, _aten.new_zeros, _aten.mm, _aten.silu, _aten.sqrt),
    *(_aten.add, _aten.add_, _aten.mul, _aten.mul_, _aten.div, _aten.addcmul_, _aten.addcdiv_),
    *(_aten.index, _aten.index_select, _aten.index_add_, _aten.index_put),
}
"""operators whose result has the device of their arguments, and a shape that follows from shapes"""
_CHOOSE_MEMORY = {"device", "out"}
"""keyword arguments that choose the memory of a result"""
_MASKS = {torch.bool, torch.uint8}
"""dtypes of an index whose values decide how many elements a result has"""
_KNOWN_ELEMENTS = 2**20
"""larger tensors have no known values"""
_NO_VALUES = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty}
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
"""namespaces of operators that communicate"""
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # torch counts it on GPUs alone.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **_: sdpa_flop_count(
        *(tensor.shape for tensor in args[:3])
    ),
}

_IN_FP32 = (
    *("softmax.int", "log_softmax.int", "layer_norm", "group_norm", "softplus", "exp", "log"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "rsqrt", "reciprocal", "cumsum"),
    *("sum", "sum.dim_IntList", "prod", "prod.dim_int", "norm.Scalar", "norm.ScalarOpt_dim"),
    *("nll_loss", "kl_div", "binary_cross_entropy_with_logits", "cosine_similarity"),
)
"""operators that autocast computes in fp32 on GPUs, and not on CPUs"""
_KERNELS_WITH_COPY = {torch.ops.aten._softmax_backward_data}
"""operators whose kernel on GPUs makes a tensor like their first argument, and frees it (`tmp` in
`softmax_backward_cuda_out`)"""


class UntraceableError(Exception):
    """Says which value a model or an optimizer reads that fake tensors do not have."""


@contextlib.contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Generator[FakeTensorMode]:
    """Makes this process one of a group that sends nothing. Collective: no.

    Yields a mode in which new tensors have no memory.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with _no_other_meshes(), _one_chunk(), _quick_groups():
            yield _Mode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


class _Mode(FakeTensorMode):
    """Runs the kernels of frequent operators at once.

    torch's own dispatch checks each operator against a dozen rules, which takes some 0.2 ms. The
    trace of a mixture of experts calls hundreds of thousands of operators.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(func, args, kwargs or {}, _tensors_in(args))
        return super().dispatch(func, types, args, kwargs or {}) if result is None else result

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """Returns the result of a frequent operator; `None` for others.

        Args:
            func: overload of the operator.
            args: positional arguments of the operator.
            kwargs: keyword arguments of the operator.
            tensors: the tensors among `args`, also in lists.
        """
        if func.overloadpacket not in _FREQUENT or not kwargs.keys().isdisjoint(_CHOOSE_MEMORY):
            return None
        for tensor in tensors:
            is_own = type(tensor) is FakeTensor and tensor.fake_mode is self
            if not is_own or tensor.constant is not None or tensor.dtype in _MASKS:
                return None
            if tensor.fake_device != tensors[0].fake_device:
                return None
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        return (
            args[0] if func._schema.is_mutable else FakeTensor(self, made, tensors[0].fake_device)
        )


@contextlib.contextmanager
def _no_other_meshes() -> Generator[None]:
    """Keeps torch from taking a mesh for an equal one, whose groups are gone.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/device_mesh.py#L84
    """
    resources: Any = getattr(device_mesh, "_mesh_resources", SimpleNamespace())  # of older torch
    before = dict(vars(resources))
    vars(resources).update(vars(type(resources)()))
    _forget_layouts()
    try:
        yield
    finally:
        vars(resources).update(before)
        _forget_layouts()


def _forget_layouts() -> None:
    """Empties DTensor's caches, whose results hold the mesh of their first call."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    # Of newer torch.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


@contextlib.contextmanager
def _one_chunk() -> Generator[None]:
    """Has `fully_shard` cut out the shard of this rank alone, and not those of all ranks.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param.py#L372
    """
    owner: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    original = owner._chunk_with_empty
    owner._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        owner._chunk_with_empty = original


@contextlib.contextmanager
def _quick_groups() -> Generator[None]:
    """Has a mesh find the process group of an axis in time linear in its ranks.

    `fully_shard` looks up the group of each unit, and older torch compares each rank of the axis
    with all ranks of the group: 1.4 seconds a unit over 16,384 ranks.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/distributed_c10d.py#L5390
    """
    owner: Any = device_mesh
    name = "_find_pg_by_ranks_and_tag"
    original = getattr(owner, name, None)
    if original is not None:  # newer torch finds a group by its name
        setattr(owner, name, _group_of_ranks)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, name, original)


def _group_of_ranks(tag: str, ranks: list[int]) -> dist.ProcessGroup | None:
    if tag and not tag.startswith(("ptd:", "user:")):
        tag = f"user:{tag}"
    for group in dist.distributed_c10d._world.tags_to_pg.get(tag, []):
        if group.size() == len(ranks) and set(dist.get_process_group_ranks(group)) == set(ranks):
            return group
    return None


class _Chunks:
    """The chunks of a tensor, each cut when it is indexed."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._step = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, number: int) -> torch.Tensor:
        start, size = number * self._step, self._tensor.size(self._dim)
        if start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._step, size - start))


@contextlib.contextmanager
def gpu_autocast() -> Generator[None]:
    """Has autocast on the CPU compute operators in fp32 that autocast on GPUs computes in fp32.

    This holds for the whole process, in backward and in recomputation as well.

    Source: https://github.com/pytorch/pytorch/blob/v2.7.0/aten/src/ATen/autocast_mode.h#L820
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    for name in _IN_FP32:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            library.impl(name, functools.partial(_wide, name))
    try:
        yield
    finally:
        library._destroy()


def _wide(name: str, *args: Any, **kwargs: Any) -> Any:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        half = torch.bfloat16, torch.float16
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.float() if tensor.dtype in half else tensor,
            (args, kwargs),
        )
    once = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(once):
        return operator(*args, **kwargs)


def fake_group_named(name: str) -> dist.ProcessGroup:
    """Returns the group that a functional collective names."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


class Watch(TorchDispatchMode):
    """Sees every operation: its memory, its FLOPs and, if it is a collective, its arguments.

    Args:
        heard: is called with the name, arguments and result of each collective, and returns the
            tensors that gloo copies.
        mode: of fake tensors, whose known values are computed; `None` for real tensors.
        on_gpus: counts the memory that kernels of GPUs take and free, and no copies of gloo.
    """

    def __init__(
        self,
        heard: Callable[[str, Any, Any], list[torch.Tensor]],
        mode: FakeTensorMode | None = None,
        *,
        on_gpus: bool = False,
    ) -> None:
        super().__init__()
        self._heard, self._on_gpus = heard, on_gpus
        self.kind = "other"
        """kind of storages that are made from now on"""
        self.now: Counter[str] = Counter()
        """bytes by kind"""
        self.total = 0
        self.peak, self.peak_kinds = 0, dict[str, int]()
        self.flops = 0
        self.balanced = False
        """whether experts were taken to get the same number of tokens"""
        self._storages: dict[int, tuple[Any, int, str]] = {}
        self._values: Any = WeakIdKeyDictionary()
        self._mode: Any = mode

    def __enter__(self) -> Watch:
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            # FSDP2 frees and fills the memory of gathered parameters so, which is no operation.
            self.note(storage, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        self._undo = original
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self._undo

    # --- Memory. ---

    def note(self, storage: torch.UntypedStorage, kind: str | None = None) -> None:
        """Counts a storage with its size and kind, which may be new."""
        key, size = storage._cdata, storage.nbytes()
        reference, before, old_kind = self._storages.get(key, (None, 0, kind or self.kind))
        kind = kind or old_kind
        self.now[old_kind] -= before
        if reference is None:

            def drop(_: object) -> None:
                _, size, kind = self._storages.pop(key)
                self.now[kind] -= size
                self.total -= size

            reference = weakref.ref(storage, drop)
        self._storages[key] = reference, size, kind
        self.now[kind] += size
        self.total += size - before
        if self.total > self.peak:
            self.peak, self.peak_kinds = self.total, dict(self.now)

    def begin_peak(self) -> None:
        """Measures the peak from here on."""
        self.peak, self.peak_kinds = self.total, dict(self.now)

    # --- Operations. ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch asks for devices more often than it runs operators
        if DTensor in types:  # DTensor calls the operator again, with local tensors
            return NotImplemented
        kwargs = kwargs or {}
        tensors = _tensors_in((*args, *kwargs.values()))
        try:
            result = None if self._mode is None else self._mode.run(func, args, kwargs, tensors)
            if result is None:
                result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            result = self._unknown(func, args, kwargs, tensors, error)
        made = _tensors_in((result,))
        self._note_made(made)
        packet = func.overloadpacket
        if self._on_gpus and packet in _KERNELS_WITH_COPY:
            self._note_made([torch.empty_like(tensors[0])])
        if func.namespace in _NAMESPACES:
            copied = self._heard(packet.__name__, args, result)
            self._note_made([torch.empty_like(t) for t in copied if not self._on_gpus])
            if packet.__name__ != "allreduce_":  # of equal ranks it changes no maximum
                self._forget(tensors)
            return result
        if packet in _FLOPS and any(map(self._is_own, tensors)):
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)
        if self._mode is not None and made:
            self._follow(func, args, kwargs, tensors, made, result)
        return result

    def _note_made(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._is_own(tensor) and not _is_on_meta(tensor):
                self.note(tensor.untyped_storage())

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Says whether a tensor is of the run: DTensor computes shapes with others."""
        return getattr(tensor, "fake_mode", None) is self._mode

    # --- See [Note: known values]. ---

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and _is_small(tensor):
            return tensor
        return self._values.get(tensor)

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._values.pop(tensor, None)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def _follow(
        self, func: Any, args: Any, kwargs: Any, tensors: Any, made: list[torch.Tensor], result: Any
    ) -> None:
        """Computes the values of a result, if those of all arguments are known."""
        if not all(map(_is_small, made)) or func.overloadpacket in _NO_VALUES:
            return
        if func.overloadpacket is torch.ops.aten.rand and made[0].numel() == 1:
            # Models that drop layers draw a number for each: none is dropped above their rate.
            with unset_fake_temporarily():
                self._values[made[0]] = torch.full(made[0].shape, 0.5)
            return
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or any(self._value(tensor) is None for tensor in tensors):
            if func._schema.is_mutable:
                self._forget(made)
            return
        values = tree_leaves(self._compute(func, args, kwargs))
        for tensor, value in zip(tree_leaves(result), values, strict=True):
            if isinstance(tensor, FakeTensor) and tensor not in self._values:
                self._values[tensor] = value

    def _unknown(self, func: Any, args: Any, kwargs: Any, tensors: Any, error: Exception) -> Any:
        """Returns the result of an operation whose shape or number depends on values."""
        if all(self._value(tensor) is not None for tensor in tensors):
            value = self._compute(func, args, kwargs)
            if not isinstance(value, torch.Tensor):
                return value
            fake = self._mode.from_tensor(value)
            self._values[fake] = value
            return fake
        if func.overloadpacket is torch.ops.aten.nonzero:
            # A mask of the tokens of one expert is a part of the mask of all experts.
            mask = args[0]
            all_elements = mask.untyped_storage().nbytes() // mask.itemsize
            rows = math.ceil(mask.numel() ** 2 / all_elements)
            self.balanced = True
            return mask.new_empty((rows, mask.dim()), dtype=torch.int64)
        raise UntraceableError(f"{func} reads values of a {tuple(tensors[0].shape)}") from error


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns tensors among arguments or results of an operator, and in lists of them."""
    # torch's `tree_leaves` takes five times as long, twice for each operator.
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors_in(value)
    return tensors


def _is_on_meta(tensor: torch.Tensor) -> bool:
    # `device` of a fake tensor goes through the modes.
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type == "meta"


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _KNOWN_ELEMENTS and not _is_on_meta(tensor)
