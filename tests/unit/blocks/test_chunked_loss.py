"""A head and its loss in chunks: the same numbers, one chunk in memory, and nothing read twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_fsdp2.blocks.chunked_loss import (
    ChunkedLogits,
    ChunkedLoss,
    ChunkingPlan,
    plan_chunking,
)
from composer_fsdp2.config.blocks import ChunkingSpec
from composer_fsdp2.config.schema import FSDP2Config
from composer_fsdp2.errors import PlanError
from composer_fsdp2.guards.unused_head import UnusedHead
from composer_fsdp2.plan.mesh_shape import MeshShape
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.plan.rules import by_name, root_rule
from composer_fsdp2.plan.wrap_plan import WrapPlan
from composer_fsdp2.step.run import Run
from tests.support.alive import Alive

WIDTH, VOCABULARY = 8, 64


def as_hugging_face(logits: Tensor, labels: Tensor) -> Tensor:
    logits, labels = logits.float(), F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)


def as_mpt(logits: Tensor, labels: Tensor) -> Tensor:
    logits = 3.0 * torch.tanh(logits / 3.0)
    logits *= 0.5
    targets = torch.roll(labels, -1).view(-1)
    losses = nn.CrossEntropyLoss(ignore_index=-100, reduction="none")
    return losses(logits.reshape(-1, logits.size(-1)), targets).sum() / (targets != -100).sum()


def as_older_models(logits: Tensor, labels: Tensor) -> Tensor:
    shifted, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].reshape(-1)
    shifted = shifted.to(torch.float32) * 2
    return F.cross_entropy(shifted.flatten(0, 1), labels, reduction="sum")


class Model(nn.Module):
    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor] = as_hugging_face,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary)
        self.loss = loss

    def logits(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embedding(tokens).tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        labels = tokens.clone()
        labels[0, :3] = -100
        return self.loss(self.logits(tokens), labels)


class Shared(nn.Embedding):
    """Looks up, or unembeds, as MPT's does."""

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        return F.linear(input, self.weight) if unembed else super().forward(input)


class Tied(Model):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = as_mpt) -> None:
        super().__init__(loss)
        self.embedding, self.lm_head = Shared(VOCABULARY, WIDTH), None

    def get_output_embeddings(self) -> nn.Module:
        return self.embedding

    def logits(self, tokens: Tensor) -> Tensor:
        return self.embedding(self.embedding(tokens).tanh(), True)


def chunked(model: Model, chunks: int = 4) -> Model:
    plan = plan_chunking(ModuleTree.read(model), ChunkingSpec(chunks=chunks))
    ChunkedLoss().apply(ModuleTree.read(model), plan)
    return model


def some_tokens(rows: int = 2, length: int = 9) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (rows, length), generator=drawn)


