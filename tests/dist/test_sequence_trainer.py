"""Composer's Trainer with sequence parallelism: data, loss, metrics, counts, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel, HuggingFaceModel
from torch import nn
from torch.utils.data import Dataset

from composer_fsdp2 import install
from composer_fsdp2.parallel.row_order import order_of
from tests.dist.test_sequence_parallel import SIZES, batches, llama
from tests.support.parity import TOLERANCE, full
from tests.support.training import trainer_for

STEPS, SIZE = 4, 4


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Rows of the batches, padded."""

    def __init__(self, count: int = STEPS * SIZE) -> None:
        self.rows = [
            {name: tensor[row] for name, tensor in batch.items()}
            for batch in batches("padded", STEPS)
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

    sizes = {"d_model": 32, "n_heads": 8, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}
    return ComposerMPTCausalLM(
        vocab_size=SIZES["vocab_size"],
        loss_fn="torch_crossentropy",
        attn_config={"attn_impl": "torch"},
        **sizes,
    )


MAKE = {"Hugging Face": hugging_face, "MPT": foundry}


def built(kind: str) -> Any:
    torch.manual_seed(0)
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


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:The tokenizer was not provided")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # in LLM Foundry
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
        order, whole = order_of(got), full(got)
        whole = whole if order is None else order.to_model(whole)
        assert (whole - expected).abs().max() <= TOLERANCE, name
    metric = trainer.state.train_metrics["LanguageCrossEntropy"]
    last = float(metric.compute())
    assert last == pytest.approx(losses[-1], abs=1e-5)
