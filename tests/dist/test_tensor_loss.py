"""Cross entropy where each rank of a tensor group has a part of the vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.metrics import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from composer.models import HuggingFaceModel
from torch import distributed as dist
from torch.utils.data import Dataset

from composer_fsdp2 import install
from composer_fsdp2.blocks.vocabulary_loss import Statistics, VocabularyPart, parallel_cross_entropy
from composer_fsdp2.errors import PlanError
from composer_fsdp2.patches import install_for_foundry
from tests.dist.test_tensor_parallel import (
    LENGTH,
    SIZE,
    VOCAB,
    assert_same_gradients,
    global_batches,
    llama,
    mean,
    of_this_group,
    prepared,
)
from tests.support.alive import Alive
from tests.support.parity import OPTIMIZERS, TOLERANCE, assert_close, assert_same_values
from tests.support.training import loader_of, trainer_for

VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


@pytest.mark.world_size(4)
@pytest.mark.parametrize("total", [12, 10, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_gradient_and_prediction_are_those_of_whole_logits(total: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    whole = (torch.randn(9, total, generator=generator, dtype=torch.float64) * 9).to(dtype)
    whole[3, 1:] = float("-inf")
    targets = torch.randint(total, (9,), generator=generator)
    targets[:2], targets[3] = -7, 0
    step = -(-total // 4)
    start = min(dist.get_rank() * step, total)
    group = dist.group.WORLD
    assert group is not None
    part = VocabularyPart(group, start, total)
    own = whole[:, start : start + step].clone().requires_grad_()
    known = Statistics.of(own, targets, -7, part)
    got = parallel_cross_entropy(own, targets, -7, part, known)
    upstream = torch.arange(1.0, 10.0).to(dtype)
    got.backward(upstream)
    exact = whole.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=-7, reduction="none")
    expected.backward(upstream.double())
    assert own.grad is not None
    assert exact.grad is not None
    assert got.dtype == own.grad.dtype == dtype
    rounding = torch.finfo(dtype).eps
    theirs = exact.grad[:, start : start + step]
    assert (got.double() - expected).abs().max() <= 2 * rounding * expected.abs().max()
    # An exponential of e is off by e times the rounding of what was computed.
    computed = min(rounding, torch.finfo(torch.float32).eps)
    allowed = 2 * rounding * theirs.abs() + 64 * computed * upstream.double().unsqueeze(1)
    assert ((own.grad.double() - theirs).abs() <= allowed).all()
    assert torch.equal(known.predicted, whole.argmax(-1))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("target", [-1, 4])
def test_a_target_that_is_no_class_is_an_error(target: int):
    group = dist.group.WORLD
    assert group is not None
    part = VocabularyPart(group, 2 * dist.get_rank(), 4)
    with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        Statistics.of(torch.zeros(1, 2), torch.tensor([target]), -100, part)


# --- Models with their own loss ---


def batch_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same number of targets in every sample, so that means of groups are the mean of all."""
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


CASES = {
    (tied, degree, chunks)
    for tied, degree, chunks in ((False, 2, 1), (False, 2, 3), (True, 2, 1), (True, 4, 3))
}


@pytest.mark.table
@VIEWS
@pytest.mark.world_size(4)
@pytest.mark.parametrize(("tied", "degree", "chunks"), sorted(CASES))
def test_the_models_own_loss_is_that_of_one_process(tied: bool, degree: int, chunks: int):
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=tied, num_key_value_heads=4)
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1], tensor_parallel=degree, chunked_loss={"chunks": chunks})
    groups = dist.get_world_size() // degree
    for step, ids in enumerate(global_batches()):
        # The number of targets of all groups, as transformers' own Trainer counts them.
        counted = {"num_items_in_batch": SIZE * (LENGTH - 2)} if step % 2 else {}
        expected = oracle(**batch_of(ids), **counted).loss
        got = model(**batch_of(of_this_group(ids, degree)), **counted).loss
        got = got * groups if counted else got
        expected.backward()
        got.backward()
        assert_close(f"loss of step {step}", expected.detach(), mean(got))
        if step == 0:
            assert_same_gradients(oracle, model)
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_foundrys_loss_is_that_of_one_process():
    pytest.importorskip("llmfoundry")
    install()
    torch.manual_seed(0)
    model = foundrys_mpt()
    oracle = copy.deepcopy(model)
    pair = [OPTIMIZERS["sgd"](m.parameters()) for m in (oracle, model)]
    prepared(model, pair[1], chunked_loss={"chunks": 2})
    for step, ids in enumerate(global_batches(5)):
        losses = []
        for one, part in ((oracle, ids), (model, of_this_group(ids))):
            batch = batch_of(part)
            losses.append(one.loss(one(batch), batch))
            losses[-1].backward()
        assert_close(f"loss of step {step}", losses[0].detach(), mean(losses[1]))
        if step == 0:
            assert_same_gradients(oracle, model)
        for one in pair:
            one.step()
            one.zero_grad()
    assert_same_values(oracle, model)


