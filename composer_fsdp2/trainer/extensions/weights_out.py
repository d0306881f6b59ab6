"""Weights of a model that is training, as a Hugging Face folder names them, without a folder.

[Note: weights out] An inference engine beside a run wants what `save_pretrained` writes: names
without those of wrappers, rows in the model's order, all experts, adapters merged. A summoned model
has all that at once, in memory that a large model leaves on no rank. Here the names, shapes and
dtypes are computed from meta tensors, and then a bucket at a time is gathered, converted and handed
out. A bucket is filled until the next weight would exceed its size.

[Note: conversions in parts] transformers 5 keeps weights in another form than files have: experts
in one tensor, for example. Its conversion back is written for a whole state dict. A weight that
alone gives the same names and shapes as beside all others is converted alone; where it does not,
with the weights of its module, or of a module around it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from composer.utils import dist
from torch import nn

from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.plan.module_tree import without_wrappers
from composer_fsdp2.shard.units import reshard
from composer_fsdp2.text import listed, plain_name
from composer_fsdp2.torch_private.tensors import non_persistent_buffers

__all__ = ["ModelWeights", "WeightInfo"]

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

_PEFT = "base_model.model."
"""what PEFT puts before the names of the model inside"""


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Says what a weight will be, before anything is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of the whole weight."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ModelWeights:
    """Iterates over a model's weights as `save_pretrained` names them; see [Note: weights out].

    It may be iterated any number of times, between steps and between the microbatches of a batch,
    and has the two channels of vLLM's `WeightSource`: `metadata()`, and iteration. Names, dtypes
    and shapes are those of the moment when it is made, and the same on every rank.

    Iterating is collective: every rank runs through the whole iteration. Beside its shards a rank
    holds one bucket, other ranks than 0 one weight.

    Args:
        model: prepared with `prepare_fully_shard` or by the Trainer, or not sharded at all.
        dtype: of all floating point weights; `None` keeps that of the parameters.
        bucket_bytes: weights that are held at a time. A larger weight is a bucket alone.
        tied: yields a tied weight under each of its names. Otherwise under its first.
        adapters: "merged" adds adapters of PEFT to the weights below them, "only" yields the
            adapters alone, as PEFT names them. Means nothing for other models.
        every_rank: whether every rank gets the weights. Otherwise rank 0 does, and the iteration
            is empty on the others, which have to run through it nonetheless.

    Raises:
        PlanError: adapters that cannot be merged, or there are none; another word for `adapters`.

    Example:
        >>> import torch
        >>> from composer_fsdp2 import ModelWeights, prepare_fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> _ = prepare_fully_shard(model, None, {}, device="cpu")
        >>> weights = ModelWeights(model, dtype=torch.bfloat16)
        >>> weights.metadata()[0]
        WeightInfo(name='0.weight', dtype=torch.bfloat16, shape=(8, 4))
        >>> [(name, list(tensor.shape)) for name, tensor in weights][:2]
        [('0.weight', [8, 4]), ('0.bias', [8])]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 2**28,
        tied: bool = False,
        adapters: Literal["merged", "only"] = "merged",
        every_rank: bool = False,
    ) -> None:
        if adapters not in ("merged", "only"):
            raise PlanError(
                f"adapters={adapters!r} is neither 'merged' nor 'only'. Adapters would be "
                "handed out beside weights without them. Write one of the two."
            )
        self._model, self._bucket_bytes = model, bucket_bytes
        self._has_values = every_rank or dist.get_global_rank() == 0
        reshard(model)  # gathered parameters are other objects
        params = set(model.parameters())
        # The outermost Hugging Face model that has all parameters, else the model itself.
        exported: Any = next(
            (
                module
                for module in model.modules()
                if hasattr(module, "save_pretrained") and set(module.parameters()) == params
            ),
            model,
        )
        peft = hasattr(exported, "peft_config")
        merged, tied = peft and adapters == "merged", tied or adapters == "only"
        parts = list(_parts(exported, dtype, tied=tied, merged=merged))
        if adapters == "only":
            parts = _adapters(exported, parts)
        elif peft:
            outside = [name for part in parts for name in part.metas if not name.startswith(_PEFT)]
            if outside:
                raise PlanError(
                    f"{listed(outside)} belong to adapters that stay outside of the model's "
                    "weights (prompts, for example). They cannot be merged, and without them the "
                    "engine would compute something else. Write a folder with save_pretrained, "
                    "which has them."
                )
            parts = [_renamed(part, lambda name: name.removeprefix(_PEFT)) for part in parts]
            exported = exported.get_base_model()
        # What turns weights of a model into those of its files, where transformers does.
        self._convert: Callable[[Tensors], Tensors] | None = None
        if adapters != "only":
            with contextlib.suppress(ImportError):  # before 5, models are built as their files are
                loading: Any = importlib.import_module("transformers.core_model_loading")
                if hasattr(exported, "save_pretrained"):
                    self._convert = functools.partial(loading.revert_weight_conversion, exported)
        self._groups = _in_groups(parts, self._convert)

    def metadata(self) -> list[WeightInfo]:
        """Returns what an iteration yields, in its order. Collective: no."""
        return [info for group in self._groups for info in group.infos]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and whole weights, one after the other. Collective: yes, see the class."""
        for bucket in self.buckets():
            while bucket:
                yield bucket.pop(0)

    @torch.no_grad()
    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yields lists of names and whole weights. Collective: yes, over all ranks.

        A tensor may share memory with the model where nothing is sharded: copy it to keep it.
        """
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for group in self._groups:
            group_bytes = sum(info.size_bytes for info in group.infos)
            if bucket and size + group_bytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            if not bucket:
                reshard(self._model)  # what ran since the last bucket may have left units gathered
            tensors = self._gathered(group)
            if self._has_values:
                bucket += [(info.name, tensors[info.name].contiguous()) for info in group.infos]
                size += group_bytes
        if bucket:
            yield bucket

    def _gathered(self, group: _Group) -> Tensors:
        values: Tensors = {}
        for part in group.parts:
            read = part.read()
            values |= read if self._has_values else {}
        return self._convert(values) if self._convert is not None and values else values


