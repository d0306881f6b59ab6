"""Rehearses what a run hands to Composer's Trainer, and the Trainer's first steps."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from composer.core import Event, Precision, State, TimeUnit, ensure_time
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import ConsoleLogger, Logger
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer.utils import create_interval_scheduler, get_device

from composer_fsdp2.config.blocks import Float8Spec
from composer_fsdp2.config.schema import FSDP2Config, parse_config
from composer_fsdp2.foundry.rehearsal.data import any_remote, check_kwargs
from composer_fsdp2.foundry.rehearsal.environment import environment_of
from composer_fsdp2.foundry.rehearsal.notes import Notes
from composer_fsdp2.parallel.group_sizes import GroupSizes, group_sizes
from composer_fsdp2.parallel.tensor import TensorParallel
from composer_fsdp2.trainer.extensions import check_given, read_given
from composer_fsdp2.trainer.prepare import TRANSFORMATIONS
from composer_fsdp2.trainer.prepare_plan import PreparePlan, make_plan

if TYPE_CHECKING:
    from composer_fsdp2.plan.wrap_plan import WrapPlan

__all__ = ["Parts", "build_parts", "check_arguments", "plan", "start"]

# These speak with a server as soon as they are built.
_REACH_OUT = ("comet_ml", "mlflow", "mosaicml", "neptune", "remote_uploader_downloader")


@dataclass(slots=True)
class Parts:
    """Parts that were built for the Trainer."""

    loggers: list[Any] = field(default_factory=list[Any])
    """a `None` among them was not built"""
    callbacks: list[Any] = field(default_factory=list[Any])
    algorithms: list[Any] = field(default_factory=list[Any])
    scheduler: Any = None
    optimizer: torch.optim.Optimizer | None = None


# --- What has a name in a registry. ---


def build_parts(notes: Notes, config: Any, logged: dict[str, Any]) -> Parts:
    """Builds scheduler, loggers, callbacks and algorithms."""
    from llmfoundry import registry
    from llmfoundry.utils import builders

    parts = Parts()
    settings = copy.deepcopy(config.scheduler)
    name = settings.pop("name", None)
    if notes.known("scheduler.name", name, registry.schedulers.get_all(), "schedulers"):
        with notes.step("scheduler"):
            parts.scheduler = builders.build_scheduler(name, settings)
    known = registry.loggers.get_all()
    loggers = _build_each(notes, "loggers", config.loggers, known, _logger)
    parts.loggers = [built for _, built in loggers]
    with_config = registry.callbacks_with_config.get_all()
    callbacks = _build_each(
        notes,
        "callbacks",
        config.callbacks,
        {**registry.callbacks.get_all(), **with_config},
        lambda name, kwargs: builders.build_callback(name, kwargs, logged),
    )
    # If they knew the run, some would ask a server whether they may write there.
    remote = {name for name, block in (config.callbacks or {}).items() if any_remote(block)}
    parts.callbacks = [built for name, built in callbacks if name not in remote]
    known = registry.algorithms.get_all()
    algorithms = _build_each(
        notes, "algorithms", config.algorithms, known, builders.build_algorithm
    )
    parts.algorithms = [built for _, built in algorithms]
    _build_planners(notes, config.fsdp_config or {})
    return parts


def _logger(name: str, kwargs: dict[str, Any]) -> Any:
    from llmfoundry import registry
    from llmfoundry.utils.builders import build_logger

    if name in _REACH_OUT:
        return check_kwargs(registry.loggers.get(name), kwargs)
    return build_logger(name, kwargs)


def _build_each(
    notes: Notes,
    where: str,
    blocks: Any,
    known: Mapping[str, Any],
    build: Callable[[str, dict[str, Any]], Any],
) -> list[tuple[str, Any]]:
    built: list[tuple[str, Any]] = []
    for name, settings in (blocks or {}).items():
        if not notes.known(where, name, known, where):
            continue
        with notes.step(f"{where}.{name}"):
            built.append((name, build(str(name), dict(copy.deepcopy(settings) or {}))))
    return built


def _build_planners(notes: Notes, block: Mapping[str, Any]) -> None:
    from llmfoundry import registry
    from llmfoundry.utils import builders

    kinds = {
        "load_planner": (registry.load_planners, builders.build_load_planner),
        "save_planner": (registry.save_planners, builders.build_save_planner),
    }
    for key, (known, build) in kinds.items():
        if block.get(key) is None:
            continue
        with notes.step(key, f"Write {key}: {{NAME: {{...}}}}."):
            ((name, settings),) = block[key].items()
            if notes.known(key, name, known.get_all(), "planners"):
                build(name, **(settings or {}))


# --- Arguments. ---


def check_arguments(notes: Notes, config: Any) -> None:
    """Checks what the Trainer reads from text or numbers."""
    time = "Write a number and a unit: 10ba, 1ep, 5000tok, 100sp."
    with notes.step("max_duration", time):
        duration = ensure_time(config.max_duration, TimeUnit.EPOCH)
        if duration.unit == TimeUnit.SECOND:
            raise ValueError("wall clock time is no unit of it")
        if duration.value <= 0:
            raise ValueError(f"nothing would be trained in {config.max_duration}")
    intervals = {"eval_interval": config.eval_interval}
    if config.save_folder is not None:
        intervals["save_interval"] = config.save_interval
    for key, interval in intervals.items():
        with notes.step(key, time):
            create_interval_scheduler(interval)
    if config.log_to_console:
        with notes.step("console_log_interval", time):
            ConsoleLogger(log_interval=config.console_log_interval)
            if ensure_time(config.console_log_interval, TimeUnit.EPOCH).value <= 0:
                raise ValueError(f"nothing happens every {config.console_log_interval}")
    if notes.cluster.on_gpus:
        known = [precision.value for precision in Precision]
        notes.known("precision", config.precision, known, "precisions of Composer")
    _check_more(notes, config)
    if config.autoresume and (config.save_folder is None or config.run_name is None):
        notes.add(
            "autoresume: true needs save_folder and run_name, to find the newest checkpoint.",
            "Write both, or leave autoresume out.",
        )


def _check_more(notes: Notes, config: Any) -> None:
    """Checks what LLM Foundry hands to others before it builds the Trainer."""
    if config.compile_config is not None:
        with notes.step("compile_config"):
            torch.compile(
                torch.nn.Identity(), **config.compile_config
            )  # compiles when it is called
    if config.python_log_level is not None:
        with notes.step("python_log_level", "Write debug, info, warning or error."):
            logging.Logger("rehearsal").setLevel(config.python_log_level.upper())
    if not 0 <= config.seed < 2**32:
        notes.add(
            f"seed: {config.seed} is no seed of numpy.", "Write a number from 0 to 2**32 - 1."
        )
    if config.profiler:
        with notes.step("profiler"):
            _check_profiler(copy.deepcopy(config.profiler))


def _check_profiler(block: dict[str, Any]) -> None:
    """Goes as LLM Foundry does, and starts no profiler."""
    if "schedule" not in block:
        raise ValueError("it has no `schedule`")
    cyclic_schedule(**block.pop("schedule"))
    if handler := block.pop("json_trace_handler", None):
        check_kwargs(JSONTraceHandler, handler)
    check_kwargs(Profiler, {**block, "schedule": None, "trace_handlers": None})


# --- The start of the Trainer. ---


def start(notes: Notes, config: Any, parts: Parts, model: Any, loader: Any, run_name: str) -> None:
    """Tells algorithms and callbacks of the start, which may change the model."""
    state, logger = None, None
    with notes.step("The Trainer"):
        state = State(
            model=model,
            rank_zero_seed=0,
            run_name=run_name,
            device=DeviceCPU(),
            optimizers=parts.optimizer,
            algorithms=parts.algorithms,
            callbacks=parts.callbacks,
        )
        logger = Logger(state, [built for built in parts.loggers if built is not None])
        model.logger = logger
    if state is None or logger is None:
        return
    for algorithm in parts.algorithms:
        with notes.step(f"algorithms: {type(algorithm).__name__}"):
            if algorithm.match(Event.INIT, state):
                algorithm.apply(Event.INIT, state, logger)
    for callback in parts.callbacks if None not in parts.loggers else ():
        with _unless_of_a_gpu(notes).step(f"callbacks: {type(callback).__name__}"):
            callback.run_event(Event.INIT, state, logger)
    _start_scheduler(notes, config, parts, state, loader)


def _unless_of_a_gpu(notes: Notes) -> Notes:
    """Returns notes that are dropped where the GPU is missing: an error may come of that alone."""
    absent = notes.cluster.on_gpus and not torch.cuda.is_available()
    return Notes(notes.cluster) if absent else notes


def _start_scheduler(notes: Notes, config: Any, parts: Parts, state: State, loader: Any) -> None:
    """Schedulers read their times when they are asked for the first time."""
    if parts.scheduler is None or loader is None:
        return
    before = len(notes.mistakes)
    with notes.step("max_duration"):
        state.max_duration = ensure_time(config.max_duration, TimeUnit.EPOCH)
        state.set_dataloader(getattr(loader, "dataloader", loader), "train")
    if len(notes.mistakes) == before:
        with notes.step("scheduler"):
            parts.scheduler(state)


def plan(
    notes: Notes, config: Any, parts: Parts, model: Any
) -> tuple[WrapPlan | None, GroupSizes | None]:
    """Decides how FSDP2 would shard the model, and changes nothing."""
    device: Any = get_device("cpu")
    precision = "fp32"
    if notes.cluster.on_gpus:
        device = get_device("gpu") if torch.cuda.is_available() else _absent_gpu()
        precision = config.precision
        if precision not in [known.value for known in Precision]:
            return None, None
    with notes.step("parallelism_config.fsdp2"), environment_of(notes.cluster):
        block = {key: value for key, value in config.fsdp_config.items() if key != "version"}
        block.pop("sync_module_states", None)
        arguments = {
            "algorithms": parts.algorithms,
            "callbacks": parts.callbacks,
            "optimizers": parts.optimizer,
        }
        check_given(read_given(arguments))
        settings = parse_config(block)
        planned = make_plan(
            model,
            parts.optimizer,
            _for_absent(settings) if notes.cluster.on_gpus else settings,
            precision,
            device,
            mesh=None,
            transformations=TRANSFORMATIONS,
        )
        return planned.units, _sizes(planned)
    return None, None


def _sizes(planned: PreparePlan) -> GroupSizes | None:
    divided = planned.plan_of(TensorParallel)
    if divided is None:
        return None
    return group_sizes(planned.tree, divided, planned.units, planned.shape)


def _absent_gpu() -> DeviceGPU:
    """A GPU that is not here: building one chooses it."""
    return object.__new__(DeviceGPU)


def _for_absent(settings: FSDP2Config) -> FSDP2Config:
    """Settings that do not ask a GPU what it can do, where there is none to ask."""
    if not settings.fp8 or torch.cuda.is_available():
        return settings
    spec = settings.fp8 if isinstance(settings.fp8, Float8Spec) else Float8Spec()
    return dataclasses.replace(settings, fp8=dataclasses.replace(spec, emulate=True))
