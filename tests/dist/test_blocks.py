"""Blocks recomputed, offloaded, compiled and in tiles, under FSDP2."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD
from transformers.models.llama import LlamaForCausalLM

from composer_fsdp2 import FSDP2Monitor, installed, prepare_fully_shard
from composer_fsdp2.errors import ConfigError, PlanError
from tests.support.alive import Alive
from tests.support.models import WIDTH, Block, TinyComposer, TinyLM, batches, llama_config
from tests.support.parity import OPTIMIZERS, Recipe, check_parity, full, gathered, model_loss
from tests.support.traffic import Bytes
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


def sharded(config: dict[str, Any], make: Callable[[], nn.Module] = TinyLM) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    prepare_fully_shard(model, None, config)
    return model


def trained(
    config: dict[str, Any], make: Callable[[], nn.Module] = TinyLM, steps: int = 3
) -> dict[str, torch.Tensor]:
    """Whole weights after some steps. Collective: yes."""
    model = sharded(config, make)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for batch in batches(steps, 4):
        model_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gathered(model)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# --- Activation checkpointing. ---

MODES: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "every other": {"activation_checkpointing": {"every": 2}},
    "last": {"activation_checkpointing": {"target": "last-1", "preserve_rng_state": False}},
    "parts": {"activation_checkpointing": {"names": ["blocks.*.up"], "classes": ["LayerNorm"]}},
    "offload": {"activation_cpu_offload": True},
    "selective and offload": {
        "activation_checkpointing": {"mode": "selective"},
        "activation_cpu_offload": True,
    },
}


@pytest.mark.matrix
@pytest.mark.world_size(2)
def test_every_mode_trains_to_the_same_weights():
    kept = trained({})
    for config in MODES.values():
        assert_equal(trained(config), kept)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("mode", "again"),
    [("full", (3, 3)), ("selective", (0, 3)), ("every other", (2, 2)), ("last", (1, 1))],
)
def test_what_is_computed_again(mode: str, again: tuple[int, int]):
    model = sharded(MODES[mode])
    loss = model_loss(model, batches(1, 4)[0])
    with Alive() as backward:
        loss.backward()
    assert (backward.ran["addmm"], backward.ran["gelu"]) == again


class TwoUnits(nn.Module):
    """A block of two modules, so that each may be a unit inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


def with_inner_units() -> TinyLM:
    model = TinyLM(layers=0)
    model.blocks.extend(TwoUnits() for _ in range(2))
    return model


INNER: dict[str, dict[str, Any]] = {
    "blocks": {"blocks.?": {}},
    "units in blocks": {"blocks.?": {}, "blocks.?.first": {}, "blocks.?.second": {}},
    "outputs cast": {
        "blocks.?": {},
        "blocks.?.first": {"mixed_precision": {**BF16, "output_dtype": "fp32"}},
        "blocks.?.second": {"mixed_precision": {**BF16, "cast_forward_inputs": True}},
    },
}


@pytest.mark.table("blocks")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("units", INNER)
def test_inputs_are_cast_when_they_are_computed_again(units: str):
    """torch 2.7 skips its own casts then."""
    config = {
        "mixed_precision": {**BF16, "cast_forward_inputs": True},
        "wrap_policy": {"names": INNER[units]},
    }
    expected = trained(config, with_inner_units)
    for mode in ("full", "selective"):
        spec = {"names": ["blocks.?"], "mode": mode}
        found = trained({**config, "activation_checkpointing": spec}, with_inner_units)
        assert_equal(found, expected)


@pytest.mark.world_size(2)
def test_names_under_checkpointing():
    model = sharded({"activation_checkpointing": {"mode": "selective"}})
    assert list(model.state_dict()) == list(TinyLM().state_dict())
    names = dict(model.named_parameters())
    assert "blocks.0._checkpoint_wrapped_module.up.weight" in names
    assert full(names["embed.weight"]).shape == TinyLM().embed.weight.shape


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("spec", "said"),
    [({"classes": ["Blok"]}, "Did you mean 'Block'"), ({"target": [7]}, "the list has 3 blocks")],
)
def test_choices_that_match_nothing(spec: dict[str, Any], said: str):
    with pytest.raises(PlanError, match=said):
        prepare_fully_shard(TinyLM(), None, {"activation_checkpointing": spec})


# --- torch.compile. ---

EAGER = {"blocks": True, "backend": "aot_eager", "fullgraph": True}

