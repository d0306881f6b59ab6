"""Every callback of Composer on shards: what it logs and decides is that of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer import callbacks as C
from composer.core import Callback, Event, State
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel, HuggingFaceModel
from composer.optim import DecoupledAdamW, DecoupledSGDW
from composer.utils import dist
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import Metric

from composer_fsdp2 import ConfigError, FSDP2Config, installed, prepare_fully_shard
from composer_fsdp2.trainer.extensions.table import CALLBACKS
from tests.support.extension_table import works
from tests.support.models import Block, TinyComposer, TinyLM, batches, llama_config, lm_loss
from tests.support.parity import OPTIMIZERS
from tests.support.training import (
    Tokens,
    built,
    largest_difference,
    loader_of,
    samples_of,
    trainer_for,
    weights,
)
from tests.support.vision import TinyConv, images

SGD = OPTIMIZERS["sgd"]

CASES: dict[str, str] = {
    "ActivationMonitor": "test_activations_are_logged_under_plain_names",
    "CheckpointSaver": "test_a_callback_saves_and_another_loads",
    "EarlyStopper": "test_all_ranks_stop_together",
    "FreeOutputs": "test_those_that_only_look_change_nothing",
    "Generate": "test_generates_like_one_process",
    "ImageVisualizer": "test_those_that_only_look_change_nothing",
    "LRMonitor": "test_those_that_only_look_change_nothing",
    "LoadCheckpoint": "test_a_callback_saves_and_another_loads",
    "MLPerfCallback": "test_mlperf_says_what_it_needs",
    "MemoryMonitor": "test_those_that_only_look_change_nothing",
    "MemorySnapshot": "test_those_that_only_look_change_nothing",
    "NaNMonitor": "test_all_ranks_raise_when_one_has_nan",
    "OOMObserver": "test_those_that_only_look_change_nothing",
    "OptimizerMonitor": "test_norms_are_those_of_whole_tensors",
    "RuntimeEstimator": "test_those_that_only_look_change_nothing",
    "SpeedMonitor": "test_throughput_counts_all_ranks",
    "SystemMetricsMonitor": "test_those_that_only_look_change_nothing",
    "ThresholdStopper": "test_all_ranks_stop_together",
}


def test_there_is_a_test_for_every_callback():
    assert set(CASES) == {entry.name for entry in CALLBACKS if works(entry)}
    assert {*CASES.values()} <= {*globals()}


def trained(
    make: Callable[[], ComposerModel],
    samples: Dataset[Any],
    callbacks: Any,
    *,
    sharded: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    **settings: Any,
) -> tuple[Trainer, InMemoryLogger]:
    if not sharded:
        settings["parallelism_config"] = None
    model, logger = built(make), InMemoryLogger()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a callback cannot do on a CPU
        trainer = trainer_for(
            model,
            optimizer([param for param in model.parameters() if param.requires_grad]),
            samples,  # type: ignore[arg-type]
            callbacks=callbacks,
            loggers=logger,
            seed=3,
            **settings,
        )
        trainer.fit()
    trainer.close()
    return trainer, logger


def logged(logger: InMemoryLogger, start: str) -> dict[str, list[float]]:
    """DDP gives names a prefix."""
    return {
        name.replace("/module.", "/"): [float(value) for _, value in values]
        for name, values in logger.data.items()
        if name.startswith(start)
    }


def assert_logged_alike(
    found: dict[str, list[float]], expected: dict[str, list[float]], count: int
) -> None:
    assert found.keys() == expected.keys()
    assert len(found) >= 1
    for name, values in expected.items():
        assert len(values) == len(found[name]) == count, name
        difference = max(abs(a - b) for a, b in zip(values, found[name], strict=True))
        assert difference <= 1e-6 * max(1.0, *map(abs, values)), f"{name} differs by {difference}"


# ----------------------------------------------------------------------------------------- norms


class Checkpointed(TinyComposer):
    def __init__(self, tie: str = "none") -> None:
        super().__init__(tie)
        self.net.activation_checkpointing_fn = lambda module: isinstance(module, Block)
        self.net.norm.bias.requires_grad_(False)
        # Of its single row, one rank has nothing.
        self.net.head.register_parameter("bias", nn.Parameter(torch.zeros(1)))


MONITORED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "DecoupledAdamW": lambda params: DecoupledAdamW(params, lr=3e-3, eps=1e-5, weight_decay=1e-4),
    "DecoupledSGDW": lambda params: DecoupledSGDW(params, lr=0.02, momentum=0.9),
    "AdamW": OPTIMIZERS["adamw"],
}


@pytest.mark.table("DecoupledAdamW-none-False", "AdamW-two modules-True")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "tie", "more"),
    [
        ("DecoupledAdamW", "none", True),
        ("DecoupledAdamW", "two modules", True),
        ("DecoupledAdamW", "none", False),
        ("DecoupledSGDW", "none", True),
        ("AdamW", "two modules", True),
    ],
)
def test_norms_are_those_of_whole_tensors(name: str, tie: str, more: bool):
    found = []
    for sharded in (True, False):
        config = {"fsdp2": {"activation_checkpointing": True}}
        with installed():
            _, logger = trained(
                lambda: Checkpointed(tie),
                samples_of(3, 8),
                C.OptimizerMonitor(more, batch_log_interval=1),
                sharded=sharded,
                optimizer=MONITORED[name],
                parallelism_config=config,
            )
        found.append(logged(logger, "l2_norm/"))
    assert "l2_norm/grad/net.blocks.0.up.weight" in found[0]
    assert "l2_norm/grad/net.norm.bias" not in found[0]
    assert ("l2_norm/update/net.head.bias" in found[0]) == (more and name == "DecoupledAdamW")
    assert_logged_alike(*found, 3)


@pytest.mark.world_size(2)
def test_activations_are_logged_under_plain_names():
    found = []
    for sharded in (True, False):
        with installed():
            _, logger = trained(
                Checkpointed,
                samples_of(2, 8),
                C.ActivationMonitor("10ba", only_log_wandb=False),
                sharded=sharded,
                parallelism_config={"fsdp2": {"activation_checkpointing": True}},
            )
        found.append(logged(logger, "activations/"))
    # The whole model has the prefix of DDP as its name, or none.
    blocks = [{n: v for n, v in part.items() if "blocks.0.up" in n} for part in found]
    assert any(name.startswith("activations/l2_norm/net.blocks.0.up") for name in blocks[0])
    assert not [name for name in found[0] if "_checkpoint_wrapped" in name]
    assert_logged_alike(*blocks, 1)


# --------------------------------------------------------------------------- decisions of all ranks


class NanOnRank1(TinyComposer):
    """In the second batch, and in one of the forms a loss may have."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.calls = 0

    def loss(self, outputs: torch.Tensor, batch: Any, *_args: Any) -> Any:
        loss = super().loss(outputs, batch)
        self.calls += 1
        if self.calls == 2 and dist.get_global_rank() == 1:
            loss = loss * float("nan")
        return {"tensor": loss, "list": [loss], "dict": {"total": loss, "own": loss}}[self.form]


