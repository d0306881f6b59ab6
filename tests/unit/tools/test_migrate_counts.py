"""Keys that count steps, samples and files, as LLM Foundry's; what cannot be counted is said."""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

import pytest
import torch
import yaml
from composer.core import State
from composer.devices import DeviceCPU
from composer.optim import DecoupledAdamW
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from typer.testing import CliRunner

from composer_fsdp2.cli.main import app
from composer_fsdp2.foundry.run_file import NEEDED
from composer_fsdp2.tools.migrate.document import dump
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Report, Status
from tests.support.migrating import check_stable, entry_of

ADAMW = {"name": "decoupled_adamw", "lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8}
CLIPPED = {
    "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}}
}
"""unless a file says otherwise"""
UNDECAYED = [{"param_str_match": r"bias|norm|\bln_", "weight_decay": 0.0}]
LINEAR = {"name": "linear_decay_with_warmup", "t_warmup": "0ba"}
SPLIT = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}


def arguments(world_size: int | None = 8, **keys: Any) -> tuple[Report, dict[str, Any]]:
    """A file of `TrainingArguments`, and what is beside its block afterwards."""
    report = migrate(
        dump({"fsdp": "full_shard auto_wrap", "bf16": True} | keys), world_size=world_size
    )
    check_stable(report)
    return report, _beside(report)


def _beside(report: Report, *place: str) -> dict[str, Any]:
    data = yaml.safe_load(report.text)
    for name in place:
        data = data[name]
    apart = ("parallelism_config", "precision", "strategy_name")
    return {key: value for key, value in data.items() if key not in apart}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # A step is one of the optimizer, which is a batch of Composer.
    (SPLIT, {"device_train_microbatch_size": 3, "global_train_batch_size": 96}),
    (
        {"per_device_train_batch_size": 2},
        {"device_train_microbatch_size": 2, "global_train_batch_size": 16},
    ),
    ({"per_device_eval_batch_size": 2}, {"device_eval_batch_size": 2}),
    ({"num_train_epochs": 3}, {"max_duration": "3ep"}),
    ({"num_train_epochs": 3.0, "max_steps": -1}, {"max_duration": "3ep"}),
    ({"num_train_epochs": 3, "max_steps": 500}, {"max_duration": "500ba"}),
    ({"num_train_epochs": 1.5, "max_steps": 500}, {"max_duration": "500ba"}),
    (
        {"save_steps": 500, "save_total_limit": 2},
        {"save_interval": "500ba", "save_num_checkpoints_to_keep": 2},
    ),
    (
        {"save_steps": 0.1, "save_only_model": True},
        {"save_interval": "0.1dur", "save_weights_only": True},
    ),
    ({"save_strategy": "epoch", "save_steps": 500}, {"save_interval": "1ep"}),
    ({"output_dir": "out"}, {"save_folder": "out", "save_interval": "500ba"}),
    ({"output_dir": "out", "save_strategy": "no"}, {}),
    ({"eval_strategy": "steps", "eval_steps": 50}, {"eval_interval": "50ba"}),
    ({"evaluation_strategy": "epoch", "eval_steps": 50}, {"eval_interval": "1ep"}),
    ({"logging_steps": 10, "seed": 3}, {"console_log_interval": "10ba", "seed": 3}),
    # The decay of transformers' AdamW is multiplied with the rate.
    (
        {"learning_rate": 2e-5, "weight_decay": 0.1},
        {
            "optimizer": {**ADAMW, "weight_decay": 2e-6, "param_groups": UNDECAYED},
            "scheduler": LINEAR,
            **CLIPPED,
        },
    ),
    (
        {
            "learning_rate": 2e-5,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-6,
            "optim": "adamw_torch_fused",
        },
        {
            "optimizer": {**ADAMW, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0},
            "scheduler": LINEAR,
            **CLIPPED,
        },
    ),
    (
        {"learning_rate": 2e-5, "optim": "adafactor", "max_grad_norm": 0},
        {"scheduler": LINEAR},
    ),
    ({"warmup_steps": 20}, {"scheduler": {**LINEAR, "t_warmup": "20ba"}}),
    ({"warmup_steps": 0, "warmup_ratio": 0.03}, {"scheduler": {**LINEAR, "t_warmup": "0.03dur"}}),
    (
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
        {"scheduler": {"name": "cosine_with_warmup", "t_warmup": "0.1dur"}},
    ),
    (
        {"lr_scheduler_type": "constant", "warmup_ratio": 0.03},  # which transformers leaves out
        {"scheduler": {"name": "constant_with_warmup", "t_warmup": "0ba"}},
    ),
    (
        {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.03},
        {"scheduler": {"name": "constant_with_warmup", "t_warmup": "0.03dur"}},
    ),
]


