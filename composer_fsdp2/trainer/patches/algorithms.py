"""Rows of Composer's algorithms; each belongs to the algorithm it is of."""

from __future__ import annotations

import functools

from composer_fsdp2.trainer.patches.engine import Feature, PatchPoint, asked_by_class

__all__ = ["ALGORITHM_ROWS"]

_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer/algorithms"
_PACKAGE = "composer.algorithms"
_row = functools.partial(PatchPoint, versions="mosaicml 0.32.1")

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


ALGORITHM_ROWS: tuple[PatchPoint, ...] = (
    _row(
        target=f"{_PACKAGE}.gradient_clipping.gradient_clipping:_apply_agc",
        replacement="trainer.algorithms:clip_adaptively",
        feature=_CLIPPING,
        why="takes a shard's norm for the whole",
        upstream=f"{_UPSTREAM}/gradient_clipping/gradient_clipping.py#L66",
        fingerprints={"4aa29feaede39e77"},
    ),
    _row(
        target=f"{_PACKAGE}.gradient_clipping.gradient_clipping:apply_gradient_clipping",
        replacement="trainer.algorithms:clip_gradients",
        feature=_CLIPPING,
        why="clips through one DTensor operation after the other",
        upstream=f"{_UPSTREAM}/gradient_clipping/gradient_clipping.py#L23",
        fingerprints={"b4014cc6206ef761"},
    ),
    _row(
        target=f"{_PACKAGE}.sam.sam:SAMOptimizer._grad_norm",
        replacement="trainer.algorithms:ascent_norm",
        feature=_SAM,
        why="reduces the norm of each gradient by itself",
        upstream=f"{_UPSTREAM}/sam/sam.py#L110",
        fingerprints={"5f86e331bebb39d7"},
    ),
    _row(
        target=f"{_PACKAGE}.layer_freezing.layer_freezing:freeze_layers",
        replacement="trainer.algorithms:freeze_layers",
        feature=_FREEZING,
        why="freezes shards, while gradients of the gathered parameters go on",
        upstream=f"{_UPSTREAM}/layer_freezing/layer_freezing.py#L25",
        fingerprints={"f8f689f2f0d508a8"},
    ),
    _row(
        target=f"{_PACKAGE}.ema.ema:get_model_context_manager",
        replacement="trainer.algorithms:weights_of",
        feature=_EMA,
        why="mixes shards with parameters that evaluation left gathered",
        upstream=f"{_UPSTREAM}/ema/ema.py#L87",
        fingerprints={"b111ec835b312782"},
    ),
    _row(
        target=f"{_PACKAGE}.ema.ema:EMAParameters.__init__",
        replacement="trainer.parallelism.averages:start_averages",
        feature=_EMA,
        why="forgets in which order tensor parallelism holds fused projections",
        upstream=f"{_UPSTREAM}/ema/ema.py#L401",
        fingerprints={"ccdfecc4a7728427"},
    ),
    _row(
        target=f"{_PACKAGE}.ema.ema:EMA.state_dict",
        replacement="trainer.algorithms:save_ema",
        feature=_EMA,
        why="saves names with the wrappers of activation checkpointing in them",
        upstream=f"{_UPSTREAM}/ema/ema.py#L307",
        fingerprints={"a6f400a9bab424a6"},
    ),
    _row(
        target=f"{_PACKAGE}.ema.ema:EMA.load_state_dict",
        replacement="trainer.algorithms:load_ema",
        feature=_EMA,
        why="puts whole tensors in the place of shards",
        upstream=f"{_UPSTREAM}/ema/ema.py#L354",
        fingerprints={"425da29b69f1bf67"},
    ),
    # What Composer asks of torch's class decides whether ours can be in its place. Nothing of
    # torch's own is used for a sharded model, so its source, which changes often, does not matter.
    _row(
        target=f"{_PACKAGE}.swa.swa:AveragedModel",
        replacement="trainer.algorithms:average_weights",
        feature=_SWA,
        why="copies the modules, which those of FSDP2 refuse",
        upstream=f"{_UPSTREAM}/swa/swa.py#L29",
        fingerprints={"48288bf0c9c07153"},
        source=f"{_PACKAGE}.swa.swa:SWA",
    ),
)
