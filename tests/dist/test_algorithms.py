"""Every algorithm of Composer on shards: the weights of the same run without sharding."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer import algorithms as A
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from composer.algorithms.gyro_dropout.gyro_dropout import apply_gyro_dropout
from composer.algorithms.low_precision_groupnorm import apply_low_precision_groupnorm
from composer.algorithms.low_precision_layernorm import apply_low_precision_layernorm
from composer.algorithms.sam.sam import SAMOptimizer
from composer.core import Algorithm, Event, Precision, State
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel, HuggingFaceModel
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchvision.datasets import VisionDataset
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import ToPILImage, ToTensor

from composer_fsdp2 import CheckpointError, ConfigError, Muon, installed, prepare_fully_shard
from composer_fsdp2.text import plain_name
from composer_fsdp2.trainer.extensions.table import ALGORITHMS
from tests.support.experts import STACKED
from tests.support.extension_table import works
from tests.support.models import Block, TinyComposer, TinyLM, batches, llama_config, lm_loss
from tests.support.parity import OPTIMIZERS, assert_same_gradients
from tests.support.training import (
    Tokens,
    built,
    largest_difference,
    loader_of,
    samples_of,
    trainer_for,
    weights,
)
from tests.support.vision import CLASSES, TinyConv, images

STEPPED_BY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{
        name: lambda model, make=make: make(model.parameters()) for name, make in OPTIMIZERS.items()
    },
    "muon": lambda model: Muon(model, lr=3e-3, adamw_eps=1e-5, iteration_dtype="fp32"),
}
Make = Callable[[], ComposerModel]


def deep() -> ComposerModel:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    body = nn.Sequential(nn.Conv2d(3, 8, 3), Bottleneck(8, 2), *head)
    return ComposerClassifier(body, num_classes=CLASSES)


def language_model(kind: str) -> ComposerModel:
    import transformers

    shape = {"vocab_size": 31, "max_position_embeddings": 16, "pad_token_id": 0}
    if kind == "llama":
        model = transformers.LlamaForCausalLM(llama_config(**shape))
    else:
        shape |= {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        config = transformers.BertConfig(**shape, intermediate_size=20)
        model = transformers.BertForMaskedLM(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tokenizer was not provided")
        return HuggingFaceModel(model, use_logits=True)


def bert() -> ComposerModel:
    return language_model("bert")


class Pictures(VisionDataset):
    """The same images, as what augmentations take."""

    def __init__(self, count: int) -> None:
        super().__init__("", transform=ToTensor())
        held = images(count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of how torchvision calls Pillow
            self.samples = [(ToPILImage()(pixels), target) for pixels, target in held]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        image, target = self.samples[index]
        assert self.transform is not None
        return self.transform(image), target


class AtInit(Algorithm):
    """What an algorithm does, where it could not do it on a CPU or under DDP."""

    def __init__(self, act: Callable[[State], object]) -> None:
        self.act = act

    def match(self, event: Event, state: State) -> bool:
        return event == Event.INIT

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.act(state)


def _low_precision(apply: Callable[..., object]) -> Algorithm:
    return AtInit(lambda state: apply(state.model, Precision.AMP_BF16, state.optimizers))


Case = tuple[Make, Callable[[], Dataset[Any]], Callable[[], Algorithm]]


def _images(algorithm: Callable[[], Algorithm]) -> Case:
    return TinyConv, lambda: images(16), algorithm


def _language(kind: str, algorithm: Callable[[], Algorithm]) -> Case:
    return lambda: language_model(kind), lambda: Tokens(16), algorithm


CASES: dict[str, Case] = {
    "Alibi": _language("bert", lambda: A.Alibi(16, train_sequence_length_scaling=0.5)),
    "AugMix": (TinyConv, lambda: Pictures(16), A.AugMix),
    "BlurPool": _images(lambda: A.BlurPool(min_channels=3)),
    "ColOut": _images(lambda: A.ColOut(0.2, 0.2)),
    "CutMix": _images(A.CutMix),
    "CutOut": _images(A.CutOut),
    "EMA": _images(lambda: A.EMA(half_life="2ba")),
    "Factorize": _images(
        lambda: A.Factorize(min_channels=4, latent_channels=2, min_features=4, latent_features=2)
    ),
    "GatedLinearUnits": _language("bert", A.GatedLinearUnits),
    "GhostBatchNorm": _images(lambda: A.GhostBatchNorm(2)),
    "GradientClipping": _images(lambda: A.GradientClipping("adaptive", 0.01)),
    "GyroDropout": _images(lambda: A.GyroDropout(0.5, sigma=4, tau=2)),
    "LabelSmoothing": _images(lambda: A.LabelSmoothing(0.1)),
    "LayerFreezing": _images(lambda: A.LayerFreezing(0.0, 0.8)),
    "LowPrecisionGroupNorm": _images(lambda: _low_precision(apply_low_precision_groupnorm)),
    "LowPrecisionLayerNorm": (
        TinyComposer,
        lambda: samples_of(2, 8),
        lambda: _low_precision(apply_low_precision_layernorm),
    ),
    "MixUp": _images(A.MixUp),
    "NoOpModel": (TinyConv, lambda: images(16, classes=2), A.NoOpModel),
    "ProgressiveResizing": _images(lambda: A.ProgressiveResizing(finetune_fraction=0.1)),
    "RandAugment": (TinyConv, lambda: Pictures(16), A.RandAugment),
    "SWA": _images(lambda: A.SWA("0.3dur", "0.7dur", "1ba")),
    "SelectiveBackprop": _images(lambda: A.SelectiveBackprop(0.1, 1.0, interrupt=2)),
    "SeqLengthWarmup": _language("llama", lambda: A.SeqLengthWarmup(1.0, 2, 6, 2)),
    "SqueezeExcite": _images(lambda: A.SqueezeExcite(min_channels=4)),
    "StochasticDepth": (
        deep,
        lambda: images(16),
        lambda: A.StochasticDepth("ResNetBottleneck", "sample", 0.3),
    ),
    "WeightStandardization": _images(A.WeightStandardization),
}
ELSEWHERE = {"SAM"}

# Composer replaces no layers under DDP: the run without sharding starts with them.
INSTEAD = {
    "GyroDropout": lambda: AtInit(lambda state: apply_gyro_dropout(state.model, 2, 2, 0.5, 4, 2))
}


def test_there_is_a_case_for_every_algorithm():
    assert {*CASES, *ELSEWHERE} == {entry.name for entry in ALGORITHMS if works(entry)}


def trained(
    make: Make,
    samples: Dataset[Any],
    algorithm: Callable[[], Algorithm],
    *,
    sharded: bool = True,
    until: str = "2ep",
    optimizer: str = "sgd",
    **settings: Any,
) -> Trainer:
    if not sharded:
        settings["parallelism_config"] = None
    model = built(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what an algorithm cannot do on any kind of model
        trainer = trainer_for(
            model,
            STEPPED_BY[optimizer](model),
            samples,  # type: ignore[arg-type]
            algorithms=algorithm(),
            max_duration=until,
            seed=3,
            **settings,
        )
        trainer.fit()
    trainer.close()
    return trainer


def learned(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Batch norms keep statistics of their rank, which DDP overwrites with those of rank 0."""
    model = trainer.state.model
    model = model.module if isinstance(model, DistributedDataParallel) else model
    names = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in weights(model).items() if name in names}


