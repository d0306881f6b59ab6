"""Checkpoints of tensor parallelism as files: others' are loaded, and its own look like theirs."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.utils import dist as composer_dist
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from composer_fsdp2 import install
from composer_fsdp2.cli.main import app
from tests.dist.test_fsdp1_checkpoints import check_state, fit, largest_difference, resume
from tests.dist.test_tensor_parallel import SIZES, grouped
from tests.dist.test_tensor_trainer import (
    SIZE,
    adamw,
    built,
    groups_loader,
    samples,
    trained_alone,
)
from tests.matrix.test_tensor_layouts import Odd, kept, optimizer_of
from tests.support.fsdp1_fixtures import NAMES, expected, fsdp1_on_cpu, tiny_model
from tests.support.training import Tokens, trainer_for
from tests.support.training import largest_difference as most_different

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:.* is not in the state_dict"),
    pytest.mark.filterwarnings("ignore:The current world size"),  # of random states
]
TP = {"fsdp2": {"tensor_parallel": 2}}


# --- FSDP1. ---


@pytest.mark.table("sharded_dtensor_weights_only_2r")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", NAMES)
def test_every_fixture_of_fsdp1_goes_on_in_two_dimensions(name: str):
    tiny = tiny_model()
    data = tiny.build_dataset()
    loader = DataLoader(
        data,
        batch_size=tiny.GLOBAL_BATCH // 2,
        sampler=composer_dist.get_sampler(data, shuffle=False, drop_last=True),
    )
    trainer, losses = resume(name, TP, train_dataloader=loader)
    assert len(trainer.state.model.model.lm_head.weight.placements) == 2
    check_state(trainer, name)
    if not expected(name)["weights_only"] and "dropout" not in name:
        fit(trainer)
        assert largest_difference(losses.values, expected(name)["next_losses"]) <= 2e-6


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = trainer.state.model, trainer.state.optimizers[0]
    found = dict(get_model_state_dict(model, options=options))
    state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, values in state.items():
        found |= {f"{name} {key}": value for key, value in values.items()}
    return {name: value.clone() for name, value in found.items()}


def odd_trainer(
    kind: str, parallelism: dict[str, Any], until: int, *, muon: bool = False, **kwargs: Any
) -> Trainer:
    torch.manual_seed(0 if "load_path" not in kwargs else 9)
    model = Odd(kind)
    settings = {"batch": SIZE // 2, "max_duration": f"{until}ba", **kwargs}
    optimizer = optimizer_of(kind, model) if muon else grouped(model)
    return trainer_for(model, optimizer, samples(), parallelism_config=parallelism, **settings)


@pytest.mark.table("gpt2-full")
@pytest.mark.world_size(4)
@pytest.mark.parametrize("state", ["sharded", "full"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_fsdp1_of_the_same_model_goes_on_in_two_dimensions(kind: str, state: str, tmp_path: Path):
    install()
    config = {"state_dict_type": state, "sharded_ckpt_prefix_dir": "last"}
    with fsdp1_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = odd_trainer(kind, {"fsdp": config}, 2, batch=SIZE // 4)
        before.fit()
        before.save_checkpoint(str(shared(tmp_path) / "saved" / "last.pt"))
        want = whole_state(before)
        before.close()
    path = next((shared(tmp_path) / "saved").glob("*"))
    after = odd_trainer(kind, TP, 2, load_path=str(path))
    got = whole_state(after)
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def shared(folder: Path) -> Path:
    """One folder on all ranks."""
    holder = [folder]
    dist.broadcast_object_list(holder)
    return holder[0]


# --- Composer's own tensor parallelism, beside FSDP1. ---


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("state", ["sharded", "full"])
def test_a_checkpoint_of_composers_tensor_parallelism_goes_on(state: str, tmp_path: Path):
    install()
    folder = shared(tmp_path)
    data = samples(2 * SIZE)
    expected_model, _ = trained_alone("llama", data)
    model: Any = built("llama")
    model.fsdp_wrap_fn = lambda module: type(module).__name__ == "LlamaDecoderLayer"
    plan: dict[str, Any] = {}
    for layer in range(2):
        inside = f"net.model.layers.{layer}"
        into = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        into += ("mlp.gate_proj", "mlp.up_proj")
        plan |= {f"{inside}.{name}": ColwiseParallel() for name in into}
        out = ("self_attn.o_proj", "mlp.down_proj")
        plan |= {f"{inside}.{name}": RowwiseParallel() for name in out}
    with fsdp1_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = trainer_for(
            model,
            adamw(model),
            data,
            train_dataloader=groups_loader(data),
            parallelism_config={
                "tp": {"tensor_parallel_degree": 2, "layer_plan": plan},
                "fsdp": {"state_dict_type": state, "sharded_ckpt_prefix_dir": "last"},
            },
        )
        before.fit()
        before.save_checkpoint(str(folder / "saved" / "last.pt"))
        want = whole_state(before)
        before.close()
    path = next((folder / "saved").glob("*"))
    again = built("llama")
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    after = trainer_for(
        again,
        adamw(again),
        data,
        batch=SIZE // 2,
        parallelism_config=TP,
        load_path=str(path),
    )
    got = whole_state(after)
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []
    assert most_different(after.state.model, expected_model) <= 1e-6


# --- Settings of checkpoints. ---


class Saving(DefaultSavePlanner):
    asked = 0

    def resolve_data(self, write_item: Any) -> Any:
        type(self).asked += 1
        return super().resolve_data(write_item)


class Loading(DefaultLoadPlanner):
    asked = 0

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        type(self).asked += 1
        return super().resolve_tensor(read_item)


SETTINGS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"state_dict_type": "full"},
    "async_save": {"async_save": True},
    "async_save, full": {"async_save": True, "state_dict_type": "full"},
    "planners": {"save_planner": Saving(), "load_planner": Loading()},
    "rank 0 only": {"state_dict_type": "full", "load_monolith_rank0_only": True},
}


@pytest.mark.table
@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", SETTINGS)
def test_a_run_goes_on_as_if_it_had_not_stopped(case: str, tmp_path: Path):
    install()
    folder = shared(tmp_path)
    config = {"fsdp2": {"tensor_parallel": 2, **SETTINGS[case]}}
    Saving.asked = Loading.asked = 0
    saving = {"save_folder": str(folder / "a"), "save_interval": "2ba"}
    whole = odd_trainer("gpt2", config, 4, **saving)
    whole.fit()
    want = kept(whole)
    whole.close()
    found = sorted((folder / "a").glob("ep0-ba2*"))
    assert found
    again = odd_trainer("gpt2", config, 4, load_path=str(found[0]))
    again.fit()
    got = kept(again)
    again.close()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []
    assert (Saving.asked > 20, Loading.asked > 20) == (case == "planners",) * 2


def autoresumed(degree: int, until: int, folder: Path) -> None:
    """Trains on, in any layout, from whatever the folder holds."""
    install()
    world = dist.get_world_size()
    config = {"fsdp2": {"tensor_parallel": degree}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* is not in the state_dict")
        warnings.filterwarnings("ignore", message="The current world size")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        trainer = odd_trainer(
            "llama",
            config,
            until,
            muon=True,
            batch=SIZE * degree // world,
            autoresume=True,
            run_name="elastic",
            save_folder=str(folder / "saved"),
            save_interval="1ba",
        )
        start = trainer.state.timestamp.batch.value
        trainer.fit()
    found = kept(trainer)
    trainer.close()
    if dist.get_rank() == 0:
        torch.save({"start": start, **found}, folder / f"{until}.pt")


@pytest.mark.matrix
def test_an_elastic_run_goes_on_with_another_degree(request: pytest.FixtureRequest, tmp_path: Path):
    from tests.conftest import POOLS

    pools = request.config.stash[POOLS]
    for until, (world, degree) in enumerate([(4, 2), (2, 2), (4, 4), (1, 1)], start=1):
        pools.get(world).run(partial(autoresumed, degree, until, tmp_path / "a"))
        assert torch.load(tmp_path / "a" / f"{until}.pt")["start"] == until - 1
    pools.get(1).run(partial(autoresumed, 1, 4, tmp_path / "b"))
    got, want = (torch.load(tmp_path / name / "4.pt") for name in "ab")
    del got["start"], want["start"]
    differences = {name: (want[name] - got[name]).abs().max().item() for name in want}
    assert max(differences.values()) <= 1e-6, differences


# --- Looking, converting, exporting. ---


def composers(family: str) -> HuggingFaceModel:
    sizes = SIZES | {"vocab_size": 34, "pad_token_id": 0}
    kinds: dict[str, Any] = {
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, False),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, True),
    }
    config, kind, tied = kinds[family]
    return HuggingFaceModel(kind(config(**sizes, tie_word_embeddings=tied)), None)


def train_and_export(family: str, state: str, degree: int, folder: Path) -> None:
    from llmfoundry.callbacks import HuggingFaceCheckpointer

    install()
    torch.manual_seed(0)
    model = composers(family)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tokenizer")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        trainer = trainer_for(
            model,
            grouped(model),
            Tokens(8),
            {"state_dict_type": state, "tensor_parallel": degree, "sharded_ckpt_prefix_dir": "x"},
            batch=4 * degree // max(dist.get_world_size(), degree),
            max_duration="1ba",
            callbacks=[HuggingFaceCheckpointer(str(folder / "callback"), "1dur")],
        )
        trainer.fit()
        trainer.save_checkpoint(str(folder / "saved" / "whole.pt"))
    model.model.save_pretrained(str(folder / "live"))
    trainer.close()


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.table
@pytest.mark.parametrize("state", ["sharded", "full"])
@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_files_need_no_layout(family: str, state: str, ranks: Any, tmp_path: Path):
    ranks(4, train_and_export, family, state, 2, tmp_path)
    saved = next((tmp_path / "saved").glob("*"))
    assert "mesh        dp_shard 2 x tp 2" in run("inspect", saved)
    if state == "sharded":
        assert "in pieces   " in run("inspect", saved)
        pieces = json.loads(run("inspect", saved, "--json"))["pieces"]
        assert pieces["dim 0 and 1"] > 0
    run("verify", saved)
    other = {"sharded": "full", "full": "sharded"}[state]
    run("convert", saved, tmp_path / "other", "--to", other)
    assert run("diff", saved, tmp_path / "other").startswith("Equal")
    run("convert", saved, tmp_path / "hf", "--to", "hf")
    # In one process, from the same weights: what `save_pretrained` writes.
    whole = tmp_path / ("other" if other == "full" else saved)
    weights = torch.load(whole, weights_only=False)["state"]["model"]
    alone = composers(family)
    alone.load_state_dict(weights)
    alone.model.save_pretrained(tmp_path / "alone")
    want = load_file(tmp_path / "alone" / "model.safetensors")
    for folder in ("live", "hf", "callback/huggingface/ba1"):
        got = load_file(tmp_path / folder / "model.safetensors")
        if family == "llama" and folder.startswith("callback"):
            # It makes two tensors of a tied weight.
            assert torch.equal(got.pop("lm_head.weight"), want["model.embed_tokens.weight"])
        assert want.keys() == got.keys()
        assert [name for name in want if not torch.equal(want[name], got[name])] == []
