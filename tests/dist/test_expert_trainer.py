"""Composer's Trainer with experts over ranks: settings, checkpoints, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.algorithms import EMA, GradientClipping
from composer.callbacks import OptimizerMonitor, SpeedMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.utils.dist import get_sampler
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from composer_fsdp2 import FSDP2Monitor, full_tensor, install, summon_full_params
from composer_fsdp2.errors import ConfigError, PlanError
from tests.support.experts import EXPERTS, FAMILIES, STACKED, renamed_experts
from tests.support.models import VOCAB
from tests.support.parity import TOLERANCE, assert_close, full
from tests.support.training import largest_difference, trainer_for, weights

STEPS, SIZE = 3, 8
LAYER = "DeepseekV3DecoderLayer"

pytestmark = [
    pytest.mark.world_size(4),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:.*are experts or towers"),
]


class Language(ComposerModel):
    """A batch is (ids, ids)."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.net: Any = FAMILIES[family][0]()

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0], use_cache=False)

    def loss(self, outputs: Any, batch: Any, *_: Any) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[0][:, 1:].flatten())


def built(family: str = "Mixtral") -> Language:
    torch.manual_seed(0)
    return Language(family)


def samples(steps: int = STEPS) -> TensorDataset:
    ids = torch.randint(0, VOCAB, (steps * SIZE, 7), generator=torch.Generator().manual_seed(3))
    return TensorDataset(ids, ids)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.1)


def trainer_of(layout: dict[str, Any], family: str = "Mixtral", **kwargs: Any) -> Any:
    model = built(family)
    settings: dict[str, Any] = {"batch": SIZE // 4, "parallelism_config": layout}
    return trainer_for(model, adamw(model), samples(), **(settings | kwargs))


def trained_alone(family: str = "Mixtral") -> tuple[Language, torch.optim.Optimizer]:
    model, data = built(family), samples()
    optimizer = adamw(model)
    for start in range(0, len(data), SIZE):
        batch = data[start : start + SIZE]
        model.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_trainer_is_as_one_process():
    install()
    trainer = trainer_of(
        {"ep": {"degree": 2}, "fsdp2": {}},
        "DeepSeek-V3",
        algorithms=[GradientClipping("norm", 100.0)],
        callbacks=[SpeedMonitor()],
        device_train_microbatch_size=1,
    )
    trainer.fit()
    expected, _ = trained_alone("DeepSeek-V3")
    assert trainer.state.timestamp.sample.value == STEPS * SIZE
    assert largest_difference(trainer.state.model, expected) <= TOLERANCE


def test_loads_are_those_of_all_ranks():
    """With microbatches and recomputation, of each batch by itself, and none of an evaluation."""
    install()
    logger = InMemoryLogger()
    trainer_of(
        {"ep": {"degree": 2}, "fsdp2": {"activation_checkpointing": {"classes": [LAYER]}}},
        "DeepSeek-V3",
        callbacks=[FSDP2Monitor()],
        loggers=[logger],
        device_train_microbatch_size=1,
        eval_dataloader=DataLoader(samples(1), batch_size=2, sampler=get_sampler(samples(1))),
        eval_interval="1ba",
    ).fit()
    model, data = built("DeepSeek-V3"), samples()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            seen[name.replace("gate", "experts")] = chosen = []
            place = -1 if STACKED else 0  # of the indices, in what a router returns
            module.register_forward_hook(
                lambda _, __, out, chosen=chosen, place=place: chosen.append(out[place])
            )
    model(data[:SIZE])
    assert seen
    for name, (chosen,) in seen.items():
        tokens = chosen.flatten().bincount(minlength=EXPERTS)
        metrics = logger.data[f"fsdp2/expert_load/{name}"]
        assert len(metrics) == STEPS
        assert metrics[0][1] == pytest.approx(tokens.max().item() / tokens.float().mean().item())


# --- Checkpoints ---

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 4": {"ep": {"degree": 4}, "fsdp2": {}},
    "EP 2 x FSDP 2": {"ep": {"degree": 2}, "fsdp2": {}},
    "FSDP 4": {"fsdp2": {}},
    "HSDP 2 x 2": {"fsdp2": {"data_parallel_replicate_degree": 2}},
    "EP 2 in HSDP": {"ep": {"degree": 2}, "fsdp2": {"data_parallel_replicate_degree": 2}},
    "TP 2 x FSDP 2": {
        # Their attention has one head of keys.
        "tp": {"degree": 2, "layer_plan": {"*.self_attn.*": "whole"}},
        "fsdp2": {},
    },
    "TP 2 x EP 2": {
        "tp": {"degree": 2, "layer_plan": {"*.self_attn.*": "whole"}},
        "ep": {"degree": 2},
        "fsdp2": {},
    },
}