@pytest.mark.table("LabelSmoothing", "SWA")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_trains_like_without_sharding(name: str):
    if name == "Alibi" and STACKED:
        pytest.skip("transformers has no BERT that Composer's Alibi can change")
    make, samples, algorithm = CASES[name]
    with installed():
        alone = trained(make, samples(), INSTEAD.get(name, algorithm), sharded=False)
        trainer = trained(make, samples(), algorithm)
    assert trainer.state.fsdp_enabled
    assert largest_difference(learned(trainer), learned(alone)) <= 1e-6


# --------------------------------------------------------------------------- adaptive clipping


class Mixed(TinyLM):
    """A convolution, a vector that is empty on one rank, a frozen and an unused weight."""

    def __init__(self, tie: str) -> None:
        super().__init__(tie)
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5, 2))
        self.norm.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        return logits + self.gain * self.conv(logits.unsqueeze(1)).mean(1)


@pytest.mark.table("0.001-all layers", "0.05-none")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", ["none", "two modules", "all layers"])
@pytest.mark.parametrize("threshold", [1e-3, 0.05])
def test_adaptive_clipping(tie: str, threshold: float):
    _check_clipping({}, tie, threshold)


@pytest.mark.table("{'data_parallel_replicate_degree': 2}")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("config", [{}, {"data_parallel_replicate_degree": 2}], ids=str)
def test_adaptive_clipping_on_four_ranks(config: dict[str, Any]):
    _check_clipping(config, "none", 0.02)