@pytest.mark.table("tensor", "dict")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("form", ["tensor", "list", "dict"])
def test_all_ranks_raise_when_one_has_nan(form: str):
    said = "contains a NaN" if dist.get_global_rank() == 1 else "NaN on another rank"
    with installed(), pytest.raises(RuntimeError, match=said):
        trained(lambda: NanOnRank1(form), samples_of(4, 8), C.NaNMonitor())
    dist.barrier()


class RankLoss(Metric):
    """Not reduced, and good on rank 1 alone."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)

    def update(self, *_: Any) -> None:
        pass

    def compute(self) -> torch.Tensor:
        return torch.tensor(0.1 if dist.get_global_rank() == 1 else 0.9)


class Measured(TinyComposer):
    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {"RankLoss": RankLoss()}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        metric.update()


STOPPERS: dict[str, tuple[Callable[[], Callback], int]] = {
    "early": (lambda: C.EarlyStopper("RankLoss", "eval", patience="2ba"), 4),
    "threshold, for rank 1 alone": (lambda: C.ThresholdStopper("RankLoss", "eval", 0.5), 6),
    "threshold, for rank 0 alone": (
        lambda: C.ThresholdStopper("RankLoss", "eval", 0.5, comp="greater"),
        1,
    ),
}


@pytest.mark.table("threshold, for rank 1 alone", "threshold, for rank 0 alone")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", STOPPERS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_all_ranks_stop_together(name: str):
    stopper, batches_done = STOPPERS[name]
    with installed():
        trainer, _ = trained(
            Measured,
            samples_of(6, 8),
            stopper(),
            eval_dataloader=loader_of(samples_of(1, 8), 4),
            eval_interval="1ba",
        )
    assert trainer.state.timestamp.batch.value == batches_done


# ------------------------------------------------------------------------------- throughput, sights


class Quiet(TinyConv):
    """Its outputs may be freed: no metric of training asks for them."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {}