def cases() -> list[Any]:
    """Each layout saves once, both kinds of file by turns; all load it, if experts are divided.

    DeepSeek-V3, which calls no expert without a token, has two layouts that save.
    """
    # Experts of transformers 5 are in one tensor, whose own tensor plan is refused.
    names = [name for name, layout in LAYOUTS.items() if not (STACKED and "tp" in layout)]
    other = "EP 4" if STACKED else "TP 2 x EP 2"
    found: list[Any] = [
        pytest.param("Mixtral", "FSDP 4", [other], "full", id="default"),
        pytest.param("Mixtral", "EP 2 x FSDP 2", ["FSDP 4"], "sharded", marks=pytest.mark.smoke),
        pytest.param("Mixtral", "FSDP 4", ["EP 4"], "full", marks=pytest.mark.smoke),
        pytest.param("DeepSeek-V3", "EP 2 in HSDP", ["FSDP 4", "EP 4"], "sharded"),
        pytest.param("DeepSeek-V3", "FSDP 4", ["EP 2 x FSDP 2"], "full"),
    ]
    for name, kind in zip(names, itertools.cycle(("sharded", "full")), strict=False):
        others = [other for other in names if "EP" in name + other]
        found.append(pytest.param("Mixtral", name, others, kind, id=name))
    return found


