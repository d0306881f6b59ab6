"""Every rank starts from the same weights: rank 0's, or those of the model's own initialisers."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from llmfoundry.models.hf import BaseHuggingFaceModel
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from composer_fsdp2 import PlanError, prepare_fully_shard, ranks
from composer_fsdp2.torch_private.collectives import Collective, around_collectives
from tests.support.models import WIDTH, TinyLM, batches, llama_config
from tests.support.pairs import parametrize_by_turns
from tests.support.parity import (
    OPTIMIZERS,
    check_parity_from_here,
    full,
    gathered,
    model_loss,
)

Make = Callable[[], nn.Module]


class Tables(nn.Module):
    """A block with every kind of tensor that is not a parameter."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("kept", torch.empty(size))
        self.register_buffer("hidden", torch.empty(size), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.empty(size, dtype=torch.bool), persistent=False)
        self.register_buffer("scale", nn.Parameter(torch.empty(size), requires_grad=False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.kept.uniform_(0.5, 1.5)
            self.hidden.copy_(torch.arange(self.size) / self.size)
            self.seen.zero_()
            self.mask.copy_(torch.arange(self.size) % 3 > 0)
            self.scale.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kept * self.mask * self.scale + self.hidden


@dataclass(frozen=True)
class Held:
    scale: torch.Tensor


class Pair(NamedTuple):
    cos: torch.Tensor
    inner: dict[str, torch.Tensor]


class InContainers(nn.Module):
    """Keeps tensors that are no buffers in containers of every kind, one inside the other."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.size = size
        self.gain = nn.Parameter(torch.ones(size))
        scale = torch.arange(1.0, size + 1) / size
        self.scales = [scale, scale * 2]
        self.tables = {"a": Pair(scale.cos(), {"b": scale.sin()}), 1: deque([(scale > 0.5,)])}
        self.same = self.scales  # another way to one list
        self.held = SimpleNamespace(of=Held(scale * 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, inner = self.tables["a"]
        x = x * self.gain * self.scales[0] + self.same[1] * cos + inner["b"]
        return x * self.tables[1][0][0] + self.held.of.scale


class WithTables(TinyLM):
    def __init__(self, tie: str = "two modules") -> None:
        super().__init__(tie)
        self.extra = Tables()


class Uninitialised(nn.Module):
    """Its parameter is set by its constructor, whose arguments nobody can read back."""

    def __init__(self, how_wide: int, fill: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((how_wide,), fill))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def llama(tied: bool = True) -> LlamaForCausalLM:
    return LlamaForCausalLM(llama_config(tied, pad_token_id=0))


def build(make: Make, device: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return make()


def on_meta(make: Make, seed: int = 0) -> nn.Module:
    return build(make, "meta", seed)


def parameters_on_meta(make: Make, seed: int = 0) -> nn.Module:
    """Parameters on meta, buffers real: accelerate's `init_empty_weights()`."""
    model = build(make, "cpu", seed)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                moved.setdefault(param, nn.Parameter(param.to("meta")))
                module._parameters[name] = moved[param]
    return model


def sharded(model: nn.Module, config: dict[str, Any] | None = None) -> nn.Module:
    prepare_fully_shard(model, None, config or {})
    return model


MODELS: dict[str, Make] = {
    "tables": WithTables,
    "all layers": functools.partial(TinyLM, "all layers"),
    "module registered twice": functools.partial(TinyLM, "module registered twice"),
    "llama": llama,
    "llama, untied": functools.partial(llama, tied=False),
}


@pytest.mark.table("tables-meta-sgd")
@pytest.mark.world_size(2)
@parametrize_by_turns(name=MODELS, others=("meta", "cpu"), optimizer=OPTIMIZERS)
def test_rank_0_wins(name: str, others: str, optimizer: str):
    rank = dist.get_rank()
    make = MODELS[name]
    model = sharded(build(make, "cpu" if rank == 0 else others, seed=rank))
    expected = build(make, "cpu", seed=0)
    _assert_equal(gathered(expected), gathered(model))
    assert _ties(model) == _ties(expected)
    _assert_sharded(model)
    check_parity_from_here(model, expected, optimizer)


@pytest.mark.table("all layers-parameters_on_meta-adamw")
@pytest.mark.world_size(2)
@parametrize_by_turns(name=MODELS, make_meta=(on_meta, parameters_on_meta), optimizer=OPTIMIZERS)
def test_all_on_meta(name: str, make_meta: Callable[..., nn.Module], optimizer: str):
    make = MODELS[name]
    model = sharded(make_meta(make, seed=dist.get_rank()))
    expected = build(make, "cpu", seed=0)
    assert not any(tensor.is_meta for tensor in _tensors(model))
    assert all(full(tensor).isfinite().all() for tensor in _tensors(model))
    assert _ties(model) == _ties(expected)
    _assert_sharded(model)
    _assert_initialised_alike(expected, model)
    check_parity_from_here(model, expected, optimizer)


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tie", ["none", "two modules", "all layers", "module registered twice"])
def test_units_may_cut_through_ties(tie: str):
    make = functools.partial(TinyLM, tie)
    policy = {"names": ["re:blocks\\.\\d+", "head"], "embeddings": True}
    model = sharded(on_meta(make), {"wrap_policy": policy})
    check_parity_from_here(model, build(make, "cpu"))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_rotary_tables_and_pad_row(start: str):
    model = sharded(build(llama, start))
    expected = build(llama, "cpu")
    rotary, expected_rotary = model.model.rotary_emb, expected.model.rotary_emb
    assert torch.equal(rotary.inv_freq, expected_rotary.inv_freq)
    assert torch.equal(rotary.original_inv_freq, expected_rotary.original_inv_freq)
    assert not full(model.model.embed_tokens.weight)[0].any()


@pytest.mark.world_size(2)
def test_llama_from_meta_trains():
    model = sharded(build(llama, "meta"))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    losses = []
    for batch in batches(10, 4):
        loss = model_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())


@pytest.mark.table("cpu-llama", "meta-tables")
@pytest.mark.parametrize("name", ["tables", "llama"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_do_not_depend_on_the_number_of_ranks(
    name: str, device: str, ranks: Callable[..., list[Any]]
):
    results = [ranks(size, _weights, name, device) for size in (1, 2, 4)]
    first = results[0][0]
    for weights in (rank for result in results for rank in result):
        _assert_equal(first, weights)


def _weights(name: str, device: str) -> dict[str, torch.Tensor]:
    return gathered(sharded(build(MODELS[name], device, seed=11)))


@pytest.mark.world_size(2)
def test_ranks_with_the_same_seed_keep_drawing_the_same_numbers():
    model = on_meta(WithTables)
    sharded(model)
    drawn = [torch.empty(3) for _ in range(2)]
    dist.all_gather(drawn, torch.rand(3))
    assert torch.equal(*drawn)


def _in_containers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), InContainers())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "meta")])
def test_tensors_in_containers_have_values(devices: tuple[str, str]):
    model = sharded(build(_in_containers, devices[dist.get_rank()], seed=dist.get_rank()))
    expected = build(_in_containers, "cpu")
    if devices[0] == "meta":
        expected[0].load_state_dict(
            {name: full(param) for name, param in model[0].named_parameters()}
        )
    assert model[1].same is model[1].scales
    x = torch.rand(3, WIDTH)
    assert torch.equal(model(x), expected(x))