@pytest.mark.table(*(f"keys{n}-expected{n}" for n in (0, 5, 9, 15)))
@pytest.mark.parametrize(("keys", "expected"), CASES)
def test_training_arguments(keys: dict[str, Any], expected: dict[str, Any]):
    assert arguments(**keys)[1] == expected
    inside = migrate(dump({"training": {"fsdp": "full_shard", **keys}}), world_size=8)
    assert _beside(inside, "training") == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"num_train_epochs": 1.5},
        {"save_strategy": "best"},
        {"lr_scheduler_type": "polynomial", "warmup_steps": 5},
        {"save_steps": "many"},
    ],
)
def test_what_has_no_equal_is_a_decision(keys: dict[str, Any]):
    report, beside = arguments(**keys)
    assert [entry.key for entry in report.entries if entry.is_open] == list(keys)[:1]
    assert beside == {}


@pytest.mark.parametrize("source", ["arguments", "deepspeed"])
def test_the_optimizer_computes_the_same(source: str):
    given = {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}
    keys = {"learning_rate": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.95}
    keys |= {"adam_epsilon": 1e-6, "weight_decay": 0.3}
    block = arguments(**keys)[1]["optimizer"]
    if source == "deepspeed":
        data = ZERO | {"optimizer": {"type": "AdamW", "params": given}}
        block = _beside(migrate(json.dumps(data)))["optimizer"]
    assert block.pop("name") == "decoupled_adamw"
    groups = block.pop("param_groups", [])
    assert groups == (UNDECAYED if source == "arguments" else [])
    models = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        torch.optim.AdamW(_groups(models[0], groups), **given),
        DecoupledAdamW(_groups(models[1], groups), **block),
    ]
    schedules = [LambdaLR(optimizer, lambda step: 1 / (step + 1)) for optimizer in optimizers]
    for step in range(5):
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            model(torch.arange(4, dtype=torch.float64) + step).square().sum().backward()
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(*(model.weight for model in models), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*(model.bias for model in models), rtol=1e-12, atol=1e-14)


def _groups(model: nn.Module, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups, as LLM Foundry makes them of what is written."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for group in written:
        names = [name for name in named if re.search(group["param_str_match"], name)]
        groups.append({"params": [named.pop(name) for name in names], "weight_decay": 0.0})
    return [{"params": list(named.values())}, *groups]


@pytest.mark.parametrize(
    ("keys", "made"),
    [
        ({"warmup_steps": 3}, get_linear_schedule_with_warmup),
        ({"warmup_steps": 3, "lr_scheduler_type": "cosine"}, get_cosine_schedule_with_warmup),
        ({"warmup_ratio": 0.3}, get_linear_schedule_with_warmup),
    ],
)
def test_the_schedule_is_the_same(keys: dict[str, Any], made: Any):
    block = arguments(**keys)[1]["scheduler"]
    schedulers = pytest.importorskip(
        "llmfoundry.registry", reason="needs the extra foundry"
    ).schedulers
    scheduler = schedulers.get(block.pop("name"))(**block)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = made(optimizer, 3, 10)
    state = State(nn.Linear(1, 1), 0, "run", DeviceCPU(), max_duration="10ba")
    for _ in range(10):
        assert scheduler(state) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
        state.timestamp = state.timestamp.to_next_batch()


def test_own_keys_of_llm_foundry_stay():
    report, beside = arguments(max_steps=500, max_duration="2ep")
    assert beside == {"max_duration": "2ep"}
    assert "has its own" in entry_of(report, "max_steps").reason


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (SPLIT, "3 x 4 x ranks"),
        ({"gradient_accumulation_steps": 4}, "samples of one forward x 4 x ranks"),
    ],
)
def test_without_the_number_of_ranks_the_formula_is_said(keys: dict[str, Any], said: str):
    report, beside = arguments(world_size=None, **keys)
    entry = entry_of(report, "global_train_batch_size")
    assert (entry.status, entry.value) == (Status.CHANGES, said)
    assert "--world-size N" in entry.reason
    assert "global_train_batch_size" not in beside
    assert "`global_train_batch_size: 64`" in report.remarks[-1]