COMPILED: dict[str, dict[str, Any]] = {
    "alone": {},
    "selective": MODES["selective"],
    "offload": MODES["offload"],
    "budget": {"activation_checkpointing": {"memory_budget": 0.0}},
}


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """What another test has compiled would be found again."""
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # torch 2.13 looks at inputs that are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.table("offload")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("mode", COMPILED)
def test_compiled_blocks_train_to_the_same_weights(mode: str):
    expected = trained({})
    with fresh_compiler():
        assert_equal(trained({**COMPILED[mode], "compile": EAGER}), expected)
        assert graphs() == 1  # blocks share their code


@pytest.mark.world_size(2)
def test_what_makes_torch_compile_again():
    model = sharded({"compile": {"backend": "aot_eager"}, "activation_checkpointing": True})
    seen = []
    with fresh_compiler():
        for train in (True, True, False, False, True, False, True):
            model.train(train)
            with torch.set_grad_enabled(train):
                loss = model_loss(model, batches(1, 4)[0])
            if train:
                loss.backward()
            seen.append(graphs())
        assert seen == [1, 1, 2, 2, 2, 2, 2]
        assert counters["graph_break"] == {}
    assert list(model.state_dict()) == list(TinyLM().state_dict())
    assert not any("_orig_mod" in name for name, _ in model.named_modules())


@pytest.mark.world_size(2)
def test_what_a_memory_budget_saves():
    held = {}
    for budget in (1.0, 0.0):
        spec = {"memory_budget": budget}
        model = sharded({"activation_checkpointing": spec, "compile": EAGER})
        saved: list[torch.Tensor] = []
        pack = functools.partial(_keep, saved)
        with fresh_compiler(), saved_tensors_hooks(pack, lambda tensor: tensor):
            model_loss(model, batches(1, 4)[0]).backward()
        held[budget] = sum(t.nbytes for t in saved if not isinstance(t, nn.Parameter))
    assert held[0.0] < held[1.0] / 2, held