@pytest.mark.table("Tied-as_mpt-2", "Tied-as_older_models-64")
@pytest.mark.parametrize("chunks", [2, 5, 64])
@pytest.mark.parametrize("loss", [as_hugging_face, as_mpt, as_older_models])
@pytest.mark.parametrize("make", [Model, Tied])
def test_the_numbers_are_the_same(make, loss, chunks):
    torch.manual_seed(0)
    whole = make(loss)
    cut = chunked(copy.deepcopy(whole), chunks)
    found = []
    for model in (whole, cut):
        value = model(some_tokens())
        value.backward()
        found.append([value, *(p.grad for p in model.parameters())])
    for expected, got in zip(*found, strict=True):
        assert (expected - got).abs().max() <= 1e-6 * max(1.0, expected.abs().max())
    assert list(cut.state_dict()) == list(whole.state_dict())


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_that_of_the_head(inside):
    """The loss may be computed outside of it, as Composer's `loss` could be."""
    torch.manual_seed(0)
    whole = Model()
    cut = chunked(copy.deepcopy(whole), 3)
    found = []
    for model in (whole, cut):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(some_tokens())
            value = as_hugging_face(logits, some_tokens()) if inside else None
        assert logits.dtype == torch.bfloat16
        value = as_hugging_face(logits, some_tokens()) if value is None else value
        value.backward()
        found.append([value, *(p.grad for p in model.parameters())])
    for expected, got in zip(*found, strict=True):
        assert got.dtype == expected.dtype
        assert (expected - got).abs().max() <= 2**-6 * max(1.0, expected.abs().max())
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.matrix
def test_one_chunk_of_logits_exists_at_a_time():
    peaks, held = {}, {}
    tokens, vocabulary = some_tokens(2, 256), 1024
    for chunks in (None, 4, 16):
        model = Model(vocabulary=vocabulary)
        model = model if chunks is None else chunked(model, chunks)
        with Alive() as alive:
            loss = model(tokens)
            held[chunks] = alive.bytes()
            loss.backward()
        peaks[chunks] = alive.peak
    logits = tokens.numel() * vocabulary * 4
    assert held[None] >= logits
    assert held[4] == held[16] < 0.05 * logits
    assert peaks[None] > 3 * logits
    assert peaks[4] < (4 / 4 + 0.1) * logits
    assert peaks[16] < (4 / 16 + 0.1) * logits


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_no_chunk_is_empty(tokens: int):
    """More chunks than tokens: a head for each that has some, and one where there are none."""
    model = Model()
    computed: list[int] = []
    run = model.lm_head.forward
    model.lm_head.forward = lambda hidden: computed.append(len(hidden)) or run(hidden)
    chunked(model, 99)
    logits = model.logits(some_tokens(1, tokens))
    assert computed == [0]  # for its shape
    found = F.cross_entropy(logits.view(-1, VOCABULARY), some_tokens(1, tokens).view(-1))
    found.backward()
    assert computed[1:] == ([1] * tokens or [0]) * 2  # and again in backward


def test_evaluation_and_generation_get_logits():
    torch.manual_seed(0)
    whole = Model()
    cut = chunked(copy.deepcopy(whole))
    for change in (nn.Module.eval, nn.Module.train):
        change(cut)
        with torch.no_grad():
            assert torch.equal(cut.logits(some_tokens()), whole.logits(some_tokens()))
    assert type(cut.eval().logits(some_tokens())) is Tensor


@pytest.mark.table("False")
@pytest.mark.parametrize("in_one_piece", [True, False])
def test_metrics_of_training_read_what_the_loss_computed(in_one_piece):
    torch.manual_seed(0)
    model = Model()
    if not in_one_piece:
        model.embedding.register_forward_hook(lambda _m, _i, out: out.mT.contiguous().mT)
    expected = model.logits(some_tokens())
    labels = torch.roll(some_tokens(), -1)
    logits = chunked(model).logits(some_tokens())
    F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)).backward()
    assert isinstance(logits, Tensor)
    assert logits.shape == expected.shape
    assert (logits.ndim, logits.dtype, logits.device) == (3, expected.dtype, expected.device)
    with torch.no_grad():
        assert torch.equal(torch.argmax(logits, dim=-1), expected.argmax(-1))
        again = F.cross_entropy(logits.view(18, -1), labels.view(-1), reduction="sum")
    total = F.cross_entropy(expected.view(18, -1), labels.view(-1), reduction="sum")
    torch.testing.assert_close(again, total)


@pytest.mark.parametrize("differs", ["temperature", "ignored target", "nothing"])
def test_another_loss_of_the_same_rows_is_computed_anew(differs: str):
    """Of the same targets: a metric beside a loss that scales its logits, or leaves others out."""
    torch.manual_seed(0)
    model = Model()
    expected = model.logits(some_tokens()).view(-1, VOCABULARY)
    logits = chunked(model).logits(some_tokens()).view(-1, VOCABULARY)
    targets = some_tokens().view(-1)
    ignored = int(targets[0]) if differs == "ignored target" else -100
    scaled = logits / (2 if differs == "temperature" else 1)
    F.cross_entropy(scaled, targets, ignore_index=ignored)
    computed: list[Tensor] = []
    run = logits._call.run
    logits._call.run = lambda part: computed.append(part) or run(part)
    same = logits / 1  # another object with the same changes
    with torch.no_grad():
        metric = F.cross_entropy(same, targets)
    torch.testing.assert_close(metric, F.cross_entropy(expected, targets))
    assert len(computed) == (0 if differs == "nothing" else 4)