def test_ranks_that_read_the_same_batch_count_once():
    config = {"distributed_config": {"tp_size": 2}}
    assert arguments(**SPLIT, **config)[1]["global_train_batch_size"] == 3 * 4 * 4
    report, _ = arguments(world_size=None, **SPLIT, **config)
    assert entry_of(report, "global_train_batch_size").value == "3 x 4 x ranks / 2"


def test_a_run_of_another_trainer_is_completed_before_it_is_compared(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(dump({"fsdp": "full_shard auto_wrap", "bf16": True, "max_steps": 5}))
    ran = CliRunner().invoke(app, ["migrate", str(old), "-o", str(new)])
    said = ran.output.splitlines()
    assert said[-1] == f"Next: composer-fsdp2 doctor {new}"
    # Each key with a value that can be copied; what the file says is not among them.
    lacking = next(line for line in said if line.startswith("A run of LLM Foundry needs"))
    written = [yaml.safe_load(text) for text in re.findall(r"`(\w+: [^`]+)`", lacking)]
    assert [*chain(*written)] == [key for key in NEEDED if key != "max_duration"]


# --- ROLL. ---

ROLE = """
max_steps: 100
save_steps: 20
actor_train:
  model_args: {{ulysses_size: 2, freeze_module_prefix: {frozen}}}
  training_args:
    {rate}
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 32
    num_train_epochs: 50
  strategy_args: {{strategy_name: fsdp2_train, strategy_config: {{fsdp_size: 16}}}}
  device_mapping: {ranks}
  infer_batch_size: 4
"""


@pytest.mark.parametrize("ranks", ["list(range(0,16))", "list(range(16))", str([*range(16)])])
@pytest.mark.parametrize("frozen", ["'vision.tower, audio'", "[vision.tower, audio]"])
def test_a_role_of_roll(ranks: str, frozen: str):
    report = migrate(ROLE.format(ranks=ranks, frozen=frozen, rate="learning_rate: 2.0e-5"))
    check_stable(report)
    patterns = [r"^model\.vision\.tower", r"^model\.audio"]
    assert _beside(report, "actor_train", "strategy_args") == {
        "device_train_microbatch_size": 1,
        "global_train_batch_size": 32 * 16 // 2,
        "max_duration": "50ep",
        "device_eval_batch_size": 4,
        "optimizer": {**ADAMW, "weight_decay": 0.0, "disable_grad": patterns},
        "scheduler": LINEAR,
    }
    assert "`max_duration`" in entry_of(report, "max_steps").reason
    assert "`save_interval`" in entry_of(report, "save_steps").reason
    assert "`max_duration`" in report.remarks[0]


def test_what_cannot_be_written_for_a_role_is_said():
    report = migrate(ROLE.format(ranks="'0-15'", frozen="vision", rate="seed: 1"))
    place = "actor_train.strategy_args"
    assert entry_of(report, f"{place}.global_train_batch_size").value == "1 x 32 x ranks / 2"
    frozen = entry_of(report, f"{place}.optimizer.disable_grad")
    assert (frozen.status, frozen.value) == (Status.CHANGES, r"['^model\\.vision']")


# --- DeepSpeed. ---

ZERO: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
ADAM = {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.1}}
PER_RANK = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10},
            {
                "global_train_batch_size": 64,
                "device_train_microbatch_size": 4,
                "console_log_interval": "10ba",
            },
        ),
        (PER_RANK, {"device_train_microbatch_size": 4, "global_train_batch_size": 64}),
        (
            {"train_batch_size": "auto", "optimizer": ADAM},
            {"optimizer": {**ADAMW, "weight_decay": 2e-6}},
        ),
        ({"optimizer": {"type": "Lamb"}, "scheduler": {"type": "WarmupLR"}}, {}),
        ({"optimizer": {"name": "no_op"}, "seed": 3}, {"optimizer": {"name": "no_op"}, "seed": 3}),
    ],
)
def test_deepspeed(keys: dict[str, Any], expected: dict[str, Any]):
    report = migrate(json.dumps(ZERO | keys), world_size=8)
    assert _beside(report) == expected
    check_stable(report)