def _keep(saved: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    saved.append(tensor)
    return tensor


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"compile": {"backend": "inductr"}}, "Did you mean 'inductor'"),
        ({"compile": {"mode": "max-tune"}}, "Did you mean 'max-autotune'"),
        ({"compile": {"mode": "max-autotune"}}, "records CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"compile": {"mode": "reduce-overhead"}}, "'reduce-overhead', with which torch records"),
        ({"compile": {"backend": "cudagraphs"}}, "'cudagraphs', with which torch records"),
        (
            {"compile": {"backend": "aot_eager", "mode": "default"}},
            "backend aot_eager has no use for",
        ),
        (
            {
                "compile": {"backend": "eager"},
                "activation_checkpointing": {"memory_budget": 0.5},
            },
            "backend eager has no use for",
        ),
    ],
)
def test_what_cannot_be_compiled(config: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        prepare_fully_shard(TinyLM(), None, config)


@pytest.mark.world_size(2)
def test_a_model_without_blocks_is_not_compiled():
    with pytest.raises(PlanError, match="the model has no blocks"):
        prepare_fully_shard(nn.Sequential(nn.Linear(2, 2)), None, {"compile": True})


WHOLE: dict[str, Any] = {"backend": "aot_eager"}
NOT_OURS: tuple[dict[str, Any], ...] = ({"compile_config": WHOLE}, {})


@pytest.mark.world_size(2)
def test_composers_compile_config_goes_on_working():
    found = []
    samples = samples_of(3, 8)
    for kwargs in NOT_OURS:
        model = built(TinyComposer)
        with installed(), fresh_compiler():
            trainer = trainer_for(model, SGD(model.parameters(), lr=0.1), samples, **kwargs)
            trainer.fit()
            assert (graphs() > 0) is bool(kwargs)
            found.append(weights(model))
            trainer.close()
    assert largest_difference(*found) <= 1e-6


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", ["compile_config", "compiled before"])
def test_a_model_is_compiled_whole_or_by_blocks(how: str):
    model: Any = built(TinyComposer)
    kwargs: dict[str, Any] = {"compile_config": WHOLE} if how == "compile_config" else {}
    given: Any = model if kwargs else torch.compile(model, **WHOLE)
    with installed(), pytest.raises(ConfigError, match=r"fsdp2\.compile is set, and"):
        trainer_for(given, SGD(model.parameters()), samples_of(1, 8), {"compile": True}, **kwargs)


@pytest.mark.world_size(2)
def test_the_trainer_compiles_blocks_once():
    """The monitor looks at parameters, which must not make torch compile again."""
    model = built(TinyComposer)
    with installed(), fresh_compiler():
        trainer = trainer_for(
            model,
            SGD(model.parameters()),
            samples_of(4, 8),
            {"compile": EAGER, "activation_checkpointing": True},
            callbacks=[FSDP2Monitor()],
            train_subset_num_batches=4,
        )
        trainer.fit()
        assert (graphs(), counters["graph_break"]) == (1, {})
        trainer.close()


# --- MLPs in tiles. ---


def llama() -> nn.Module:
    return LlamaForCausalLM(llama_config(tied=False, use_cache=False))


@pytest.mark.table
@pytest.mark.world_size(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_tiles_train_like_the_whole_and_gather_nothing_more(recompute: bool):
    counted = []
    base = {"activation_checkpointing": recompute}
    for config in (base, {**base, "tiled_mlp": {"shards": 3}}):
        model = check_parity(llama, config, "adamw", Recipe(steps=5))
        with Bytes() as traffic:
            model_loss(model, batches(1, 4)[0]).backward()
        counted.append((traffic.gathered, traffic.reduced))
    assert counted[0] == counted[1]


@pytest.mark.table("cut1")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("cut", [{"tiled_mlp": {"shards": 2}}, {"chunked_loss": {"chunks": 3}}])
def test_parts_of_low_precision(cut: dict[str, Any]):
    config = {"mixed_precision": BF16, **cut}
    found, expected = (trained(c, llama) for c in (config, {"mixed_precision": BF16}))
    difference = max((found[name] - expected[name]).abs().max().item() for name in expected)
    # Three steps of 3e-3: where a gradient's sign is rounding, Adam's step is as large as any.
    assert difference <= 2 * 3 * 3e-3


class Positions(nn.Module):
    """Not an MLP, whatever it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only one rank's batch shows it.
        return x.cumsum(dim=1) if torch.distributed.get_rank() else x


class Misnamed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.mlp(x))


@pytest.mark.world_size(2)
def test_what_is_no_mlp_is_an_error_on_every_rank():
    model = TinyLM(layers=0)
    model.blocks.append(Misnamed())
    prepare_fully_shard(model, None, {"tiled_mlp": {"shards": 2}})
    with pytest.raises(PlanError, match=r"On rank 1: 'blocks\.0\.mlp' was chosen for tiled_mlp"):
        model(batches(1, 4)[0][0])


@pytest.mark.world_size(2)
def test_a_rank_with_one_token_compares_tiles_with_the_others():
    """It would go on, and leave the others in their agreement."""
    model = TinyLM(layers=0)
    model.blocks.append(Misnamed())
    prepare_fully_shard(model, None, {"tiled_mlp": {"shards": 2}})
    ids = batches(1, 4)[0][0]
    model(ids[:, :1])  # nothing is compared, so that it is tried again
    with pytest.raises(PlanError, match=r"On rank 1: 'blocks\.0\.mlp' was chosen for tiled_mlp"):
        model(ids[:, : 1 + 3 * torch.distributed.get_rank()])


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no module is called mlp"),
        ({"names": ["blocks.?.up"]}, r"'blocks\.0\.up' is an FSDP unit"),
    ],
)
def test_what_cannot_be_cut(config: dict[str, Any], said: str):
    policy = {"names": ["blocks.?.up"]}
    settings = {"tiled_mlp": {"shards": 2, **config}, "wrap_policy": policy}
    with pytest.raises(PlanError, match=said):
        prepare_fully_shard(TinyLM(), None, settings)


# --- Head and loss in chunks. ---


# The compiler of torch 2.13 looks at the gradients of inputs that are no leaves.
@pytest.mark.table("config1-True")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, False),
        ({}, True),
        ({"reshard_after_forward": True}, True),
        ({"activation_checkpointing": True, "backward_prefetch": 1}, False),
        ({"compile": {"backend": "eager"}, "data_parallel_replicate_degree": 2}, False),
    ],
)
@pytest.mark.world_size(2)
def test_chunks_train_like_the_whole_and_gather_nothing_more(config: dict[str, Any], tied: bool):
    def make() -> nn.Module:
        return LlamaForCausalLM(llama_config(tied, use_cache=False))

    counted = []
    if not tied:
        config = {**config, "wrap_policy": {"names": ["lm_head", "model.layers.*"]}}
    for chunks in ({}, {"chunked_loss": {"chunks": 3}}):
        model = check_parity(make, {**config, **chunks}, "adamw", Recipe(steps=5))
        with Bytes() as traffic:
            model_loss(model, batches(1, 4)[0]).backward()
        counted.append(traffic)
    whole, cut = counted
    assert cut.reduced == whole.reduced
    assert cut.gathered.total() <= whole.gathered.total()


@pytest.mark.world_size(2)
def test_what_reads_logits_is_an_error_in_the_first_step():
    model = sharded({"chunked_loss": {"chunks": 2}}, llama)
    ids, _ = batches(1, 4)[0]
    with pytest.raises(PlanError, match=r"log_softmax was asked of the logits of 'lm_head'"):
        model(ids).logits.log_softmax(-1)