def foundrys_mpt() -> Any:
    """With a head of its own, whose logits are scaled, and Foundry's loss."""
    from llmfoundry.models.mpt import ComposerMPTCausalLM

    install_for_foundry()

    return ComposerMPTCausalLM(
        d_model=16,
        n_heads=4,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=LENGTH,
        vocab_size=VOCAB,
        attn_config={"attn_impl": "torch"},
        tie_word_embeddings=False,
        logit_scale=0.5,
        loss_fn="torch_crossentropy",
    )


# --- Composer's Trainer: metrics, evaluation, generation ---


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """The samples of two global batches, labelled with themselves."""

    def __init__(self) -> None:
        self.ids = global_batches(2).flatten(0, 1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_metrics_and_evaluation_are_those_of_whole_logits():
    install()
    found: list[list[float]] = []
    for chunked in (None, {"chunks": 2}, {"chunks": 1}):
        torch.manual_seed(0)
        model = HuggingFaceModel(
            llama(),
            metrics=[MaskedAccuracy(-100), LanguageCrossEntropy(), LanguagePerplexity()],
            use_logits=True,
            shift_labels=True,
        )
        data: Any = Labelled()
        trainer = trainer_for(
            model,
            OPTIMIZERS["adamw"](model.parameters()),
            data,
            parallelism_config={"fsdp2": {"chunked_loss": chunked}, "tp": {"degree": 2}},
            eval_dataloader=loader_of(data, 4),
        )
        trainer.fit()
        trainer.eval()
        metrics = [trainer.state.train_metrics, *trainer.state.eval_metrics.values()]
        found.append([m.compute().item() for held in metrics for m in (held or {}).values()])
        trainer.close()
    assert len(found[0]) == 6
    for others in found[1:]:
        assert others == pytest.approx(found[0], abs=10 * TOLERANCE)


@VIEWS
@pytest.mark.world_size(4)
def test_what_else_reads_logits_is_an_error_on_every_rank_and_evaluation_has_them():
    model = prepared(llama(), None, chunked_loss={"chunks": 2})
    ids = of_this_group(global_batches(1)[0])
    with pytest.raises(PlanError, match=r"log_softmax was asked of the logits of 'lm_head'"):
        model(ids, use_cache=False).logits.log_softmax(-1)
    logits = model.eval()(ids, use_cache=False).logits
    assert logits.shape[-1] == VOCAB
    assert logits.log_softmax(-1).isfinite().all()


# --- Memory, and low precision ---


@pytest.mark.table("2")
@VIEWS
@pytest.mark.world_size(4)
@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_holds_its_part_of_the_logits(degree: int):
    """Bytes alive from the head to the end of backward, over those of the whole logits in fp32."""
    peaks: dict[int, float] = {}
    ids = torch.randint(2, 2048, (2, 128), generator=torch.Generator().manual_seed(1))
    for chunks in (0, 1, 4):
        model = llama(vocab_size=2048, num_key_value_heads=4, max_position_embeddings=128)
        settings = {"chunked_loss": {"chunks": chunks}} if chunks else {}
        prepared(model, None, tensor_parallel=degree, **settings)
        for _ in range(2):
            with Alive() as alive:
                model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()
        peaks[chunks] = alive.peak / (ids.numel() * 2048 * 4)
    assert peaks[0] > 3
    assert peaks[1] < (3 + 1) / degree
    assert peaks[4] < 0.6 * peaks[1]


@pytest.mark.matrix
@VIEWS
@pytest.mark.world_size(4)
def test_bf16_computes_as_whole_logits_do():
    losses: list[list[float]] = []
    for chunks in (0, 1, 3):
        torch.manual_seed(0)
        model = llama(tie_word_embeddings=True)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        settings: dict[str, Any] = {"chunked_loss": {"chunks": chunks}} if chunks else {}
        settings["mixed_precision"] = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
        prepared(model, optimizer, **settings)
        losses.append([])
        for ids in global_batches(5):
            loss = model(**batch_of(of_this_group(ids))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(mean(loss.float()).item())
    # The first loss is computed in fp32, of the same logits in bf16.
    assert losses[1][0] == pytest.approx(losses[0][0], abs=1e-6)
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], abs=5e-3)