@pytest.mark.world_size(2)
def test_only_rank_0_on_meta_is_an_error():
    model = build(WithTables, "meta" if dist.get_rank() == 0 else "cpu")
    with pytest.raises(PlanError, match=r"Rank 0 holds the model on meta .* and rank 1 does not"):
        sharded(model)
    _in_step()


@pytest.mark.world_size(2)
def test_rank_0_partly_on_meta_is_an_error_unless_all_are():
    make = parameters_on_meta if dist.get_rank() == 0 else on_meta
    with pytest.raises(PlanError, match=r"some of it\) and rank 1 does not \(all of it"):
        sharded(make(WithTables))
    _in_step()


@pytest.mark.world_size(2)
def test_what_nothing_initialises_is_named():
    def make() -> nn.Module:
        model = TinyLM()
        model.blocks[1].gain = Uninitialised(WIDTH, 2.0)
        return model

    with pytest.raises(PlanError, match=r"Nothing initialises 'blocks\.1\.gain\.gain'"):
        sharded(build(make, "meta"))
    _in_step()


class Scaled(nn.Module):
    """Its parameter depends on an argument that has a default and is not kept."""

    def __init__(self, width: int, start: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@pytest.mark.world_size(2)
def test_a_default_stands_for_no_value_that_nobody_keeps():
    def make() -> nn.Module:
        model = TinyLM()
        model.extra = Scaled(WIDTH, start=0.1)
        return model

    with pytest.raises(PlanError, match=r"Nothing initialises 'extra\.gain'.* keep the arguments"):
        sharded(build(make, "meta"))
    model = build(make, "meta")
    model.extra.start = 0.1  # `eps` is not kept, and no tensor depends on it
    sharded(model)
    assert (full(model.extra.gain) == 0.1).all()


class WithMask(Uninitialised):
    """Its constructor sets the mask too, and its initialiser the parameter alone."""

    def __init__(self, how_wide: int, fill: float) -> None:
        super().__init__(how_wide, fill)
        self.register_buffer("mask", torch.ones(how_wide, dtype=torch.bool))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)