def _state(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole state of the optimizer, by name and key. Collective: yes."""
    found: dict[str, torch.Tensor] = {}
    values = trainer.state.get_optim_state_dict()["AdamW"]["state"]
    for name, entry in values.items():
        found.update({f"{name}/{key}": full(value).clone() for key, value in entry.items()})
    return found


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.table("default")
@pytest.mark.parametrize(("family", "before", "after", "kind"), cases())
def test_checkpoints_of_another_layout(
    family: str, before: str, after: list[str], kind: str, tmp_path: Path
):
    """At no difference at all, the state of the optimizer included."""
    install()
    layout = _with_kind(LAYOUTS[before], kind)
    saving = trainer_of(layout, family, save_folder=str(tmp_path), save_interval="1ep")
    saving.fit()
    values, state = weights(saving.state.model), _state_as("sharded", saving)
    (path,) = [one for one in tmp_path.iterdir() if not one.is_symlink()]
    for other in after:
        layout = _with_kind(LAYOUTS[other], kind)
        loading = trainer_of(layout, family, load_path=str(path))
        assert _difference(values, weights(loading.state.model)) == 0.0, other
        assert _difference(state, _state_as("sharded", loading)) == 0.0, other
        loading.fit(duration="1ep")


def _in_other_form(path: Path, family: str, kind: str, dim: int) -> Path:
    """Writes a file as the other transformers would, as a folder if `sharded`. Collective: yes."""
    saved = torch.load(path, weights_only=False)
    state = saved["state"]
    state["model"] = renamed_experts(dict(state["model"]), family)
    optimizer = state["optimizers"]["AdamW"]
    keys = next(iter(optimizer["state"].values()))
    by_key = {
        key: renamed_experts({n: values[key] for n, values in optimizer["state"].items()}, family)
        for key in keys
    }
    optimizer["state"] = {name: {key: by_key[key][name] for key in keys} for name in by_key["step"]}
    (group,) = optimizer["param_groups"]
    group["params"] = list(optimizer["state"])
    target = path.parent / f"other-{kind}"
    if kind == "full":
        if dist.get_rank() == 0:
            torch.save(saved, target)
        dist.barrier()
        return target
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for holder in (state["model"], *optimizer["state"].values()):
        for name, value in holder.items():
            if value.ndim:
                placement = Shard(min(dim, value.ndim - 1))
                holder[name] = distribute_tensor(value, mesh, [placement])
    checkpoint.save(saved, checkpoint_id=target)
    return target


def _trained_on(path: Path, layout: dict[str, Any], family: str, **kwargs: Any) -> Any:
    """State at the load and at the end of a run that goes on from a checkpoint."""
    trainer = trainer_of(layout, family, load_path=str(path), **kwargs)
    found = weights(trainer.state.model), _state_as("sharded", trainer)
    trainer.fit(duration="1ep")
    return *found, weights(trainer.state.model), _state_as("sharded", trainer)


@pytest.mark.parametrize(
    ("family", "layout", "dim", "kind"),
    [
        ("Mixtral", "FSDP 4", 1, "sharded"),
        ("Mixtral", "EP 4", 0, "full"),
        ("Qwen3-MoE", "EP 2 x FSDP 2", 0, "sharded"),
        ("Qwen3-MoE", "FSDP 4", 0, "full"),
    ],
)
def test_checkpoints_of_the_other_transformers(
    family: str, layout: str, dim: int, kind: str, tmp_path: Path
):
    """transformers 4 has matrices of each expert, transformers 5 all of them in one tensor."""
    install()
    settings = _with_kind(LAYOUTS[layout], "full")
    trainer_of(settings, family, save_folder=str(tmp_path), save_interval="1ep").fit()
    (path,) = [one for one in tmp_path.iterdir() if not one.is_symlink()]
    dist.barrier()
    other = _in_other_form(path, family, kind, dim)
    expected = _trained_on(path, settings, family)
    found = _trained_on(other, settings, family)
    assert [_difference(*pair) for pair in zip(expected, found, strict=True)] == [0.0] * 4


def _with_kind(layout: dict[str, Any], kind: str) -> dict[str, Any]:
    return {**layout, "fsdp2": {**layout["fsdp2"], "state_dict_type": kind}}


def _state_as(kind: str, trainer: Any) -> dict[str, torch.Tensor]:
    config: Any = trainer.state.fsdp_config
    asked, config.state_dict_type = config.state_dict_type, kind
    found = _state(trainer)
    config.state_dict_type = asked
    return found


@pytest.mark.matrix
def test_a_file_is_that_of_one_process(tmp_path: Path):
    install()
    layout = {"ep": 2, "fsdp2": {"state_dict_type": "full"}}
    trainer = trainer_of(layout, save_folder=str(tmp_path), save_interval="1ep")
    trainer.fit()
    values = weights(trainer.state.model)
    dist.barrier()
    (path,) = [one for one in tmp_path.iterdir() if not one.is_symlink()]
    saved = torch.load(path, weights_only=False)["state"]
    assert _difference(values, saved["model"]) == 0.0
    expected, optimizer = trained_alone()
    names = [name for name, _ in expected.named_parameters()]
    assert [
        name for group in saved["optimizers"]["AdamW"]["param_groups"] for name in group["params"]
    ] == names
    for name, param in expected.named_parameters():
        for key, value in optimizer.state[param].items():
            assert_close(
                f"{key} of {name}", value, saved["optimizers"]["AdamW"]["state"][name][key]
            )


def test_whole_weights_are_shown_and_written():
    install()
    trainer = trainer_of({"ep": {"degree": 4}, "fsdp2": {}})
    trainer.fit()
    model = trainer.state.model
    expected = weights(model)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert names
    for name in names:
        whole = full_tensor(model, name)
        assert whole is not None
        assert torch.equal(whole, expected[name])
    with summon_full_params(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), name
            param.data.mul_(2.0)
    assert _difference(weights(model), {name: 2 * value for name, value in expected.items()}) == 0.0


def test_items_that_have_not_been_tried_are_refused():
    install()
    with pytest.raises(ConfigError, match="OptimizerMonitor and expert parallelism"):
        trainer_of({"ep": {"degree": 2}, "fsdp2": {}}, callbacks=[OptimizerMonitor()])


def _averages(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole averages by name. Collective: yes."""
    (ema,) = trainer.state.algorithms
    named = ema.state_dict()["ema_model"]["named_parameters_dict"]
    return {name: full(tensor).clone() for name, tensor in named.items()}


@pytest.mark.table("full")
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_averages_go_on_in_another_layout(kind: str, tmp_path: Path):
    install()
    before, after = (_with_kind(LAYOUTS[name], kind) for name in ("EP 2 x FSDP 2", "FSDP 4"))
    found: list[Any] = []
    for number, (one, other) in enumerate([(before, after), (after, before)]):
        folder = tmp_path / str(number)
        ema: dict[str, Any] = {"algorithms": [EMA(half_life="2ba")]}
        saving = trainer_of(one, save_folder=str(folder), save_interval="1ep", **ema)
        saving.fit()
        found.append(_averages(saving))
        (path,) = [saved for saved in folder.iterdir() if not saved.is_symlink()]
        ema = {"algorithms": [EMA(half_life="2ba")]}
        loading = trainer_of(other, load_path=str(path), **ema)
        loading.fit(duration="1ep")
        assert loading.state.timestamp.batch.value == 2 * STEPS
        found.append(_averages(loading))
    assert max(_difference(found[0], found[2]), _difference(found[1], found[3])) <= TOLERANCE


def test_settings_that_stand_twice_are_refused():
    install()
    with pytest.raises(ConfigError, match=r"Both 'ep' and 'fsdp2\.expert_parallel'"):
        trainer_of({"ep": {"degree": 2}, "fsdp2": {"expert_parallel": 2}})
    with pytest.raises(ConfigError, match="has 'ep' without 'fsdp2'"):
        trainer_of({"ep": {"degree": 2}})
    with pytest.raises(ConfigError, match="is auto, and expert parallelism"):
        trainer_of({"ep": {"degree": 2}, "fsdp2": {}}, device_train_microbatch_size="auto")


def test_an_optimizer_that_was_built_later_is_refused():
    from composer_fsdp2 import prepare_fully_shard

    model = built()
    prepare_fully_shard(model, None, {"expert_parallel": 2}, device="cpu")
    batch = samples()[:2]
    model.loss(model(batch), batch).backward()
    with pytest.raises(PlanError, match="the experts of one rank alone"):
        adamw(model).step()