@dataclass(frozen=True, slots=True)
class _Part:
    """Weights that are gathered together: one parameter, or a layer with an adapter."""

    metas: Tensors
    """by name in the model, on meta, in the dtype they will have"""
    read: Callable[[], Tensors]
    """returns them on every rank; collective"""


@dataclass(frozen=True, slots=True)
class _Group:
    """Weights that are converted together; see [Note: conversions in parts]."""

    parts: Sequence[_Part]
    infos: Sequence[WeightInfo]


# --- Parts ---


def _parts(
    model: nn.Module, dtype: torch.dtype | None, *, tied: bool, merged: bool
) -> Iterator[_Part]:
    """Yields the parts of a model in the order of its state dict. Collective: no."""
    seen: set[int] = set()
    inside: list[str] = []
    quantized: list[str] = []
    module: Any
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = plain_name(path) + "." if plain_name(path) else ""
        if inside and path.startswith(f"{inside[-1]}."):
            continue
        if merged and hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            inside.append(path)
            yield _merged_part(prefix, module, dtype)
            continue
        if merged and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            inside.append(path)
            chosen = module.modules_to_save[next(iter(module.active_adapters))]
            for part in _parts(chosen, dtype, tied=tied, merged=False):
                yield _renamed(part, lambda name, prefix=prefix: prefix + name)
            continue
        buffers = module._buffers.keys() - non_persistent_buffers(module)
        for name in (*module._parameters, *(name for name in module._buffers if name in buffers)):
            tensor = getattr(module, name)
            if tensor is None or (id(tensor) in seen and not tied):
                continue
            seen.add(id(tensor))
            is_int = name in module._parameters and not tensor.is_floating_point()
            if is_int and _packing(module, name) is None:
                quantized.append(prefix + name)
                continue
            yield _single_part(prefix + name, module, name, dtype)
    if quantized:
        log.warning(
            "%s: weights that are quantized are left out, because no other program reads them by "
            "their names. Give the engine the folder of the base model.",
            listed(quantized),
        )


