"""Whatever is wrong, and on whichever rank: every rank raises, at once, and stays in step."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import (
    ConfigError,
    FSDP2Config,
    PatchError,
    PlanError,
    installed,
    prepare_fully_shard,
)
from composer_fsdp2.plan.planner import plan_wrapping
from composer_fsdp2.shard.apply import apply_plan
from composer_fsdp2.torch_private import members
from tests.support.limits import Limit
from tests.support.models import TinyComposer, TinyLM
from tests.support.training import samples_of, trainer_for

pytestmark = pytest.mark.fault("settings that cannot work", "reported")
DIFFERENT = pytest.mark.fault("ranks that hold different things", "reported")
ONE_RANK = pytest.mark.fault("one rank's own mistake", "reported")

WRONG_SETTINGS: dict[str, tuple[Any, str]] = {
    "unknown key": (
        {"sharding_stratgy": "FULL_SHARD", "reshard_after_foward": True},
        r"'reshard_after_foward' is not a key .* Did you mean 'reshard_after_forward'\?",
    ),
    "wrong type": ({"activation_checkpointing": "yes"}, "Expected true, false or a mapping"),
    "no config": (["reshard_after_forward"], "configuration is a list"),
    "degrees": (
        {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 3},
        "degree 2 x data_parallel_replicate_degree 3 does not multiply to the world size 2",
    ),
    "too many ranks": ({"data_parallel_shard_degree": 8}, "multiply to the world size 2"),
    "reshard": ({"reshard_after_forward": 3}, "does not divide the shard degree 2. .* Use one of"),
    "contradiction": (
        {"load_monolith_rank0_only": True, "state_dict_type": "sharded"},
        "Write state_dict_type: full",
    ),
}

UNMATCHED: dict[str, tuple[dict[str, Any], str]] = {
    "class": (
        {"wrap_policy": {"classes": ["Blok"]}},
        "Did you mean 'Block'.* Classes in this model: Block, Embedding, Identity",
    ),
    "name": ({"wrap_policy": {"names": ["blocks.9"]}}, "Names in this model: embed, blocks"),
    "head": ({"wrap_policy": {"lm_head": True}}, "wrap_policy.lm_head matches no module"),
    "container": (
        {"wrap_policy": {"names": ["blocks"]}},
        r"'blocks' \(ModuleList\) was chosen .* Choose the modules inside it",
    ),
    "ignored": ({"ignored_params": ["nothing.*"]}, r"'nothing\.\*' of ignored_params matches no"),
    "trainable ignored": ({"ignored_params": ["norm.*"]}, "'norm.weight' is .* trainable"),
    "method": ({"forward_methods": ["generate"]}, "'generate' of forward_methods matches no"),
    "method of no unit": (
        {"forward_methods": ["norm.extra_repr"]},
        "'norm' is not a unit. .* Make it a unit with wrap_policy.names",
    ),
    "tie": (
        {"tied_weights": "error", "wrap_policy": {"names": ["head"], "embeddings": True}},
        "'embed', 'head' were all chosen .* share the parameter 'embed.weight'",
    ),
}


def sharded(model: nn.Module, config: Any = None, **arguments: Any) -> nn.Module:
    prepare_fully_shard(model, None, {} if config is None else config, **arguments)
    return model


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_wrong_settings(case: str):
    config, message = WRONG_SETTINGS[case]
    with _every_rank_raises(ConfigError, message):
        sharded(TinyLM(), config)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", UNMATCHED)
def test_settings_that_do_not_fit_the_model(case: str):
    config, message = UNMATCHED[case]
    model = TinyLM("two modules")
    with _every_rank_raises(PlanError, message):
        sharded(model, config)
    assert not any(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.world_size(2)
def test_every_mistake_is_reported_at_once():
    config = {"mixed_precision": "PURR", "reshard_after_forward": "never", "colour": "blue"}
    with _every_rank_raises(ConfigError, "(?s)3 settings are wrong.*colour.*never.*PURE"):
        sharded(TinyLM(), config)


@pytest.mark.world_size(2)
def test_unsupported_precision():
    with _every_rank_raises(ConfigError, "precision 'amp_fp32' is not supported under FSDP2"):
        sharded(TinyLM(), precision="amp_fp32")


@DIFFERENT
@pytest.mark.world_size(2)
def test_another_environment():
    if dist.get_rank() == 1:
        os.environ["NCCL_ALGO"] = "Tree"
    message = r"(?s)Ranks 0 and 1 hold a different environment.*\+NCCL_ALGO=Tree"
    with _every_rank_raises(PlanError, message):
        sharded(TinyLM())


@DIFFERENT
@pytest.mark.world_size(2)
def test_another_version(tmp_path: Path):
    """A newer peft lies first on the path of one rank."""
    if dist.get_rank() == 1:
        folder = tmp_path / "peft-99.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
        sys.path.insert(0, str(tmp_path))
    try:
        message = r"(?s)Ranks 0 and 1 hold a different set of packages.*\+peft 99\.0"
        with _every_rank_raises(PlanError, message):
            sharded(TinyLM())
    finally:
        if str(tmp_path) in sys.path:
            sys.path.remove(str(tmp_path))


@ONE_RANK
@pytest.mark.world_size(2)
def test_a_gradient_of_before():
    """Shards would begin without it."""
    model = TinyLM()
    if dist.get_rank() == 1:
        model.norm.weight.grad = torch.ones_like(model.norm.weight)
    with pytest.raises(PlanError, match=r"'norm\.weight' has a gradient already.*zero_grad"):
        prepare_fully_shard(model, None, {})
    model.zero_grad(set_to_none=False)
    prepare_fully_shard(model, None, {})


@pytest.mark.world_size(2)
def test_scalar_parameter():
    model = TinyLM()
    model.blocks[1].scale = nn.Parameter(torch.tensor(2.0))
    with _every_rank_raises(PlanError, r"'blocks\.1\.scale' is a scalar parameter.*shape \(1,\)"):
        sharded(model)


@pytest.mark.world_size(2)
def test_mixed_dtypes_in_one_module():
    model = TinyLM()
    up = model.blocks[1].up
    up.bias = nn.Parameter(up.bias.detach().to(torch.bfloat16))
    message = r"'blocks\.1' holds .* float32 .* and bfloat16 \('blocks\.1\.up\.bias'\)"
    with _every_rank_raises(PlanError, message):
        sharded(model)


@pytest.mark.world_size(2)
def test_parameters_that_are_not_contiguous():
    model = TinyLM()
    model.norm.weight = nn.Parameter(torch.zeros(20)[::2])
    with _every_rank_raises(PlanError, r"'norm\.weight' is not contiguous"):
        sharded(model)


@pytest.mark.world_size(2)
def test_applying_twice():
    model = sharded(TinyLM())
    with _every_rank_raises(PlanError, "The model is sharded by FSDP2 already"):
        sharded(model)


class OwnError(Exception):
    """Of a user, with arguments of its own."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{detail} ({code})")


