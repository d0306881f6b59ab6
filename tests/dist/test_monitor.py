"""The monitor's numbers, against a count of what reaches the backend and a look at every unit."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.callbacks import OptimizerMonitor, SpeedMonitor
from composer.core import Callback, State
from composer.devices import DeviceCPU
from composer.loggers import FileLogger, InMemoryLogger, Logger, MLFlowLogger, WandBLogger
from composer.models import ComposerModel
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composer_fsdp2 import ConfigError, FSDP2Monitor, installed, prepare_fully_shard
from composer_fsdp2.step.run import Run, run_of
from composer_fsdp2.trainer.extensions.monitor import describe_sharding
from tests.support.models import TinyComposer, TinyLM, batches, lm_loss
from tests.support.parity import OPTIMIZERS
from tests.support.training import built, largest_difference, loader_of, samples_of, trainer_for

SGD = OPTIMIZERS["sgd"]
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
COUNTS = ("gathered_bytes", "reduced_bytes", "collectives", "peak_unsharded_bytes")


class Counted(TorchDispatchMode):
    """Sees every collective below FSDP, and which units have whole parameters then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        sharding = how(model)
        names = [unit.params for unit in sharding.plan.units if unit.params]
        holders = {name: _holder(model, name) for unit in names for name in unit}
        self.units = [[holders[name] for name in unit] for unit in names]
        self.ranks = sharding.shape.shard
        self.counts = dict.fromkeys(COUNTS, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_allgather_base_":
            self._count("gathered_bytes", args[0].nbytes)
            self.counts["peak_unsharded_bytes"] = max(
                self.counts["peak_unsharded_bytes"], args[0].nbytes + self._held()
            )
        elif name == "_reduce_scatter_base_":
            self._count("reduced_bytes", args[1].nbytes)
        # The Trainer reduces a number or two about the batch; no shard is that small. Ranks tell
        # each other in integers which parameters were used.
        elif name == "allreduce_" and args[0][0].numel() > 4 and args[0][0].is_floating_point():
            self._count("reduced_bytes", args[0][0].nbytes)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, nbytes: int) -> None:
        self.counts[name] += nbytes
        self.counts["collectives"] += 1

    def _held(self) -> int:
        params = [[module._parameters[name] for module, name in unit] for unit in self.units]
        return sum(
            padded(param.shape, self.ranks) * param.element_size()
            for unit in params
            for param in {id(param): param for param in unit}.values()
            if not isinstance(param, DTensor)
        )


def how(model: nn.Module) -> Run:
    sharding = run_of(model)
    assert sharding is not None
    return sharding


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return getattr(module, "_checkpoint_wrapped_module", module), attribute


def padded(shape: torch.Size, ranks: int = 2) -> int:
    """Elements of a parameter whose first dimension is cut into equal pieces."""
    return -(-shape[0] // ranks) * ranks * shape[1:].numel()


class Metered:
    """Runs the monitor's part of a batch around a block, and holds what it logs."""

    def __init__(self, model: nn.Module) -> None:
        self.monitor = FSDP2Monitor()
        state = State(rank_zero_seed=0, run_name="run", model=model, device=DeviceCPU())
        memory = InMemoryLogger()
        self.given = (state, Logger(state, destinations=memory))
        memory.init(*self.given)
        with contextlib.redirect_stderr(io.StringIO()):
            self.monitor.after_load(*self.given)
        self.monitor.fit_start(*self.given)
        self.data = memory.data

    def __enter__(self) -> Metered:
        self.monitor.batch_start(*self.given)
        return self

    def __exit__(self, *error: object) -> None:
        self.monitor.batch_end(*self.given)
        self.counts = {name: self.data[f"fsdp2/{name}"][-1][1] for name in COUNTS}


def step(model: nn.Module, microbatches: int = 1) -> None:
    for ids, targets in batches(microbatches, 2):
        lm_loss(model(ids), targets).backward()


def frozen(*names: str) -> TinyLM:
    model = TinyLM()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


# --- Against what reaches the backend. ---

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "auto": (TinyLM, {}, 1),
    "freed": (TinyLM, {"reshard_after_forward": True}, 1),
    "kept": (TinyLM, {"reshard_after_forward": False}, 1),
    "accumulation": (TinyLM, {}, 3),
    "recomputed": (TinyLM, {"activation_checkpointing": True}, 1),
    "bf16": (TinyLM, {"mixed_precision": BF16}, 1),
    "mixed units": (
        TinyLM,
        {
            "wrap_policy": {
                "names": {"blocks.1": {"reshard_after_forward": False, "mixed_precision": "PURE"}},
                "classes": ["Block", "Embedding"],
            },
            "mixed_precision": {**BF16, "cast_forward_inputs": True},
        },
        2,
    ),
    "frozen middle": (lambda: frozen("blocks.1"), {}, 1),
    "frozen beginning": (lambda: frozen("embed", "blocks.0", "blocks.1"), {}, 2),
    "tied": (lambda: TinyLM("two modules"), {}, 1),
    "shared by all layers": (lambda: TinyLM("all layers"), {}, 1),
}


