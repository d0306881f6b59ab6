"""Composer's Trainer with sequence parallelism: data, loss, metrics, counts, checkpoints, items."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Callback, Logger, State
from composer import algorithms as A
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel, HuggingFaceModel
from torch import distributed as dist
from torch import nn
from torch.utils.data import Dataset

from composer_fsdp2 import install
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.guards.leaving.joint_exit import joint_exit_of
from composer_fsdp2.parallel.form import form_of
from composer_fsdp2.patches import install_for_foundry
from tests.dist.test_blocks import fresh_compiler, graphs
from tests.dist.test_sequence_parallel import SIZES, batches, llama
from tests.dist.test_tensor_files import whole_state
from tests.dist.test_tensor_trainer import adamw
from tests.dist.test_tensor_with import averages_of
from tests.support.parity import TOLERANCE
from tests.support.training import largest_difference, loader_of, trainer_for, weights

STEPS, HALF, SIZE = 4, 2, 4


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Rows of the batches."""

    def __init__(self, count: int = STEPS * SIZE, *, kind: str = "padded") -> None:
        self.rows = [
            {name: tensor[row] for name, tensor in batch.items()}
            for batch in batches(kind, STEPS)
            for row in range(SIZE)
        ][:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.rows[index].items()}


def hugging_face() -> ComposerModel:
    return HuggingFaceModel(
        llama(),
        tokenizer=None,
        metrics=[LanguageCrossEntropy()],
        eval_metrics=[LanguageCrossEntropy()],
        shift_labels=True,
        use_logits=True,
    )


def foundry() -> ComposerModel:
    pytest.importorskip("llmfoundry")
    from llmfoundry.models.mpt import ComposerMPTCausalLM

    install_for_foundry()

    sizes = {"d_model": 32, "n_heads": 8, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}
    return ComposerMPTCausalLM(
        vocab_size=SIZES["vocab_size"],
        loss_fn="torch_crossentropy",
        attn_config={"attn_impl": "torch"},
        **sizes,
    )


MAKE = {"Hugging Face": hugging_face, "MPT": foundry}