def _raise_type_error(_module: nn.Module) -> bool:
    raise TypeError("my own mistake")


def _raise_own_error(_module: nn.Module) -> bool:
    raise OwnError(3, detail="my own class")


@ONE_RANK
@pytest.mark.world_size(2)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
def test_an_exception_of_the_users_code_is_shown_as_it_is(ranks: tuple[int, ...]):
    model = TinyLM()
    if dist.get_rank() in ranks:
        model.fsdp_wrap_fn = _raise_type_error
    with pytest.raises(TypeError, match="my own mistake") as caught:
        prepare_fully_shard(model, None, {})
    if hasattr(caught.value, "__notes__"):  # Python 3.11
        [note] = caught.value.__notes__
        assert note.startswith(f"Raised on rank {ranks[0]}, at ")
        assert "test_bad_input.py" in note
        assert "_raise_type_error" in note


@ONE_RANK
@pytest.mark.world_size(2)
def test_an_exception_that_cannot_travel_is_a_sentence_elsewhere():
    model = TinyLM()
    if dist.get_rank() == 1:
        model.fsdp_wrap_fn = _raise_own_error
    kind = OwnError if dist.get_rank() == 1 else PlanError
    with pytest.raises(kind, match=r"my own class \(3\)"):
        prepare_fully_shard(model, None, {})


@pytest.mark.world_size(2)
def test_a_model_of_an_earlier_trainer():
    model, samples = TinyComposer(), samples_of(1, 8)
    with installed():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer_for(model, optimizer, samples).fit()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(PlanError, match=r"by an earlier Trainer .* Build the model anew"):
            trainer_for(model, optimizer, samples)


@pytest.mark.world_size(2)
def test_a_part_that_is_sharded_already():
    model = TinyComposer()
    sharded(model.net.blocks[1])
    with _every_rank_raises(PlanError, r"'net\.blocks\.1' is sharded by FSDP2 already"):
        sharded(model)


# --- Ranks that do not agree. ---


@DIFFERENT
@pytest.mark.world_size(2)
def test_ranks_with_different_depth():
    with _every_rank_raises(PlanError, r"(?s)Ranks 0 and 1 hold a different plan.*\+.*blocks\.3"):
        sharded(TinyLM(layers=3 + dist.get_rank()))


@DIFFERENT
@pytest.mark.world_size(2)
@pytest.mark.parametrize("part", ["dtype", "requires_grad", "shape", "name"])
def test_ranks_with_different_parameters(part: str):
    model = TinyLM()
    if dist.get_rank() == 1:
        _change(model.blocks[2], part)
    with _every_rank_raises(PlanError, r"(?s)Ranks 0 and 1 hold a different .*\+blocks\.2"):
        sharded(model)


def _change(block: nn.Module, part: str) -> None:
    """The same number of units, and as many elements as before but for `shape`."""
    if part == "dtype":
        block.to(torch.bfloat16)
    elif part == "requires_grad":
        block.down.bias.requires_grad_(False)
    elif part == "shape":
        block.down = nn.Linear(20, 11)
    else:
        block.renamed = block.down
        del block.down