@pytest.mark.world_size(2)
def test_a_mask_that_nothing_initialises_is_named():
    def make() -> nn.Module:
        model = TinyLM()
        model.extra = WithMask(WIDTH, 2.0)
        return model

    with pytest.raises(PlanError, match=r"Nothing initialises 'extra\.mask'"):
        sharded(build(make, "meta"))
    _in_step()


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=8, n_head=2)
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=32, num_layers=2, num_heads=8)
    )


def clip() -> nn.Module:
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=8,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
    )


@pytest.mark.table("gpt2-own", "t5-own", "gpt2-foundry")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "by"),
    [(gpt2, "own"), (gpt2, "foundry"), (t5, "own"), (t5, "foundry"), (clip, "own")],
)
def test_layers_have_the_spread_that_modules_around_them_give(make: Make, by: str):
    model = parameters_on_meta(make)
    if by == "foundry":
        BaseHuggingFaceModel.prepare_inner_model(model, "meta")
    sharded(model)
    expected = {name: param.std() for name, param in build(make, "cpu").named_parameters()}
    for name, param in model.named_parameters():
        if param.numel() > 1000:
            torch.testing.assert_close(full(param).std(), expected[name], rtol=0.1, atol=0.0)
        elif not expected[name]:
            assert not full(param).std()


@pytest.mark.world_size(2)
def test_a_unit_inside_of_the_module_that_sets_its_weights_is_an_error():
    model = parameters_on_meta(gpt2)
    for block in model.transformer.h:
        block.mlp.c_proj._fsdp_wrap = True
    with pytest.raises(PlanError, match=r"sets weights below 'transformer\.h\.\d\.mlp'"):
        sharded(model)
    _in_step()


