"""Which of Composer's callbacks and algorithms run under FSDP2: all of them, or refused at start.

One table; the refusal, the tests and docs/reference/callbacks.md come from it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from composer import algorithms, callbacks
from composer.core import Event, State
from composer.utils import ensure_tuple
from torch import nn
from torch.optim import Optimizer

from composer_fsdp2.checkpoint.algorithms import descriptions, executes, is_plain_call
from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.plan.held_tensors import held_by
from composer_fsdp2.shard.units import is_sharded

__all__ = [
    "ALGORITHMS",
    "CALLBACKS",
    "Extension",
    "Refusal",
    "apply_required_algorithms",
    "check_extensions",
    "check_held_parameters",
    "items_of",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An extension that cannot do the same on a sharded model."""

    what: str
    """for the table"""
    message: str
    """the rest of the error: why it matters and what to write instead"""
    applies: Callable[[Any], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Extension:
    """One callback or algorithm."""

    name: str
    remark: str = ""
    refusal: Refusal | None = None


_LATE_SURGERY = Refusal(
    "`apply_at` other than `Event.INIT`",
    "It would put unsharded layers into a model that is sharded by then. Leave out apply_at: "
    "layers are then replaced before the model is sharded.",
    lambda algorithm: algorithm.apply_at != Event.INIT,
)
_SURGERY = "replaces layers before the model is sharded"
_DATA = "changes the batch only"

CALLBACKS = (
    Extension("ActivationMonitor", "each rank logs its own batch, under plain names"),
    Extension("CheckpointSaver", "see Checkpoints"),
    Extension("EarlyStopper", "rank 0's metric decides on all ranks"),
    Extension(
        "ExportForInferenceCallback",
        refusal=Refusal(
            "",
            "It copies the model in memory, and sharded modules cannot be copied. Leave it out, "
            "save a checkpoint, and export the model it is loaded into without FSDP, for example "
            "after `composer-fsdp2 checkpoint convert run/latest model.pt --to full`.",
        ),
    ),
    Extension("FreeOutputs"),
    Extension("Generate", "all ranks generate all prompts"),
    Extension("ImageVisualizer"),
    Extension("LRMonitor"),
    Extension(
        "LoadCheckpoint",
        "any checkpoint the Trainer loads",
        Refusal(
            "`event=Event.INIT`",
            "The model is not sharded at that event and would be loaded and then sharded in "
            "another way than a checkpoint needs. Use Event.BEFORE_LOAD, the default.",
            lambda callback: callback.event == Event.INIT,
        ),
    ),
    Extension("MLPerfCallback", "needs mlperf-logging, which no test has; asks for metrics only"),
    Extension("MemoryMonitor", "CUDA only, as without FSDP"),
    Extension("MemorySnapshot", "CUDA only, as without FSDP"),
    Extension("NaNMonitor", "all ranks raise together"),
    Extension("OOMObserver", "CUDA only, as without FSDP"),
    Extension("OptimizerMonitor", "norms of whole tensors, under plain names"),
    Extension("RuntimeEstimator"),
    Extension("SpeedMonitor"),
    Extension("SystemMetricsMonitor"),
    Extension("ThresholdStopper", "rank 0's metric decides on all ranks"),
)

ALGORITHMS = (
    Extension("Alibi", _SURGERY),
    Extension("AugMix", _DATA),
    Extension("BlurPool", _SURGERY),
    Extension(
        "ChannelsLast",
        refusal=Refusal(
            "",
            "It changes the strides of weights, and FSDP2 cuts their memory into rows that follow "
            "each other. Leave it out and give the model images in "
            "memory_format=torch.channels_last: convolutions keep the format of their input.",
        ),
    ),
    Extension("ColOut", _DATA),
    Extension("CutMix", "changes batch and loss only"),
    Extension("CutOut", _DATA),
    Extension("EMA", "averages shards; its state is in every kind of checkpoint"),
    Extension("Factorize", _SURGERY),
    Extension("GatedLinearUnits", _SURGERY),
    Extension("GhostBatchNorm", _SURGERY),
    Extension("GradientClipping", "`norm`, `value` and `adaptive`"),
    Extension("GyroDropout"),
    Extension("LabelSmoothing", "changes the targets only"),
    Extension("LayerFreezing"),
    Extension("LowPrecisionGroupNorm", _SURGERY, _LATE_SURGERY),
    Extension("LowPrecisionLayerNorm", _SURGERY, _LATE_SURGERY),
    Extension("MixUp", "changes batch and loss only"),
    Extension("NoOpModel", "replaces the model before it is sharded"),
    Extension("ProgressiveResizing", _DATA),
    Extension("RandAugment", _DATA),
    Extension(
        "SAM",
        "climbs with the gradient of all ranks, as one process does; under DDP each rank climbs "
        "with its own, so that the weights are others",
    ),
    Extension("SWA", "averages shards; its state is in every kind of checkpoint"),
    Extension("SelectiveBackprop"),
    Extension("SeqLengthWarmup"),
    Extension("SqueezeExcite", _SURGERY),
    Extension(
        "StochasticDepth",
        "`stochastic_method: sample`",
        Refusal(
            "`stochastic_method: block`, the default",
            "Each rank draws which blocks it leaves out, and ranks that skip different blocks "
            "wait for different collectives or mix gradients. Use stochastic_method='sample', "
            "which runs every block.",
            lambda algorithm: algorithm.stochastic_method == "block",
        ),
    ),
    Extension("WeightStandardization", "set up before the model is sharded"),
)


def items_of(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the algorithms, callbacks and optimizers among the arguments of a Trainer."""
    return tuple(
        item
        for name in ("algorithms", "callbacks", "optimizers")
        for item in ensure_tuple(arguments.get(name))
    )


def check_extensions(items: Iterable[Any]) -> None:
    """Refuses callbacks and algorithms that would not give the same result under FSDP2.

    Collective: no. Every rank is given the same.

    Raises:
        ConfigError: naming the callback or algorithm.
    """
    tables = ((algorithms, ALGORITHMS), (callbacks, CALLBACKS))
    refused = {
        getattr(package, row.name): row.refusal for package, table in tables for row in table
    }
    for item in items:
        for cls in type(item).__mro__:
            refusal = refused.get(cls)
            if refusal is not None and refusal.applies(item):
                argument = f" with {refusal.what.partition(',')[0]}" if refusal.what else ""
                raise ConfigError(
                    f"{cls.__name__}{argument} cannot run under FSDP2. {refusal.message}"
                )


def check_held_parameters(model: Any, items: Iterable[Any]) -> None:
    """Refuses callbacks and algorithms that hold parameters of the model.

    Collective: no. Every rank is given the same.

    Raises:
        ConfigError: naming the first parameter and who holds it.
    """
    if not isinstance(model, nn.Module):
        return
    names = {id(param): name for name, param in model.named_parameters()}
    for item in items:
        if isinstance(item, Optimizer):  # its groups get the sharded parameters
            continue
        for tensor, attribute in held_by(item, model):
            if (name := names.get(id(tensor))) is not None:
                raise ConfigError(
                    f"'{attribute}' of {type(item).__name__} holds the parameter '{name}'. FSDP2 "
                    "puts shards into the model alone, so this tensor would keep its first values "
                    "and never train. Hold the module, and read its parameter in the method of "
                    "the event."
                )


def _is_required(name: str) -> bool:
    """Whether Composer adds an algorithm of this name when a checkpoint was trained with it."""
    algorithm = getattr(algorithms, name, None)
    return algorithm is not None and algorithm.required_on_load()


def apply_required_algorithms(
    original: Callable[..., None],
    state: State,
    state_dict: Mapping[str, Any],
    logger: Any,
    exclude_algorithms: Iterable[str] | None = None,
    algorithm_passes: Any = None,
) -> None:
    """Replaces `State._apply_required_algorithms`, which adds the algorithms of a checkpoint.

    Collective: no. Every rank has read the same names.

    Raises:
        CheckpointError: a description could execute code, or an algorithm would change the layers
            of a sharded model.
    """
    excluded = tuple(exclude_algorithms or ())
    for name, text in descriptions(state_dict):
        # Composer evaluates these and no others. What Python cannot parse it cannot execute, and
        # Composer warns of it.
        evaluated = name not in excluded and _is_required(name)
        if evaluated and not is_plain_call(name, text) and _can_be_parsed(f"algorithms.{text}"):
            raise executes(name, text)
    present = {type(algorithm).__qualname__ for algorithm in state.algorithms}
    saved = state_dict.get("algorithms")
    names = [name for name, _ in saved] if isinstance(saved, list) else []
    missing = [
        name
        for name in names
        if name not in present and name not in excluded and _is_required(name)
    ]
    if missing and is_sharded(state.model):
        listed = ", ".join(missing)
        raise CheckpointError(
            f"The checkpoint was trained with {listed}, which this run does not have. It replaces "
            "layers, and the model is sharded by now. Add it to the algorithms of the Trainer, or "
            f"leave it out with load_exclude_algorithms: [{listed}]."
        )
    original(state, state_dict, logger, exclude_algorithms, algorithm_passes)


def _can_be_parsed(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (RecursionError, MemoryError):
        pass  # Composer's own attempt may get further
    except (SyntaxError, ValueError):
        return False
    return True