@DIFFERENT
@pytest.mark.world_size(2)
def test_ranks_with_different_ties():
    with _every_rank_raises(PlanError, r"(?s)different plan.*tied: embed\.weight = head\.weight"):
        sharded(TinyLM("two modules" if dist.get_rank() else "none"))


@DIFFERENT
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "config",
    [
        {"reshard_after_forward": False},
        {"mixed_precision": "FULL"},
        {"wrap_policy": {"classes": ["Linear"]}},
        {"activation_checkpointing": True},
        {"data_parallel_replicate_degree": 2},
    ],
    ids=lambda config: next(iter(config)),
)
def test_ranks_with_different_settings(config: dict[str, Any]):
    message = rf"(?s)Ranks 0 and 1 hold a different configuration.*\+{next(iter(config))}"
    with _every_rank_raises(PlanError, message):
        sharded(TinyLM(), config if dist.get_rank() else {})


@DIFFERENT
@pytest.mark.world_size(2)
def test_ranks_with_different_precision():
    """The CPU computes in fp32 only, so rank 1 has an error of its own."""
    with _every_rank_raises(ValueError, "AMP_BF16 is not supported for CPU"):
        sharded(TinyLM(), FSDP2Config(), precision=["fp32", "amp_bf16"][dist.get_rank()])


@DIFFERENT
@pytest.mark.world_size(2)
@pytest.mark.parametrize("on_rank_1", ["none", "another kind", "a group more", "state"])
def test_ranks_with_different_optimizers(on_rank_1: str):
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        optimizer = _other_optimizer(on_rank_1, model)
    with _every_rank_raises(PlanError, "Ranks 0 and 1 hold a different optimizer"):
        prepare_fully_shard(model, optimizer, {})


def _other_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer | None:
    params = list(model.parameters())
    if kind == "none":
        return None
    if kind == "another kind":
        return torch.optim.AdamW(params)
    if kind == "a group more":
        return torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.state[params[0]]["momentum_buffer"] = torch.zeros_like(params[0])
    return optimizer


@ONE_RANK
@pytest.mark.world_size(4)
@pytest.mark.parametrize("failing", [0, 3])
def test_wrong_settings_on_one_rank(failing: int):
    wrong = {"reshard_after_forward": "never"}
    said = rf"On rank {failing}: reshard_after_forward: 'never' is invalid"
    with _every_rank_raises(ConfigError, said):
        sharded(TinyLM(), wrong if dist.get_rank() == failing else {})


@ONE_RANK
@pytest.mark.world_size(4)
@pytest.mark.parametrize("failing", [0, 3])
def test_exception_in_user_code_on_one_rank(failing: int):
    model = TinyLM()
    if dist.get_rank() == failing:
        model.fsdp_wrap_fn = _broken
    with _every_rank_raises(ZeroDivisionError, "division by zero") as caught:
        sharded(model)
    assert f"Raised on rank {failing}, at " in caught[0].__notes__[0]


@pytest.mark.world_size(2)
def test_answer_of_fsdp_wrap_fn_that_means_nothing():
    model = TinyLM()
    model.fsdp_wrap_fn = _answers_with_a_list
    with _every_rank_raises(ConfigError, "fsdp_wrap_fn returned a list for 'embed'"):
        sharded(model)


def _broken(_module: nn.Module) -> bool:
    return bool(1 / 0)


def _answers_with_a_list(_module: nn.Module) -> Any:
    return ["Block"]


@contextlib.contextmanager
def _every_rank_raises(kind: type[Exception], message: str) -> Iterator[list[Any]]:
    """The same error on every rank within seconds; after it, collectives still meet."""
    limit = Limit(5)
    errors: list[Any] = []
    with pytest.raises(kind, match=message) as caught:
        yield errors
    errors.append(caught.value)
    assert limit.left()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts


def applied(model: nn.Module) -> None:
    apply_plan(model, plan_wrapping(model, []), init_device_mesh("cpu", (2,)))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("own_loop", [False, True])
def test_a_torch_without_a_private_member(own_loop: bool):
    """Its sentence comes before anything is changed, so that the same model trains without it."""
    members._is_there.cache_clear()
    model = TinyLM()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        # Through prepare_fully_shard ranks tell each other: one whose torch lacks it is enough.
        if own_loop or dist.get_rank() == 1:
            patch.delattr(FSDPModule, "_get_fsdp_state")
        with pytest.raises(PatchError, match=r"has no 'FSDPModule\._get_fsdp_state'.*Install"):
            applied(model) if own_loop else sharded(model)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert type(model) is TinyLM
    members._is_there.cache_clear()
    sharded(model)


@pytest.mark.world_size(2)
def test_a_feature_whose_private_member_is_gone_is_refused_by_name():
    members._is_there.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch._C, "_current_graph_task_id")
        with pytest.raises(PatchError, match="or leave unused_parameters out"):
            sharded(TinyLM())
        sharded(TinyLM(), {"unused_parameters": False})
    members._is_there.cache_clear()