class Counted(TinyConv):
    def flops_per_batch(self, batch: Any) -> float:
        return 100.0 * len(batch[0]) * (1 + dist.get_global_rank())


@pytest.mark.world_size(2)
def test_throughput_counts_all_ranks():
    with installed():
        _, logger = trained(Counted, images(24), C.SpeedMonitor(1, gpu_flops_available=1e6))
    found = {name[11:]: values[-1] for name, values in logged(logger, "throughput/").items()}
    per_batch = {name: value / found["batches_per_sec"] for name, value in found.items()}
    assert per_batch["samples_per_sec"] == pytest.approx(8)
    assert per_batch["device/samples_per_sec"] == pytest.approx(4)
    assert per_batch["flops_per_sec"] == pytest.approx(400 + 800)
    assert per_batch["device/mfu"] == pytest.approx(600 / 1e6)


@pytest.mark.world_size(2)
def test_those_that_only_look_change_nothing():
    found = []
    for sharded in (True, False):
        callbacks = [
            C.FreeOutputs(),
            C.ImageVisualizer("1ba"),
            C.LRMonitor(),
            C.MemoryMonitor(dist_aggregate_batch_interval=1),
            C.MemorySnapshot(),
            C.OOMObserver(),
            C.RuntimeEstimator(),
            C.SystemMetricsMonitor(),
        ]
        with installed():
            trainer, logger = trained(Quiet, images(24), callbacks, sharded=sharded)
        model = trainer.state.model if sharded else trainer.state.model.module
        found.append((weights(model), logger, callbacks))
    (shards, logger, callbacks), (whole, expected, _) = found
    assert largest_difference(shards, whole) <= 1e-6
    assert logger.data.keys() == expected.data.keys()
    assert {"time/remaining_estimate", "cpu_percentage"} <= logger.data.keys()
    assert_logged_alike(logged(logger, "lr-"), logged(expected, "lr-"), 3)
    assert [c._enabled for c in callbacks if hasattr(c, "_enabled")] == [False, False, True]


def test_mlperf_says_what_it_needs(tmp_path: Path):
    """Composer's own message: the package is not among those the tests install."""
    with pytest.raises(ImportError, match="mlperf"):
        C.MLPerfCallback(str(tmp_path), 0)


# -------------------------------------------------------------------------- checkpoints, generation