def test_the_likeliest_classes_are_those_of_the_rows_of_the_loss():
    """And not of other rows that begin where these do."""
    logits = chunked(Model()).logits(some_tokens()).view(-1, VOCABULARY)
    F.cross_entropy(logits[::2], some_tokens().view(-1)[::2])
    with pytest.raises(PlanError, match="argmax was asked of the logits"):
        logits[:9].argmax(-1)


def test_a_change_in_place_of_a_view_is_an_error():
    """It would change the logits in torch, or a part of them."""
    logits = chunked(Model()).logits(some_tokens())
    assert logits.float() is logits  # as in torch, so that a change in place is one of both
    view = logits.view(-1, VOCABULARY)
    for shared in (view, logits):
        with pytest.raises(PlanError, match="mul_ was asked of the logits"):
            shared.mul_(3.0)


def test_another_loss_after_backward_is_an_error():
    logits = chunked(Model()).logits(some_tokens()).view(-1, VOCABULARY)
    targets = some_tokens().view(-1)
    F.cross_entropy(logits, targets).backward()
    with pytest.raises(PlanError, match=r"Another loss of the logits of 'lm_head'.*after backward"):
        F.cross_entropy(logits, targets + 1)
    with pytest.raises(PlanError, match="Another loss"):
        F.cross_entropy(logits, targets)  # with gradients, which could reach nothing


@pytest.mark.table(
    "<lambda>1",
    "<lambda>2",
    "<lambda>3",
    "<lambda>4",
    "<lambda>5",
    "<lambda>7",
    "<lambda>12",
    "<lambda>13",
    "<lambda>14",
    "<lambda>15",
    "<lambda>16",
    "<lambda>17",
)
@pytest.mark.parametrize(
    "read",
    [
        torch.softmax,
        lambda x, d: x.log_softmax(d),
        lambda x, d: x.argmax(d),  # before the loss
        lambda x, d: x[..., :3],
        lambda x, d: x[0],
        lambda x, d: x.view(-1),
        lambda x, d: x.flatten(),
        lambda x, d: x + 1,
        lambda x, d: x * torch.ones(VOCABULARY),
        lambda x, d: x.item(),
        lambda x, d: x.detach(),
        lambda x, d: torch.cat([x, x]),
        lambda x, d: F.cross_entropy(x.transpose(1, 2), some_tokens()),
        lambda x, d: F.cross_entropy(x.view(18, -1), some_tokens().view(-1), label_smoothing=0.1),
        lambda x, d: F.cross_entropy(x.view(18, -1), torch.rand(18, VOCABULARY)),
        lambda x, d: F.cross_entropy(torch.rand(18, VOCABULARY), x.view(18, -1)),
        lambda x, d: copy.deepcopy(x),
        lambda x, d: x.numpy(),
        lambda x, d: x.tolist(),
    ],
)
def test_whatever_else_reads_them_is_an_error(read):
    logits = chunked(Model()).logits(some_tokens())
    with pytest.raises(PlanError, match=r"was asked of the logits of 'lm_head'.*Take out"):
        read(logits, -1)


def test_the_error_names_an_attribute():
    logits = chunked(Model()).logits(some_tokens())
    with pytest.raises(PlanError, match=r"Tensor\.data was asked of the logits of 'lm_head'"):
        logits.data.sum()


def test_outputs_can_be_printed():
    logits = chunked(Model()).logits(some_tokens())
    assert repr({"logits": logits}).startswith("{'logits': ChunkedLogits((")