@pytest.mark.table("kept", "mixed units")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", MODELS)
def test_counts_what_reaches_the_backend(case: str):
    make, config, microbatches = MODELS[case]
    model = make()
    prepare_fully_shard(model, None, config)
    meter = Metered(model)
    for _ in range(2):
        with meter, Counted(model) as seen:
            step(model, microbatches)
        assert meter.counts == seen.counts
    assert min(seen.counts.values()) > 0


@pytest.mark.table("{'data_parallel_replicate_degree': 2}", "{'reshard_after_forward': 2}")
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "config",
    [
        {"data_parallel_replicate_degree": 2},
        {"data_parallel_replicate_degree": 2, "reshard_after_forward": True},
        {"reshard_after_forward": 2},
    ],
    ids=str,
)
def test_counts_on_two_axes_and_to_smaller_groups(config: dict[str, Any]):
    model = TinyLM()
    prepare_fully_shard(model, None, config)
    with Metered(model) as meter, Counted(model) as seen:
        step(model)
    if config.get("reshard_after_forward") == 2:
        # Pieces of pieces are padded twice, which the look at the units does not know.
        assert meter.counts["peak_unsharded_bytes"] >= seen.counts.pop("peak_unsharded_bytes")
    assert seen.counts.items() <= meter.counts.items()


@pytest.mark.world_size(2)
def test_counts_what_theory_says():
    model = TinyLM()
    whole = {name: padded(param.shape) * 4 for name, param in model.named_parameters()}
    prepare_fully_shard(model, None, {})
    *blocks, root = [sum(whole[name] for name in unit.params) for unit in how(model).plan.units]
    with Metered(model) as meter:
        step(model)
    assert meter.counts == {
        "gathered_bytes": root + 2 * sum(blocks),
        "reduced_bytes": root + sum(blocks),
        "collectives": 1 + 2 * 3 + 4,
        "peak_unsharded_bytes": root + 2 * blocks[0],
    }


@pytest.mark.world_size(2)
def test_compiled_blocks_are_followed():
    model = TinyLM()
    for block in model.blocks:
        block.compile(backend="eager")
    prepare_fully_shard(model, None, {})
    meter = Metered(model)
    for _ in range(2):
        with meter, Counted(model) as seen:
            step(model)
        assert meter.counts == seen.counts


# --- In the Trainer. ---


class SaysItsFlops(TinyComposer):
    def flops_per_batch(self, batch: Any) -> float:
        return 3.0 * len(batch[0])


class Counts(Callback):
    """Counts every training batch independently."""

    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.seen = Counted(state.model).__enter__()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.seen.__exit__(None, None, None)
        self.found.append(self.seen.counts)


def trainer_of(make: Callable[[], ComposerModel], *callbacks: Callback, **settings: Any) -> Trainer:
    """A Trainer for three batches; the line it shows at the start is kept out of the output."""
    model = built(make, settings.pop("seed", 0))
    given = {"callbacks": list(callbacks), **settings}
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        trainer = trainer_for(model, SGD(model.parameters()), samples_of(3, 8), **given)
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("FSDP2: 4 units")]
    monitored = any(isinstance(callback, FSDP2Monitor) for callback in callbacks)
    assert len(lines) == int(monitored and dist.get_rank() == 0)
    return trainer


def logged(logger: InMemoryLogger, name: str) -> list[float]:
    return [float(value) for _, value in logger.data[name]]


@pytest.mark.world_size(2)
def test_logs_every_batch_and_leaves_evaluation_out():
    logger, counts = InMemoryLogger(), Counts()
    with installed():
        trainer = trainer_of(
            TinyComposer,
            FSDP2Monitor(),
            counts,
            loggers=logger,
            device_train_microbatch_size=2,
            eval_dataloader=loader_of(samples_of(2, 8), 4),
            eval_interval="1ba",
        )
        trainer.fit()
    trainer.close()
    assert len(counts.found) == 3
    for name in COUNTS:
        assert logged(logger, f"fsdp2/{name}") == [count[name] for count in counts.found]
    assert {name for name in logger.data if name.startswith("fsdp2/")} == {
        f"fsdp2/{name}" for name in COUNTS
    }


