"""Weights read from a Hugging Face folder straight into shards equal those of `from_pretrained`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import HuggingFaceModel
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaModel,
    PreTrainedModel,
)

from composer_fsdp2 import (
    CheckpointError,
    apply_plan,
    installed,
    plan_wrapping,
    prepare_fully_shard,
)
from composer_fsdp2.checkpoint.pretrained import PretrainedWeights, StoredTensor
from composer_fsdp2.plan.module_tree import ModuleTree
from composer_fsdp2.shard import weight_source
from tests.support.models import VOCAB, llama_config
from tests.support.parity import OPTIMIZERS, Recipe, gathered, train_together
from tests.support.screen import show_on
from tests.support.training import samples_of, trainer_for

SAMPLE = torch.tensor([[1, 5, 3, 2], [0, 4, 4, 16]])


def gpt2_config() -> GPT2Config:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=12, n_layer=2, n_head=2, use_cache=False, **quiet
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama, tied": functools.partial(llama_config, True, use_cache=False),
    "llama, untied": functools.partial(llama_config, False, use_cache=False),
    "gpt2": gpt2_config,
}
every_model = pytest.mark.parametrize("name", CONFIGS)


def saved(folder: Path, name: str = "llama, untied", dtype: torch.dtype = torch.float32) -> Path:
    """A folder of several files with random weights, norms and biases too; the same on any rank."""
    if dist.is_initialized() and dist.get_rank() > 0:
        dist.barrier()
        return folder / "pretrained"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) / 50)
    model.save_pretrained(folder / "pretrained", max_shard_size=4_000)
    assert len(list((folder / "pretrained").glob("*.safetensors"))) > 1
    if dist.is_initialized():
        dist.barrier()
    return folder / "pretrained"


def built(name: str, device: str = "meta") -> PreTrainedModel:
    """The model without its weights: parameters on `device`, buffers real where GPT-2 needs it."""
    torch.manual_seed(dist.get_rank() + 10)
    with torch.device("cpu" if name == "gpt2" else device):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    if name == "gpt2" and device == "meta":
        _put_parameters_on_meta(model)
    return model


def _put_parameters_on_meta(model: PreTrainedModel) -> None:
    """As LLM Foundry's `init_empty_weights`: its masks are made by constructors alone."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.to("meta"))
    model.tie_weights()


def from_folder(
    model: nn.Module, folder: Path, config: dict[str, Any] | None = None, optimizer: Any = None
) -> nn.Module:
    settings = {"pretrained_weights": str(folder), **(config or {})}
    prepare_fully_shard(model, optimizer, settings, precision="fp32")
    return model


def original(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_equals_original(model: nn.Module, expected: nn.Module) -> None:
    want, got = gathered(expected), gathered(model)
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        assert torch.equal(tensor, got[key]), key
        assert tensor.dtype == got[key].dtype, key
    with torch.no_grad():
        assert torch.equal(expected(SAMPLE).logits, model(SAMPLE).logits)


def _check(name: str, tmp_path: Path, config: dict[str, Any] | None = None) -> None:
    folder = saved(tmp_path, name)
    model = from_folder(built(name), folder, config)
    assert any(isinstance(param, DTensor) for param in model.parameters())
    assert _ties(model) == _ties(original(folder))
    assert_equals_original(model, original(folder))


def _ties(model: nn.Module) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}


@pytest.mark.table("1-llama, untied", "2-gpt2")
@every_model
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_from_pretrained(
    name: str, size: int, tmp_path: Path, ranks: Callable[..., list[Any]]
):
    ranks(size, _check, name, tmp_path)


@pytest.mark.table("gpt2")
@pytest.mark.world_size(4)
@every_model
def test_equals_from_pretrained_in_two_copies(name: str, tmp_path: Path):
    degrees = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
    _check(name, tmp_path, degrees)