def built(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MAKE[kind]()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def trained_alone(kind: str) -> tuple[Any, list[float]]:
    model, losses, data = built(kind), list[float](), Samples()
    optimizer = sgd(model)
    for step in range(STEPS):
        rows = [data[step * SIZE + row] for row in range(SIZE)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def trainer_of(kind: str, parallelism: Any, **kwargs: Any) -> Any:
    install()
    model = built(kind)
    settings = {"batch": SIZE, "parallelism_config": parallelism, **kwargs}
    return trainer_for(model, sgd(model), Samples(), **settings)


FORMS: dict[str, dict[str, Any]] = {
    "beside fsdp2": {"sequence_parallel": {"degree": 4}, "fsdp2": {}},
    "in fsdp2": {"fsdp2": {"sequence_parallel": {"degree": 4, "method": "gather_kv"}}},
    "and tp": {"sequence_parallel": 2, "tp": {"degree": 2}, "fsdp2": {}},
}


@pytest.mark.table("MPT-in fsdp2")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:The tokenizer was not provided")
@pytest.mark.filterwarnings("ignore:Propagating key_padding_mask")  # in LLM Foundry
@pytest.mark.world_size(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MAKE)
def test_trainer_reads_counts_and_trains_as_one_process(kind: str, form: str):
    alone, losses = trained_alone(kind)
    seen: list[float] = []
    trainer = trainer_of(kind, FORMS[form])

    for _ in range(STEPS):
        trainer.fit(duration="1ba")
        seen.append(float(trainer.state.total_loss_dict["loss/train/total"]))
    assert seen == pytest.approx(losses, abs=TOLERANCE * 10)
    assert trainer.state.timestamp.sample == STEPS * SIZE
    for (name, expected), got in zip(
        alone.named_parameters(), trainer.state.model.parameters(), strict=True
    ):
        whole = form_of(got).full(got)
        assert whole is not None
        assert (whole - expected).abs().max() <= TOLERANCE, name
    metric = trainer.state.train_metrics["LanguageCrossEntropy"]
    last = float(metric.compute())
    assert last == pytest.approx(losses[-1], abs=1e-5)


# --- Checkpoints and what changes gradients or weights, beside FSDP2 alone. ---

ALONE: dict[str, Any] = {}
DIVIDED: dict[str, Any] = {"sequence_parallel": 2}


def run(layout: dict[str, Any], item: Any, kind: str, *, fits: bool = True, **more: Any) -> Any:
    """Of rows that are equally long: FSDP2 alone gives each rank's rows the same weight."""
    install()
    model = built("Hugging Face", seed=9 if "load_path" in more else 0)
    trainer = trainer_for(
        model,
        adamw(model),
        Samples(kind="plain"),  # type: ignore[arg-type]
        batch=SIZE if layout else SIZE // 2,
        parallelism_config={**layout, "fsdp2": {"state_dict_type": kind}},
        algorithms=[item()] if item else [],
        **more,
    )
    if fits:
        trainer.fit()
    return trainer


class Keeper(Callback):
    """Keeps what a checkpoint in the middle has to hold."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == HALF:
            self.kept = whole_state(SimpleNamespace(state=state))  # type: ignore[arg-type]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert largest_difference(got, expected) <= TOLERANCE


ITEMS: dict[str, tuple[Any, str]] = {
    "none": (None, "sharded"),
    "EMA": (lambda: A.EMA(half_life="2ba"), "sharded"),
    "SWA": (lambda: A.SWA("0.1dur", "0.9dur", "1ba"), "full"),
}
MODELS = pytest.mark.filterwarnings("ignore:The tokenizer was not provided")
VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


@pytest.mark.table
@VIEWS
@MODELS
@pytest.mark.filterwarnings("ignore:SWA has known issues")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ITEMS)
def test_checkpoints_and_averages_go_to_fsdp2_alone_and_back(name: str, tmp_path: Path):
    item, kind = ITEMS[name]
    expected = run(ALONE, item, kind)
    for number, (first, other) in enumerate(((DIVIDED, ALONE), (ALONE, DIVIDED))):
        folder, keeper = tmp_path / str(number), Keeper()
        saving = {"save_folder": str(folder), "save_interval": f"{HALF}ba"}
        run(first, item, kind, callbacks=[keeper], **saving)
        file = folder / (f"ep0-ba{HALF}" if kind == "sharded" else f"ep0-ba{HALF}-rank0.pt")
        again = run(other, item, kind, fits=False, load_path=str(file))
        loaded = whole_state(again)
        assert keeper.kept.keys() == loaded.keys()
        assert any("exp_avg" in key for key in loaded)
        assert [key for key in loaded if not torch.equal(keeper.kept[key], loaded[key])] == []
        again.fit()
        assert again.state.timestamp.batch == STEPS
        assert_same(weights(again.state.model), weights(expected.state.model))
        if item:
            assert_same(averages_of(again), averages_of(expected))


CLIPS: dict[str, tuple[Any, ...]] = {
    "norm": ("norm", 0.05),
    "value": ("value", 1e-3),
    "adaptive": ("adaptive", 1e-3),
}


@pytest.mark.table
@VIEWS
@MODELS
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", CLIPS)
def test_clipping_is_that_of_fsdp2_alone(kind: str):
    def clip() -> A.GradientClipping:
        return A.GradientClipping(*CLIPS[kind])

    plain, expected, got = (
        weights(run(layout, item, "sharded").state.model)
        for layout, item in ((ALONE, None), (ALONE, clip), (DIVIDED, clip))
    )
    assert_same(got, expected)
    assert largest_difference(plain, expected) > 1e-4


@VIEWS
@MODELS
@pytest.mark.filterwarnings("ignore:Cannot split tensor of length")
@pytest.mark.world_size(2)
def test_microbatches_evaluation_and_data_that_ends_unevenly():
    found: list[tuple[dict[str, torch.Tensor], float]] = []
    for layout, size, microbatch in ((ALONE, SIZE // 2, 2), (DIVIDED, SIZE, 3)):
        few, others = Samples(STEPS * SIZE - 2, kind="plain"), Samples(SIZE + 2)
        trainer = run(
            layout,
            None,
            "sharded",
            train_dataloader=loader_of(few, size),  # type: ignore[arg-type]
            eval_dataloader=loader_of(others, size),  # type: ignore[arg-type]
            device_train_microbatch_size=microbatch,
        )
        assert trainer.state.timestamp.sample == len(few)
        trainer.eval()
        assert trainer.state.eval_timestamp.sample == len(others)
        metric = trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"]
        found.append((weights(trainer.state.model), float(metric.compute())))
    assert_same(found[1][0], found[0][0])
    assert found[1][1] == pytest.approx(found[0][1], abs=TOLERANCE * 10)


class RunsOut(Callback):
    """Memory runs out on the last rank at a collective, while microbatches of 4 are tried."""

    def __init__(self, collective: str, number: int, after: bool) -> None:
        self.collective, self.number, self.after = collective, number, after
        self.patch = pytest.MonkeyPatch()
        self.calls = 0

    def epoch_start(self, state: State, logger: Logger) -> None:
        call = getattr(dist, self.collective)

        @functools.wraps(call)
        def failing(*args: Any, **kwargs: Any) -> Any:
            exit_ = joint_exit_of(torch.device("cpu"))
            assert exit_ is not None
            fails = False
            if exit_.attempting and state.device_train_microbatch_size == SIZE:
                self.calls += 1
                last = dist.get_rank() == dist.get_world_size() - 1
                fails = last and self.calls == self.number
            found = call(*args, **kwargs) if self.after or not fails else None
            if fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return found

        self.patch.setattr(dist, self.collective, failing)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self.patch.undo()


@pytest.mark.table("ulysses")
@VIEWS
@MODELS
@pytest.mark.filterwarnings("ignore:CUDA out of memory or excessive")
@pytest.mark.world_size(2, timeout=300)
@pytest.mark.parametrize("method", ["ulysses", "gather_kv"])
def test_microbatches_that_are_found_are_those_that_are_given(method: str):
    """Memory runs out between the ranks of a group, in the first step's check, and later."""
    layout = {"sequence_parallel": {"degree": 2, "method": method}}
    expected = weights(run(layout, None, "sharded", device_train_microbatch_size=2).state.model)
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    exchange = "all_to_all_single" if method == "ulysses" else gather
    places = [(exchange, 1, True), (exchange, 6, False), ("all_to_all_single", 8, True)]
    for place in (*places, ("all_gather_object", 1, True), ("all_reduce", 5, False)):
        memory = RunsOut(*place)
        trainer = run(
            layout, None, "sharded", device_train_microbatch_size="auto", callbacks=[memory]
        )
        assert memory.calls >= memory.number, place
        assert trainer.state.device_train_microbatch_size == 2
        assert_same(weights(trainer.state.model), expected)


@pytest.mark.table("MixUp")
@MODELS
@pytest.mark.filterwarnings("ignore:.* has known issues")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("item", [A.SelectiveBackprop, A.MixUp])
def test_what_draws_on_each_rank_is_refused(item: Callable[[], Any]):
    with pytest.raises(ConfigError, match=r"and sequence parallelism .* draws on each rank"):
        run(DIVIDED, item, "sharded")


@pytest.mark.matrix
@VIEWS
@MODELS
@pytest.mark.world_size(2)
def test_a_model_that_composer_compiles():
    model, losses = trained_alone("Hugging Face")
    with fresh_compiler():
        compiled = {"compile_config": {"backend": "aot_eager"}}
        trainer = trainer_of("Hugging Face", {"sequence_parallel": 2, "fsdp2": {}}, **compiled)
        trainer.fit()
        assert graphs() > 0
    assert_same(weights(trainer.state.model), weights(model))
    assert float(trainer.state.total_loss_dict["loss/train/total"]) == pytest.approx(losses[-1])