def _single_part(key: str, module: nn.Module, name: str, dtype: torch.dtype | None) -> _Part:
    def read() -> Tensors:
        tensor = getattr(module, name).detach()
        form = form_of(getattr(module, name))
        # Cast before it is sent. Nobody asks a remote expert's empty shard.
        full = form.full(tensor if form.is_remote or is_packed else _cast(tensor, dtype))
        assert full is not None
        return {key: _cast(_unpacked(module, name, full), dtype)}

    is_packed = _packing(module, name) is not None
    return _Part({key: _meta(module, name, dtype)}, read)


def _packing(module: nn.Module, name: str) -> Any:
    """Returns how bitsandbytes packed a weight in 4 bits, else `None`."""
    return getattr(module, "quant_state", None) if name == "weight" else None


def _unpacked(module: nn.Module, name: str, full: torch.Tensor) -> torch.Tensor:
    """Returns a weight with the elements that the layer computes with."""
    if (quant_state := _packing(module, name)) is None:
        return full
    return importlib.import_module("bitsandbytes.functional").dequantize_4bit(full, quant_state)


def _merged_part(prefix: str, layer: Any, dtype: torch.dtype | None) -> _Part:
    """Returns the weights below an adapter, with what the adapter adds.

    Raises:
        PlanError: as `_refuse_unmergeable`.
    """
    base = layer.get_base_layer()
    slots = [
        (module, name)
        for module in layer.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    # Adapters of two parameters of one module stand around each other.
    layers = [module for module in layer.modules() if hasattr(module, "get_base_layer")]
    layers = [module for module in layers if module.get_base_layer() is base]
    _refuse_unmergeable(prefix, layer)

    def read() -> Tensors:
        sharded = [module._parameters[name] for module, name in slots]
        unmerged = [part for part in layers if not part.merged and not part.disable_adapters]
        try:
            for module, name in slots:
                param = module._parameters[name]
                full = form_of(param).full(param.detach())
                assert full is not None
                # Merging writes into it, and it may be the parameter itself.
                values = _unpacked(module, name, full.clone())
                module._parameters[name] = nn.Parameter(values, param.requires_grad)
            for part in unmerged:
                weight = part.get_base_layer()
                if _packing(weight, "weight") is None:
                    part.merge()
                    continue
                for adapter in part.active_adapters:  # PEFT would pack the sum again
                    if adapter in part.lora_A:
                        weight.weight.add_(part.get_delta_weight(adapter))
            return {
                f"{prefix}{name}": _cast(param.detach(), dtype)
                for name, param in layer.get_base_layer()._parameters.items()
                if param is not None
            }
        finally:
            if layer.get_base_layer() is not base:  # tuned norms change places with the base's
                layer.unmerge()
            for (module, name), param in zip(slots, sharded, strict=True):
                module._parameters[name] = param
            for part in unmerged:
                part.merged_adapters.clear()

    metas = {
        f"{prefix}{name}": _meta(base, name, dtype)
        for name, param in base._parameters.items()
        if param is not None
    }
    return _Part(metas, read)


def _refuse_unmergeable(prefix: str, layer: Any) -> None:
    """Refuses what PEFT would round, and rows of an embedding.

    Raises:
        PlanError: the weight is of integers, or packed below an adapter that is not of LoRA alone;
            rows of it are trained alone.
    """
    base = layer.get_base_layer()
    if prefix.endswith(".token_adapter."):
        raise PlanError(
            f"'{prefix}weight' has rows that are trained alone (trainable_token_indices). They are "
            "not merged here, and without them the engine would compute something else than the "
            "run. Write adapters='only'."
        )
    for name, param in base._parameters.items():
        is_int = param is not None and not param.is_floating_point()
        if is_int and _packing(base, name) is None:
            raise PlanError(
                f"'{prefix}{name}' is quantized. Adapters that are merged into it would be rounded "
                "to it, and the engine would compute something else than the run. Write "
                "adapters='only', and give the engine the base model's folder."
            )
    if _packing(base, "weight") is None:
        return
    variants = [*getattr(layer, "lora_variant", ())] + [a for a, b in layer.lora_bias.items() if b]
    if variants or not hasattr(layer, "get_delta_weight"):
        raise PlanError(
            f"The adapter of '{prefix}weight' adds more than a product of two matrices (DoRA, "
            "lora_bias or another kind), and the weight is packed in 4 bits. PEFT merges such an "
            "adapter into a weight that it packs again. Write adapters='only'."
        )


def _meta(module: nn.Module, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    tensor, quant_state = getattr(module, name), _packing(module, name)
    shape = quant_state.shape if quant_state else form_of(tensor).model_shape(tensor.shape)
    stored_dtype = quant_state.dtype if quant_state else tensor.dtype
    kept = dtype is None or not stored_dtype.is_floating_point
    return torch.empty(shape, dtype=stored_dtype if kept else dtype, device="meta")


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _renamed(part: _Part, rename: Callable[[str], str]) -> _Part:
    def read() -> Tensors:
        return {rename(name): tensor for name, tensor in part.read().items()}

    return _Part({rename(name): meta for name, meta in part.metas.items()}, read)


# --- Names ---


def _adapters(model: Any, parts: Sequence[_Part]) -> list[_Part]:
    """Returns the parts that PEFT saves, under its names."""
    if not hasattr(model, "peft_config"):
        raise PlanError(
            "adapters='only' was asked of a model without adapters of PEFT. Nothing would be "
            "handed out. Leave it out."
        )
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise PlanError(
            "PEFT computes prompts when it saves: they are no parameters of the model that could "
            "be handed out. Write a folder with save_pretrained."
        )
    from peft import get_peft_model_state_dict

    metas = {name: meta for part in parts for name, meta in part.metas.items()}
    saved: Tensors
    with without_wrappers(model):
        saved = get_peft_model_state_dict(model, state_dict=metas)
    name_of = {id(meta): name for name, meta in saved.items()}
    new = {name: name_of[id(meta)] for name, meta in metas.items() if id(meta) in name_of}
    return [_renamed(part, new.__getitem__) for part in parts if part.metas.keys() & new.keys()]


def _in_groups(
    parts: Sequence[_Part], convert: Callable[[Tensors], Tensors] | None
) -> list[_Group]:
    """Returns the parts that are converted together; see [Note: conversions in parts]."""
    all_outputs = _outputs(parts, convert)
    assert all_outputs is not None
    if all_outputs == _outputs(parts, None):
        return [_Group([part], _infos(part.metas)) for part in parts]
    groups: dict[int, _Group] = {}
    order = {id(part): index for index, part in enumerate(parts)}
    waiting, depth = list(parts), 0
    while waiting:
        together: dict[str, list[_Part]] = defaultdict(list)
        for part in waiting:
            # By the name itself, then by the path of its module, then by those around it.
            name = next(iter(part.metas))
            around = name.rsplit(".", depth)[0] if depth <= name.count(".") else ""
            together[around].append(part)
        waiting = []
        for prefix, members in together.items():
            outputs = _outputs(members, convert)
            if outputs is not None and outputs.items() <= all_outputs.items():
                groups[order[id(members[0])]] = _Group(members, list(outputs.values()))
            elif not prefix:
                raise PlanError(
                    f"transformers does not convert {listed(sorted(all_outputs))} back into what "
                    "its files have. An engine would miss weights. Write a folder with "
                    "save_pretrained (save_original_format=False), or take another version of "
                    "transformers."
                )
            else:
                waiting += members
        depth += 1
    return [groups[index] for index in sorted(groups)]


def _outputs(
    parts: Sequence[_Part], convert: Callable[[Tensors], Tensors] | None
) -> dict[str, WeightInfo] | None:
    """Returns what parts become, by name; `None` where they cannot be converted without others."""
    metas = {name: meta for part in parts for name, meta in part.metas.items()}
    if convert is not None:
        try:
            metas = convert(metas)
        except Exception:  # the conversions of a model raise anything where a weight is missing
            return None
    return {info.name: info for info in _infos(metas)}


def _infos(metas: Mapping[str, torch.Tensor]) -> list[WeightInfo]:
    return [WeightInfo(name, meta.dtype, tuple(meta.shape)) for name, meta in metas.items()]