def _check_clipping(config: dict[str, Any], tie: str, threshold: float) -> None:
    torch.manual_seed(0)
    oracle = Mixed(tie)
    model = copy.deepcopy(oracle)
    prepare_fully_shard(model, None, config)
    ids, targets = batches(1, 8)[0]
    for one in (oracle, model):
        lm_loss(one(ids), targets).backward()
    before = [param.grad.clone() for param in oracle.parameters() if param.grad is not None]
    with installed():
        for one in (oracle, model):
            apply_gradient_clipping(one, "adaptive", threshold, False)
    after = [param.grad for param in oracle.parameters() if param.grad is not None]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_same_gradients(oracle, model)


# ------------------------------------------------------------------------------------- averages

AVERAGES: dict[str, Callable[[], Algorithm]] = {
    "EMA": lambda: A.EMA(half_life="2ba"),
    "SWA": lambda: A.SWA("0.1dur", "0.9dur", "1ba"),
}


class Checkpointed(TinyComposer):
    def __init__(self) -> None:
        super().__init__()
        self.net.activation_checkpointing_fn = lambda module: isinstance(module, Block)


def _average(trainer: Trainer) -> dict[str, torch.Tensor]:
    (algorithm,) = trainer.state.algorithms
    state = algorithm.state_dict()
    own = (
        state["ema_model"]["named_parameters_dict"] if "ema_model" in state else state["swa_model"]
    )
    whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in own.items()}
    return {name.replace("module.", ""): value for name, value in whole.items()}


@pytest.mark.table("EMA-unsharded-sgd")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "kind", "optimizer"),
    [
        ("EMA", "sharded", "sgd"),
        ("EMA", "full", "sgd"),
        ("EMA", "unsharded", "sgd"),
        ("SWA", "sharded", "sgd"),
        ("SWA", "full", "sgd"),
        ("EMA", "sharded", "muon"),
        ("EMA", "full", "muon"),
        ("SWA", "sharded", "muon"),
    ],
)
def test_averages_go_on_after_a_checkpoint(name: str, kind: str, optimizer: str, tmp_path: Path):
    fsdp2 = {"state_dict_type": "full" if kind == "unsharded" else kind}
    config = {"fsdp2": fsdp2 | {"activation_checkpointing": True}}
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba"}
    run = functools.partial(
        trained, Checkpointed, samples_of(4, 8), AVERAGES[name], optimizer=optimizer
    )
    with installed():
        alone = run(sharded=False, until="4ba")
        both = {"parallelism_config": config}
        run(sharded=kind != "unsharded", until="3ba", **saving, **both)
        file = "ep0-ba2" if kind == "sharded" else "ep0-ba2-rank0.pt"
        resumed = run(until="4ba", load_path=str(tmp_path / file), **both)
        averages = _average(resumed), _average(alone)
        if kind != "unsharded":  # then it was sharded before, and goes on with the same bits
            whole = run(until="4ba", **both)
            assert largest_difference(learned(resumed), learned(whole)) == 0
            assert largest_difference(averages[0], _average(whole)) == 0
    assert largest_difference(learned(resumed), learned(alone)) <= 1e-6
    assert largest_difference(*averages) <= 1e-6


@pytest.mark.world_size(2)
def test_an_average_of_another_model_is_refused(tmp_path: Path):
    ema = A.EMA(half_life="2ba")
    with installed():
        trainer = trained(TinyComposer, samples_of(1, 8), lambda: ema)
        state = ema.state_dict()
        del state["ema_model"]["named_parameters_dict"]["net.head.weight"]
        with pytest.raises(CheckpointError, match=r"no average of 'net\.head\.weight'"):
            ema.load_state_dict(state)
    assert trainer.state.fsdp_enabled


@pytest.mark.world_size(2)
def test_evaluates_the_average():
    found = []
    with installed():
        for sharded in (False, True):
            logger, samples = InMemoryLogger(), images(16)
            trained(
                lambda: TinyConv(batch_norm=False),
                samples,
                AVERAGES["EMA"],
                sharded=sharded,
                eval_dataloader=loader_of(samples, 4),
                eval_interval="1ba",
                loggers=logger,
            )
            values = logger.data["metrics/eval/CrossEntropy"]
            found.append(torch.tensor([float(value) for _, value in values]))
    assert len(found[0]) == 4
    assert (found[0] - found[1]).abs().max() <= 1e-6