class Saves(Callback):
    """As users write them; remembers the weights at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: Trainer
        self.seen: dict[str, dict[str, torch.Tensor]] = {}

    def _save(self, state: State, name: str) -> None:
        name += str(state.timestamp.batch.value)
        self.trainer.save_checkpoint(str(self.folder / name / "ba{batch}.pt"))
        self.seen[name] = weights(state.model)

    def batch_end(self, state: State, logger: Any) -> None:
        self._save(state, "batch")

    def eval_end(self, state: State, logger: Any) -> None:
        self._save(state, "eval")


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.filterwarnings("ignore:LoadCheckpoint is not in the state_dict")
@pytest.mark.filterwarnings("ignore:Saves is not in the state_dict")
def test_a_callback_saves_and_another_loads(kind: str, tmp_path: Path):
    model, saves = built(TinyComposer), Saves(tmp_path)
    loader = loader_of(samples_of(1, 8), 4)
    config = {"parallelism_config": {"fsdp2": {"state_dict_type": kind}}}
    with installed():
        saves.trainer = trainer_for(
            model,
            SGD(model.parameters()),
            samples_of(2, 8),
            callbacks=saves,
            eval_dataloader=loader,
            eval_interval="1ba",
            **config,
        )
        saves.trainer.fit()
        saves.trainer.close()
        for number, (name, expected) in enumerate(saves.seen.items()):
            batch = name[-1]
            file = f"ba{batch}.pt" if kind == "full" else f"ep0-ba{batch}"
            path = str(tmp_path / name / file)
            loads = C.LoadCheckpoint(path, event=(Event.BEFORE_LOAD, Event.AFTER_LOAD)[number % 2])
            again = built(TinyComposer, seed=1)
            trainer = trainer_for(
                again, SGD(again.parameters()), samples_of(3, 8), callbacks=loads, **config
            )
            assert largest_difference(again, expected) == 0
            assert trainer.state.timestamp.batch.value == int(batch)
            trainer.close()
    assert len(saves.seen) == 4


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(29)} | {"<pad>": 29, "<eos>": 30}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _speaker() -> ComposerModel:
    from transformers import LlamaForCausalLM

    config = llama_config(vocab_size=31, max_position_embeddings=32, pad_token_id=29)
    return HuggingFaceModel(LlamaForCausalLM(config), _tokenizer(), use_logits=True)


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_generates_like_one_process():
    found = []
    for sharded in (True, False):
        speaks = C.Generate(["w1 w2 w3", "w7"], "1ba", batch_size=1, max_new_tokens=6)
        with installed():
            _, logger = trained(_speaker, Tokens(16), speaks, sharded=sharded)
        found.append(logger.tables)
    if dist.get_global_rank() == 0:
        assert len(found[0]["generations"]) > 0
    assert found[0] == found[1]


# --- Refusals, fp16 scaling. ---

REFUSED: dict[str, Callable[[], Callback]] = {
    "ExportForInferenceCallback": lambda: C.ExportForInferenceCallback("torchscript", "model.pt"),
    "LoadCheckpoint": lambda: C.LoadCheckpoint("ep0-ba1", event=Event.INIT),
}


def test_every_refusal_has_a_case():
    assert set(REFUSED) == {entry.name for entry in CALLBACKS if entry.refusal is not None}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start(name: str):
    with installed(), pytest.raises(ConfigError, match=f"{name}.* cannot run under FSDP2"):
        trained(TinyConv, images(8), REFUSED[name]())


@pytest.mark.world_size(2)
def test_infinite_gradients_of_one_rank_skip_the_step_on_all():
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = SGD(model.parameters())
    prepare_fully_shard(model, optimizer, FSDP2Config())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)  # type: ignore
    ids, targets = batches(1, 8)[0]
    for broken in (True, False):
        before = weights(model)
        scaler.scale(lm_loss(model(ids), targets)).backward()
        if broken and dist.get_global_rank() == 1:
            next(model.parameters()).grad.to_local()[0] = float("inf")  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (largest_difference(weights(model), before) == 0) == broken
        assert scaler.get_scale() == 2.0