def test_deepspeed_in_files_of_others():
    deepspeed = {"deepspeed": ZERO | dict.fromkeys(PER_RANK, "auto"), "bf16": True}
    report = migrate(dump(deepspeed | SPLIT), world_size=8)
    assert _beside(report) == {"device_train_microbatch_size": 3, "global_train_batch_size": 96}
    settings = {"zero_stage": 3, "gradient_accumulation_steps": 4}
    plugin = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": settings}
    entry = entry_of(migrate(dump(plugin)), "global_train_batch_size")
    assert entry.value == "samples of one forward x 4 x 8"


@pytest.mark.parametrize(
    ("kind", "params", "keys", "expected", "status"),
    [
        ("WarmupLR", {"warmup_num_steps": "auto"}, {"warmup_steps": 20}, "20ba", "changes"),
        ("WarmupLR", {"warmup_type": "linear"}, {"warmup_ratio": 0.1}, "0.1dur", "converted"),
        ("WarmupDecayLR", {"warmup_num_steps": 7}, {"warmup_steps": 20}, "7ba", "changes"),
        ("WarmupDecayLR", {}, {"lr_scheduler_type": "cosine"}, "0ba", "converted"),
        ("WarmupLR", {"warmup_min_lr": 1e-6}, {"warmup_steps": 20}, None, "changes"),
        ("OneCycle", {}, {"warmup_steps": 20}, None, "changes"),
        ("WarmupLR", "auto", {"warmup_steps": 20}, None, "changes"),
        ("WarmupLR", [1], {"warmup_steps": 20}, None, "changes"),
    ],
)
def test_a_schedule_of_deepspeed_is_preferred(
    kind: str, params: Any, keys: dict[str, Any], expected: str | None, status: str
):
    """As transformers has it; DeepSpeed's own default rises with a logarithm."""
    names = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear_decay_with_warmup"}
    block = {"scheduler": {"type": kind, "params": params}}
    report = migrate(dump({"deepspeed": ZERO | block, "learning_rate": 2e-5, **keys}), world_size=8)
    scheduler = _beside(report).get("scheduler")
    assert scheduler == (expected and {"name": names[kind], "t_warmup": expected})
    assert entry_of(report, "deepspeed.scheduler").status.value.startswith(status)
    if expected is None:
        assert entry_of(report, "warmup_steps").status is Status.NOT_NEEDED


def test_state_in_bits_stays_in_bits():
    report, beside = arguments(learning_rate=2e-5, optim="adamw_bnb_8bit")
    assert beside["optimizer"]["name"] == "decoupled_adamw"
    entry = entry_of(report, "optim")
    assert (entry.status, entry.settings) == (Status.CHANGES, {"optimizer_state": {"bits": 8}})


def test_an_adam_whose_decay_is_a_part_of_the_gradient_is_no_adamw():
    params = {"lr": 2e-5, "weight_decay": 0.1, "adam_w_mode": False}
    report = migrate(json.dumps(ZERO | {"optimizer": {"type": "Adam", "params": params}}))
    assert "optimizer" not in _beside(report)
    assert entry_of(report, "optimizer").status is Status.CHANGES