# ----------------------------------------------------------------- sharpness, freezing, refusals


@pytest.mark.table("muon-fsdp24-4")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("name", "fsdp2", "microbatch"),
    [
        ("sgd", {}, 4),
        ("sgd", {"gradient_sync": "last"}, 2),
        ("adamw", {"gradient_sync": "every"}, 2),
        ("adamw", {"local_step": False}, 4),
        ("muon", {}, 4),
    ],
)
def test_sam(name: str, fsdp2: dict[str, Any], microbatch: int):
    """Under DDP each rank climbs with its own gradient; here, as one process, with that of all."""
    oracle = built(TinyComposer)
    optimizer = SAMOptimizer(STEPPED_BY[name](oracle))
    for batch in batches(4, 8):

        def closure(batch: Any = batch, **_: Any) -> torch.Tensor:
            oracle.zero_grad()
            loss = oracle.loss(oracle(batch), batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    with installed():
        trainer = trained(
            TinyComposer,
            samples_of(4, 8),
            A.SAM,
            until="1ep",
            optimizer=name,
            fsdp2=fsdp2,
            device_train_microbatch_size=microbatch,
        )
    assert largest_difference(trainer.state.model, oracle) <= 1e-6


@pytest.mark.world_size(2)
def test_freezing_with_activation_checkpointing():
    samples, freezing = samples_of(4, 8), lambda: A.LayerFreezing(0.0, 0.8)
    with installed():
        alone = trained(TinyComposer, samples, freezing, sharded=False)
        trainer = trained(TinyComposer, samples, freezing, fsdp2={"activation_checkpointing": True})
    assert largest_difference(learned(trainer), learned(alone)) <= 1e-6
    frozen = [[not p.requires_grad for p in t.state.model.parameters()] for t in (alone, trainer)]
    assert frozen[0] == frozen[1]
    assert any(frozen[1])


@pytest.mark.world_size(2)
def test_frozen_layers_get_no_gradient_and_stay_out_of_the_norm():
    found = []
    with installed():
        for sharded in (False, True):
            samples, both = images(16), lambda: [A.LayerFreezing(0.0, 0.8), CLIP]
            loader = loader_of(samples, 4)
            trainer = trained(
                TinyConv, samples, both, sharded=sharded, until="3ep", eval_dataloader=loader
            )
            found.append(trainer)
    alone, trainer = found
    assert largest_difference(learned(trainer), learned(alone)) <= 1e-6
    frozen = [[not p.requires_grad for p in t.state.model.parameters()] for t in found]
    assert frozen[0] == frozen[1]
    assert any(frozen[1])
    held = [len(t.state.optimizers[0].param_groups[0]["params"]) for t in found]
    assert held[0] == held[1] == frozen[1].count(False)


CLIP = A.GradientClipping("norm", 0.05)

REFUSED: dict[str, Callable[[], Algorithm]] = {
    "ChannelsLast": A.ChannelsLast,
    "LowPrecisionGroupNorm": lambda: A.LowPrecisionGroupNorm(Event.BEFORE_LOAD),
    "LowPrecisionLayerNorm": lambda: A.LowPrecisionLayerNorm(Event.AFTER_LOAD),
    "StochasticDepth": lambda: A.StochasticDepth("ResNetBottleneck"),
}


def test_every_refusal_has_a_case():
    assert set(REFUSED) == {entry.name for entry in ALGORITHMS if entry.refusal is not None}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start(name: str):
    with installed(), pytest.raises(ConfigError) as caught:
        trained(TinyConv, images(8), REFUSED[name])
    text = str(caught.value)
    assert text.startswith(name)
    assert "cannot run under FSDP2" in text


@pytest.mark.world_size(2)
def test_nothing_is_refused_without_fsdp2():
    with installed():
        trained(TinyConv, images(8), A.ChannelsLast, sharded=False, until="1ba")


@pytest.mark.world_size(2)
def test_layers_of_a_checkpoint_are_not_replaced_on_a_sharded_model(tmp_path: Path):
    make, samples, algorithm = CASES["GyroDropout"]
    with installed():
        trained(make, samples(), algorithm, save_folder=str(tmp_path), save_interval="2ba")
        path = str(tmp_path / "ep0-ba2")
        with pytest.raises(CheckpointError, match="GyroDropout, which this run does not have"):
            trained(make, samples(), lambda: [], load_path=path)