@pytest.mark.world_size(2)
def test_counts_after_an_evaluation_beside_the_monitor_of_the_optimizer():
    """Modules that are gathered get another dictionary of parameters, and are freed from it."""
    with installed():
        trainer = trainer_of(
            TinyComposer,
            FSDP2Monitor(),
            OptimizerMonitor(),
            eval_dataloader=loader_of(samples_of(1, 8), 4),
        )
        trainer.eval()
        trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.batch == 3


@pytest.mark.world_size(2)
def test_mfu_is_speed_monitors():
    logger = InMemoryLogger()
    speed = SpeedMonitor(window_size=1, gpu_flops_available=1e9)
    ours = FSDP2Monitor(gpu_flops_available=1e9)
    with installed():
        trainer = trainer_of(SaysItsFlops, ours, speed, loggers=logger)
        trainer.fit()
    trainer.close()
    found, theirs = logged(logger, "fsdp2/mfu"), logged(logger, "throughput/device/mfu")
    assert len(found) == 3
    assert found[1:] == pytest.approx(theirs, rel=1e-3)


@pytest.mark.world_size(2)
def test_a_model_without_units_is_refused():
    with installed(), pytest.raises(ConfigError) as caught:
        trainer_of(TinyComposer, FSDP2Monitor(), parallelism_config=None)
    message = str(caught.value)
    assert "the model is not sharded by FSDP2" in message
    assert "it would log nothing" in message
    assert "or remove the callback" in message


class Fails(Callback):
    def after_forward(self, state: State, logger: Logger) -> None:
        raise KeyError


@pytest.mark.world_size(2)
def test_a_training_that_fails_is_not_counted_after_close():
    with installed():
        trainer = trainer_of(TinyComposer, FSDP2Monitor(), Fails())
        run = how(trainer.state.model)
        before = run.listeners
        with pytest.raises(KeyError):
            trainer.fit()
    assert run.listeners[: len(before)] == before
    assert len(run.listeners) == len(before) + 1
    trainer.close()
    assert run.listeners == before


@pytest.mark.world_size(4)
def test_the_line_at_the_start():
    model = built(TinyComposer)
    prepare_fully_shard(model, None, {"data_parallel_replicate_degree": 2})
    assert describe_sharding(model, how(model)) == (
        "FSDP2: 4 units, 1,710 parameters, 0.0 MiB of them on this rank, "
        "mesh dp_replicate 2 x dp_shard 2, reshard_after_forward true in 3, false in 1"
    )


# --- At resume, and with Composer's loggers. ---


def trained(folder: Path, until: int, *callbacks: Callback, **settings: Any) -> ComposerModel:
    with installed():
        trainer = trainer_of(
            TinyComposer,
            *callbacks,
            max_duration=f"{until}ba",
            save_folder=str(folder),
            save_interval="1ba",
            run_name="run",
            autoresume=True,
            **settings,
        )
        trainer.fit()
    trainer.close()
    return trainer.state.model


@pytest.mark.table("sharded")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_comes_and_goes_at_resume(kind: str, tmp_path: Path):
    fsdp2 = {"state_dict_type": kind}
    trained(tmp_path / "resumed", 1, fsdp2=fsdp2)
    with warnings.catch_warnings():
        # Composer says it of every callback that a full checkpoint does not know.
        warnings.filterwarnings("ignore", message="FSDP2Monitor is not in the state_dict")
        trained(tmp_path / "resumed", 2, FSDP2Monitor(), seed=1, fsdp2=fsdp2)
    resumed = trained(tmp_path / "resumed", 3, seed=2, fsdp2=fsdp2)
    whole = trained(tmp_path / "whole", 3, fsdp2=fsdp2)
    assert largest_difference(resumed, whole) == 0.0


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_composers_loggers_take_it(tmp_path: Path):
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    to_mlflow = {"synchronous": True, "log_system_metrics": False}
    loggers = [
        FileLogger(str(tmp_path / "rank{rank}.txt")),
        MLFlowLogger("monitor", tracking_uri=tmp_path / "mlflow", **to_mlflow),
        WandBLogger("monitor"),
    ]
    with installed():
        trainer = trainer_of(TinyComposer, FSDP2Monitor(), loggers=loggers)
        trainer.fit()
    if dist.get_rank() == 0:
        import wandb

        assert wandb.run is not None
        assert wandb.run.summary["fsdp2/collectives"] == 11
    trainer.close()
    if dist.get_rank() == 0:
        (written,) = tmp_path.glob("mlflow/*/*/metrics/fsdp2/collectives")
        # Composer writes a value to MLflow again when it changes.
        assert [line.split()[1] for line in written.read_text().splitlines()] == ["11.0"]
        assert (tmp_path / "rank0.txt").read_text().count("fsdp2/collectives") == 3
