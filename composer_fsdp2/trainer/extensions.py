"""Which of Composer's callbacks and algorithms run under FSDP2: all of them, or refused at start.

One table; the refusal, the tests and docs/reference/callbacks.md come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from composer import Trainer, algorithms, callbacks
from composer.core import Event, State
from composer.utils import ensure_tuple

from composer_fsdp2.errors import CheckpointError, ConfigError
from composer_fsdp2.shard.apply import is_sharded

__all__ = [
    "ALGORITHMS",
    "CALLBACKS",
    "Extension",
    "Given",
    "Refusal",
    "check_extensions",
    "check_given",
    "check_required",
    "given_of",
    "note_extensions",
    "read_given",
]

_GIVEN = "_fsdp2_extensions"


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

    @property
    def works(self) -> bool:
        """Whether there is a way to use it."""
        return self.refusal is None or bool(self.refusal.what)


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments of a Trainer."""

    items: tuple[Any, ...] = ()
    """algorithms, callbacks and optimizers"""
    microbatch_size: Any = None
    """as it was written"""


def _surgery_after_sharding(algorithm: Any) -> bool:
    return algorithm.apply_at != Event.INIT


_LATE_SURGERY = Refusal(
    "`apply_at` other than `Event.INIT`",
    "It would put unsharded layers into a model that is sharded by then. Leave out apply_at: "
    "layers are then replaced before the model is sharded.",
    _surgery_after_sharding,
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
    Extension(
        "MLPerfCallback", "needs mlperf-logging, which the tests have not; asks for metrics only"
    ),
    Extension("MemoryMonitor", "CUDA only, as without FSDP"),
    Extension("MemorySnapshot", "CUDA only; records from when the model is sharded"),
    Extension("NaNMonitor", "all ranks raise together"),
    Extension("OOMObserver", "CUDA only; records from when the model is sharded"),
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


def note_extensions(trainer: Trainer, arguments: Mapping[str, Any]) -> None:
    """Remembers the Trainer's arguments until it is known whether the run uses FSDP2."""
    setattr(trainer, _GIVEN, read_given(arguments))


def read_given(arguments: Mapping[str, Any]) -> Given:
    """Reads the arguments of a Trainer under their names."""
    items = [
        item
        for name in ("algorithms", "callbacks", "optimizers")
        for item in ensure_tuple(arguments.get(name))
    ]
    return Given(tuple(items), arguments.get("device_train_microbatch_size"))


def given_of(trainer: Trainer) -> Given:
    """Returns what `note_extensions` remembered."""
    return getattr(trainer, _GIVEN, Given())


def check_extensions(trainer: Trainer) -> None:
    """Refuses what would not give the same result under FSDP2, of what is remembered.

    Collective: no. Every rank is given the same.

    Raises:
        ConfigError: naming the callback or algorithm.
    """
    check_given(given_of(trainer))


def check_given(given: Given) -> None:
    """Refuses what would not give the same result under FSDP2.

    Collective: no. Every rank is given the same.

    Raises:
        ConfigError: naming the callback or algorithm.
    """
    refused = {**_classes(algorithms, ALGORITHMS), **_classes(callbacks, CALLBACKS)}
    for item in given.items:
        for cls in type(item).__mro__:
            refusal = refused.get(cls)
            if refusal is not None and refusal.applies(item):
                asked = f" with {refusal.what.partition(',')[0]}" if refusal.what else ""
                raise ConfigError(
                    f"{cls.__name__}{asked} cannot run under FSDP2. {refusal.message}"
                )


def _classes(package: Any, table: Iterable[Extension]) -> dict[type, Refusal]:
    return {getattr(package, e.name): e.refusal for e in table if e.refusal is not None}


def check_required(
    state: State,
    state_dict: Mapping[str, Any],
    _logger: Any = None,
    exclude_algorithms: Iterable[str] | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """Refuses to add algorithms of a checkpoint that change the layers of a sharded model.

    Collective: no. Every rank has read the same names.

    Raises:
        CheckpointError: naming them.
    """
    saved = state_dict.get("algorithms")
    if not is_sharded(state.model) or not isinstance(saved, list):
        return
    present = {type(algorithm).__qualname__ for algorithm in state.algorithms}
    missing = [
        name
        for name, _ in saved
        if name not in present
        and name not in (exclude_algorithms or ())
        and hasattr(algorithms, name)
        and getattr(algorithms, name).required_on_load()
    ]
    if missing:
        names = ", ".join(missing)
        raise CheckpointError(
            f"The checkpoint was trained with {names}, which this run has not. It replaces layers, "
            "and the model is sharded by now. Add it to the algorithms of the Trainer, or leave it "
            f"out with load_exclude_algorithms: [{names}]."
        )