class SetsInner(nn.Module):
    """A model whose `_init_weights` writes a constant into a layer from the module around it."""

    def __init__(self, constant: float, rows: slice = slice(None)) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        self.constant, self.rows = constant, rows

    def post_init(self) -> None:
        """Transformers' models have this method, and are known by it."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()
        elif isinstance(module, nn.Sequential):
            module[1].weight.data[self.rows].fill_(self.constant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.table("other", "same", "rows")
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("constant", "rows", "is_lost"),
    [(2.0, slice(None), True), (1.0, slice(None), False), (2.0, slice(3), True)],
    ids=["other", "same", "rows"],
)
def test_a_constant_for_a_unit_inside_is_not_lost(constant: float, rows: slice, is_lost: bool):
    model = parameters_on_meta(functools.partial(SetsInner, constant, rows))
    model.block[1]._fsdp_wrap = True
    if is_lost:
        with pytest.raises(PlanError, match=r"sets 'block\.1\.weight', which belongs to a unit"):
            sharded(model)
    else:
        sharded(model)
        assert (full(model.block[1].weight) == constant).all()
    _in_step()


@pytest.mark.world_size(2)
def test_a_function_of_the_user_gets_modules_that_have_tensors_alone():
    seen: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        seen.append(module)
        _fill_with_ones(module)

    model = parameters_on_meta(gpt2)
    model.param_init_fn = initialise
    sharded(model)
    assert all((full(param) == 1).all() for param in model.parameters())
    assert all(list(module.parameters(recurse=False)) for module in seen)


@pytest.mark.world_size(2)
def test_the_models_own_function_initialises():
    model = build(functools.partial(TinyLM, "inside one module"), "meta")
    model.param_init_fn = _fill_with_ones
    sharded(model)
    assert all((full(param) == 1).all() for param in model.parameters())
    assert model.extra.there is model.extra.back


@pytest.mark.world_size(2)
def test_a_function_on_the_module_stands_before_that_of_its_class():
    def make() -> nn.Module:
        model = TinyLM()
        layer: Any = next(part for part in model.modules() if isinstance(part, nn.Linear))
        layer.reset_parameters = functools.partial(_fill_with_ones, layer)
        return model

    model = build(make, "meta")
    sharded(model)
    layer = next(part for part in model.modules() if isinstance(part, nn.Linear))
    assert all((full(param) == 1).all() for param in layer.parameters())


def _fill_with_ones(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.ones_(param)


# --- What is compared. ---


def _assert_equal(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


def _assert_sharded(model: nn.Module) -> None:
    """Ranks hold different rows of every weight."""
    weights = [p for p in model.parameters() if isinstance(p, DTensor) and p.ndim == 2]
    assert weights
    for weight in weights:
        assert weight.to_local().shape[0] < weight.shape[0]
    local = weights[0].to_local().detach()
    others = [torch.empty_like(full(weights[0])) for _ in range(dist.get_world_size())]
    padded = torch.zeros_like(others[0])
    padded[: local.shape[0]] = local
    dist.all_gather(others, padded)
    assert not torch.equal(others[0], others[1])


def _assert_initialised_alike(expected: nn.Module, model: nn.Module) -> None:
    """Constants are equal; random weights have the spread the constructor gives."""
    got = gathered(model)
    for name, tensor in gathered(expected).items():
        if tensor.numel() < 2 or not tensor.is_floating_point() or name.endswith("kept"):
            continue
        if tensor.std() == 0 or "hidden" in name or "inv_freq" in name:
            assert torch.equal(tensor, got[name]), name
        else:
            assert tensor.std() / 2 < got[name].std() < 2 * tensor.std(), name


def _ties(model: nn.Module) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    plain = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *plain]


def _in_step() -> None:
    """Every rank is here, and collectives of the same kind still meet."""
    value = torch.ones(())
    dist.all_reduce(value)
    assert value == dist.get_world_size()


# --- How many collectives it takes. ---


class Narrow(nn.Module):
    """Small tensors of four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)  # with a buffer of whole numbers
        self.register_buffer("odd", torch.empty(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.empty(5, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.odd.copy_(torch.tensor([0.5, -0.0, float("inf")]))
            self.mask.copy_(torch.arange(5) % 2 > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("bucket_bytes", [2**26, 16 * WIDTH])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_small_tensors_of_a_unit_are_sent_together(where: str, bucket_bytes: int, monkeypatch):
    counts: Counter[str] = Counter()

    def note(collective: Collective) -> Any:
        counts[collective.key.rpartition(".")[2]] += 1
        return collective()

    monkeypatch.setattr(ranks, "_BUCKET_BYTES", bucket_bytes)
    torch.manual_seed(dist.get_rank())
    with torch.device(where):
        model = Narrow()
    before: list[Any] = [{name: value.clone() for name, value in model.state_dict().items()}]
    if where == "cpu":
        dist.broadcast_object_list(before, src=0)
    with around_collectives(note):
        sharded(model, {"wrap_policy": {"classes": ["Linear"]}})
    after = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, after)
    for name, value in after.items():
        first = before[0][name] if where == "cpu" else everyone[0][name]
        assert value.shape == first.shape
        assert torch.equal(value.view(-1).view(torch.uint8), first.view(-1).view(torch.uint8))
    if bucket_bytes == 2**26:
        assert counts["broadcast"] == 4  # of three layers and the root
    assert counts["all_reduce"] <= 3