class Fused(Model):
    """Reads the weight of its head, as a fused loss does."""

    def logits(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens).tanh(), self.lm_head.weight)


def test_a_model_that_calls_no_head_is_told_of_once():
    model = chunked(Fused())
    run = Run(
        model=model,
        tree=ModuleTree.read(model),
        plan=WrapPlan(()),
        shape=MeshShape(shard=1),
        settings=FSDP2Config(chunked_loss=ChunkingSpec(chunks=4)),
        device=torch.device("cpu"),
        units={},
    )
    run.start([UnusedHead])
    model.eval()(some_tokens())
    with pytest.warns(UserWarning, match=r"chunked_loss has no effect.*'lm_head'.*Take"):
        model.train()(some_tokens())
    model(some_tokens())  # warnings are errors


def test_what_watches_for_gradients_hears_before_the_first_chunk():
    """So FSDP has the weights of the head, and fetches those before it, while chunks compute."""
    model, order = chunked(Model()), []
    logits = model.logits(some_tokens())
    assert logits.requires_grad
    logits.register_hook(lambda grad: order.append("watched"))
    hidden = logits._hidden
    hidden.register_hook(lambda grad: order.append("gradient"))
    run = logits._call.run
    logits._call.run = lambda part: order.append("chunk") or run(part)
    loss = as_hugging_face(logits, some_tokens())
    order.clear()
    loss.backward()
    assert order == ["watched", *["chunk"] * 4, "gradient"]


def test_what_is_chosen():
    both = nn.ModuleDict({"a": Model(), "b": Tied()})
    spec = ChunkingSpec(chunks=2)
    assert plan_chunking(ModuleTree.read(both), spec).heads == ("a.lm_head", "b.embedding")
    by_pattern = ChunkingSpec(chunks=2, names=("*.lm_head",))
    plan = plan_chunking(ModuleTree.read(both), by_pattern)
    assert plan == ChunkingPlan(heads=("a.lm_head",), chunks=2)
    assert str(plan) == "loss in 2 chunks: a.lm_head"
    with pytest.raises(PlanError, match="names no output head"):
        plan_chunking(ModuleTree.read(nn.Linear(2, 2)), spec)
    with pytest.raises(PlanError, match=r"'out' of chunked_loss\.names|chunked_loss\.names"):
        plan_chunking(ModuleTree.read(both), ChunkingSpec(chunks=2, names=("out",)))


def test_the_unit_that_owns_the_head_keeps_its_weights():
    spec = ChunkingSpec(chunks=2)
    for model, owner in ((Model(), "lm_head"), (Tied(), "embedding"), (Model(), "")):
        rules = [by_name(owner), root_rule] if owner else [root_rule]
        for freed in (True, 2):
            plan = plan_wrapping(model, rules, reshard_after_forward=freed)
            kept = ChunkedLoss().adjust_units(plan_chunking(ModuleTree.read(model), spec), plan)
            for before, unit in zip(plan.units, kept.units, strict=True):
                expected = False if unit.module == owner else before.reshard_after_forward
                assert unit == replace(before, reshard_after_forward=expected)


def test_a_unit_inside_the_head_is_an_error():
    model = Model()
    model.lm_head = nn.Sequential(model.lm_head, nn.Linear(VOCABULARY, VOCABULARY))
    plan = plan_wrapping(model, [by_name("lm_head.0"), root_rule])
    with pytest.raises(PlanError, match=r"'lm_head\.0' inside the head 'lm_head' is an FSDP unit"):
        ChunkedLoss().adjust_units(
            plan_chunking(ModuleTree.read(model), ChunkingSpec(chunks=2)), plan
        )


def test_a_head_that_is_called_in_another_way():
    model = chunked(Model())
    with pytest.raises(PlanError, match="is not called with the hidden states as its first"):
        model.lm_head(input=torch.ones(1, 2, WIDTH, requires_grad=True))
    assert isinstance(model.lm_head(torch.ones(1, 2, WIDTH)), ChunkedLogits)
