"""Rows of Composer's algorithms; each belongs to the algorithm it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer_fsdp2.trainer.patches.engine import Feature, PatchPoint, asked_by_class, imported

__all__ = ["ALGORITHM_ROWS"]

_VERSIONS = "mosaicml 0.32.1"
_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer/algorithms"
_PACKAGE = "composer.algorithms"
_OURS = "composer_fsdp2.trainer.algorithms"

_CLIPPING = Feature(
    "GradientClipping with clipping_type adaptive",
    "Write clipping_type: norm.",
    asked_by_class(
        f"{_PACKAGE}.gradient_clipping.gradient_clipping:GradientClipping",
        when=lambda algorithm: algorithm.clipping_type == "adaptive",
    ),
)


def _feature(name: str, module: str) -> Feature:
    return Feature(
        name,
        f"Leave {name} out of the Trainer's algorithms.",
        asked_by_class(f"{_PACKAGE}.{module}:{name}"),
    )


_FREEZING = _feature("LayerFreezing", "layer_freezing.layer_freezing")
_EMA = _feature("EMA", "ema.ema")
_SWA = _feature("SWA", "swa.swa")
_SAM = _feature("SAM", "sam.sam")


def _row(
    feature: Feature,
    target: str,
    replacement: str,
    fingerprint: str,
    why: str,
    lines: str,
    source: str = "",
) -> PatchPoint:
    call: Callable[..., Any] = imported(_OURS, replacement)
    return PatchPoint(
        target=f"{_PACKAGE}.{target}",
        replacement=call,
        feature=feature,
        why=why,
        upstream=f"{_UPSTREAM}/{lines}",
        fingerprints=frozenset({fingerprint}),
        versions=_VERSIONS,
        source=source,
    )


ALGORITHM_ROWS: tuple[PatchPoint, ...] = (
    _row(
        _CLIPPING,
        "gradient_clipping.gradient_clipping:_apply_agc",
        "clip_adaptively",
        "4aa29feaede39e77",
        "takes a shard's norm for the whole",
        "gradient_clipping/gradient_clipping.py#L66",
    ),
    _row(
        _CLIPPING,
        "gradient_clipping.gradient_clipping:apply_gradient_clipping",
        "clip_gradients",
        "b4014cc6206ef761",
        "clips through one DTensor operation after the other",
        "gradient_clipping/gradient_clipping.py#L23",
    ),
    _row(
        _SAM,
        "sam.sam:SAMOptimizer._grad_norm",
        "ascent_norm",
        "5f86e331bebb39d7",
        "reduces the norm of each gradient by itself",
        "sam/sam.py#L110",
    ),
    _row(
        _FREEZING,
        "layer_freezing.layer_freezing:freeze_layers",
        "freeze_layers",
        "f8f689f2f0d508a8",
        "freezes shards, while gradients of the gathered parameters go on",
        "layer_freezing/layer_freezing.py#L25",
    ),
    _row(
        _EMA,
        "ema.ema:get_model_context_manager",
        "weights_of",
        "b111ec835b312782",
        "mixes shards with parameters that evaluation left gathered",
        "ema/ema.py#L87",
    ),
    _row(
        _EMA,
        "ema.ema:EMAParameters.__init__",
        "start_averages",
        "ccdfecc4a7728427",
        "forgets in which order tensor parallelism holds fused projections",
        "ema/ema.py#L401",
    ),
    _row(
        _EMA,
        "ema.ema:EMA.state_dict",
        "save_ema",
        "a6f400a9bab424a6",
        "saves names with the wrappers of activation checkpointing in them",
        "ema/ema.py#L307",
    ),
    _row(
        _EMA,
        "ema.ema:EMA.load_state_dict",
        "load_ema",
        "425da29b69f1bf67",
        "puts whole tensors in the place of shards",
        "ema/ema.py#L354",
    ),
    # What Composer asks of torch's class decides whether ours can be in its place. Nothing of
    # torch's own is used for a sharded model, so its source, which changes often, does not matter.
    _row(
        _SWA,
        "swa.swa:AveragedModel",
        "average_weights",
        "48288bf0c9c07153",
        "copies the modules, which those of FSDP2 refuse",
        "swa/swa.py#L29",
        source="composer.algorithms.swa.swa:SWA",
    ),
)