@pytest.mark.table("gpt2")
@pytest.mark.world_size(2)
@every_model
def test_trains_like_an_unsharded_copy(name: str, tmp_path: Path):
    """With the optimizer built before, on parameters that are still on meta."""
    folder = saved(tmp_path, name)
    model, oracle = built(name), original(folder).train()
    # The gradient of GPT-2's key biases is zero but for rounding, which Adam would blow up.
    make_optimizer = OPTIMIZERS["sgd" if name == "gpt2" else "adamw"]
    pair = [make_optimizer(m.parameters()) for m in (oracle, model)]
    from_folder(model, folder, {"activation_checkpointing": True}, pair[1])
    train_together(oracle, pair[0], model, pair[1], Recipe(clip_norm=1.0))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("terminal", [True, False])
def test_rank_0_shows_on_a_terminal_how_far_the_reading_is(terminal: bool, tmp_path: Path):
    folder = saved(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        shown = show_on(patch, terminal)
        from_folder(built("llama, untied"), folder)
    told = "Reading pretrained weights" in shown.getvalue()
    assert told == (terminal and dist.get_rank() == 0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("on", ["cpu", "meta"])
@every_model
def test_every_parameter_is_counted_once_while_it_is_read(name: str, on: str, tmp_path: Path):
    totals, done = list[int](), list[int]()

    @contextlib.contextmanager
    def counting(_title: str, total: int) -> Generator[Callable[[int], object]]:
        totals.append(total)
        yield done.append

    folder = saved(tmp_path, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_source, "counting_bytes", counting)
        from_folder(built(name, on), folder)
    params = original(folder).parameters()
    assert totals == [sum(done)] == [sum(param.nbytes for param in params)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("others", ["cpu", "meta"])
def test_the_folder_wins_over_what_ranks_hold(others: str, tmp_path: Path):
    folder = saved(tmp_path)
    model = from_folder(built("llama, untied", "cpu" if dist.get_rank() == 0 else others), folder)
    assert_equals_original(model, original(folder))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_cast_to_the_models_dtype(dtype: torch.dtype, tmp_path: Path):
    folder = saved(tmp_path, dtype=dtype)
    model = from_folder(built("llama, untied"), folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    assert_equals_original(model, expected)


@pytest.mark.world_size(2)
def test_long_tensors_are_read_in_several_slices(tmp_path: Path):
    model = nn.Linear(4096, 9001, bias=False, device="meta")
    weight = torch.arange(9001.0)[:, None].expand(9001, 4096).to(torch.bfloat16)
    if dist.get_rank() == 0:
        save_file({"weight": weight.contiguous()}, tmp_path / "model.safetensors")
    dist.barrier()
    from_folder(model, tmp_path)
    assert model.weight.to_local().numel() * 4 > 2 * 32 * 2**20
    local = weight.chunk(2)[dist.get_rank()].float()
    assert torch.equal(model.weight.to_local(), local)


@pytest.mark.world_size(2)
def test_what_hangs_on_parameters_stays(tmp_path: Path):
    folder = saved(tmp_path)
    model = built("llama, untied")
    seen: list[torch.Size] = []
    model.lm_head.weight.label = "head"
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    model.model.norm.weight.requires_grad_(False)
    from_folder(model, folder)
    model(SAMPLE).logits.sum().backward()
    assert model.lm_head.weight.label == "head"
    assert seen == [model.lm_head.weight.shape]
    assert model.model.norm.weight.grad is None
    assert not model.model.norm.weight.requires_grad


@pytest.mark.world_size(2)
def test_ignored_parameters_are_read_whole(tmp_path: Path):
    folder = saved(tmp_path)
    model = built("llama, untied")
    model.model.embed_tokens.weight.requires_grad_(False)
    from_folder(model, folder, {"ignored_params": ["model.embed_tokens.weight"]})
    assert not isinstance(model.model.embed_tokens.weight, DTensor)
    assert_equals_original(model, original(folder))


@pytest.mark.world_size(4)
def test_shards_may_be_empty_and_of_uneven_size(tmp_path: Path):
    folder = saved(tmp_path)
    model = from_folder(built("llama, untied"), folder, {"wrap_policy": {"embeddings": True}})
    rows = [None] * 4
    dist.all_gather_object(rows, len(model.lm_head.weight.to_local()))
    assert rows == [5, 5, 5, 2]
    assert_equals_original(model, original(folder))


class Odd(nn.Module):
    """No Hugging Face model: a scalar, persistent buffers, fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.rand(3, 2))
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("table", torch.arange(2.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.few * self.scale + self.table) * self.mask


@pytest.mark.world_size(4)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_any_module_with_scalars_and_buffers(device: str, tmp_path: Path):
    expected = Odd()
    if dist.get_rank() == 0:
        save_file(expected.state_dict(), tmp_path / "model.safetensors")
    dist.barrier()
    with torch.device(device):
        model = Odd()
    model.count.zero_() if device == "cpu" else None
    from_folder(model, tmp_path, {"ignored_params": ["scale"]})
    assert gathered(model).keys() == gathered(expected).keys()
    for name, tensor in gathered(expected).items():
        assert torch.equal(tensor, gathered(model)[name]), name
    assert torch.equal(model(torch.ones(1, 3)), expected(torch.ones(1, 3)))


@pytest.mark.world_size(2)
def test_the_base_model_of_a_folder_with_a_head(tmp_path: Path):
    """As in `from_pretrained`, the head is left out; here that is said, once."""
    folder = saved(tmp_path)
    with torch.device("meta"):
        model = LlamaModel(llama_config(False, use_cache=False))
    says = pytest.warns(
        UserWarning, match=r"a head that this model does not have: its lm_head\.weight"
    )
    with says if dist.get_rank() == 0 else contextlib.nullcontext():
        from_folder(model, folder)
    expected = LlamaModel.from_pretrained(folder)
    for name, tensor in gathered(expected).items():
        assert torch.equal(tensor, gathered(model)[name]), name


@pytest.mark.world_size(2)
def test_through_the_trainer(tmp_path: Path):
    """The wrapper puts `model.` in front of every name."""
    folder = saved(tmp_path, "llama, tied")
    model = HuggingFaceModel(built("llama, tied"))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with installed():
        trainer_for(model, optimizer, samples_of(1, 4), {"pretrained_weights": str(folder)})
    assert_equals_original(model.model, original(folder))


# --- What goes wrong goes wrong on every rank. ---


@pytest.mark.world_size(2)
def test_a_folder_of_another_model(tmp_path: Path):
    folder = saved(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"does not fit the model: it lacks 27 \('transformer"
    ):
        from_folder(built("gpt2"), folder)
    _in_step()


@pytest.mark.world_size(2)
def test_a_folder_only_one_rank_has(tmp_path: Path):
    folder = saved(tmp_path)
    path = folder if dist.get_rank() == 0 else tmp_path
    model = built("llama, untied")
    with pytest.raises(CheckpointError, match=r"On rank 1: .* holds neither model.safetensors nor"):
        from_folder(model, path)
    assert all(param.is_meta for param in model.parameters())
    _in_step()


@pytest.mark.world_size(2)
def test_a_file_that_goes_away_on_one_rank(tmp_path: Path):
    folder = saved(tmp_path)
    model = built("llama, untied")
    plan = plan_wrapping(model, [])
    weights = PretrainedWeights(str(folder), ModuleTree.read(model))
    dist.barrier()
    if dist.get_rank() == 1:
        file = weights.tensors["lm_head.weight"].file
        weights.tensors["lm_head.weight"] = StoredTensor(
            file.with_name("gone.safetensors"), (VOCAB, 12), "F32", "lm_head.weight"
        )
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(CheckpointError, match=r"On rank 1: 'lm_head.weight' could not be"):
        apply_plan(model, plan, mesh, source=weights)
    _in_step()


def _in_step() -> None:
    """Every rank is here, and collectives of the same kind still meet."""
    value = torch.ones(())
    dist.all_reduce(value)
    assert value == dist.get_world_size()
