"""Configurations of verl, row by row."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from composer_fsdp2.config.schema import parse_config
from composer_fsdp2.tools.migrate.document import dump
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.migrate.report import Report, Status
from composer_fsdp2.tools.migrate.rl_trainers import VERL
from tests.support.migrating import check_stable, entry_of, rows_without_a_case, settings_of

K, R, C, NOT, CH = (
    Status.KEPT,
    Status.RENAMED,
    Status.CONVERTED,
    Status.NOT_NEEDED,
    Status.CHANGES,
)
DEC = Status.DECISION
DEGREE = "ulysses_sequence_parallel_size"
SEQUENCE = {"sequence_parallel": {"degree": 4, "method": "ulysses"}}
UNSHARDED = [
    *("seed", "full_determinism", "grad_offload", "use_fused_kernels", "use_remove_padding"),
    *("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu"),
    *("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"),
]
DEFAULT = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
BLOCK: list[tuple[str, Any, Status, dict[str, Any]]] = [
    (DEGREE, 1, NOT, {}),
    (DEGREE, 4, C, SEQUENCE),
    (DEGREE, "many", DEC, {}),
    ("strategy", "fsdp2", NOT, {}),
    ("_target_", "verl.workers.config.FSDPEngineConfig", NOT, {}),
    ("fsdp_size", -1, NOT, {}),
    (
        "fsdp_size",
        8,
        C,
        {"data_parallel_shard_degree": 8, "data_parallel_replicate_degree": -1},
    ),
    ("reshard_after_forward", None, NOT, {}),
    ("reshard_after_forward", True, K, {"reshard_after_forward": True}),
    ("reshard_after_forward", False, K, {"reshard_after_forward": False}),
    ("offload_policy", False, NOT, {}),
    ("offload_policy", True, R, {"cpu_offload": True}),
    ("cpu_offload", False, NOT, {}),
    ("cpu_offload", True, R, {"cpu_offload": True}),
    ("offload_params", True, NOT, {}),
    ("param_offload", False, NOT, {}),
    ("param_offload", True, CH, {}),
    ("optimizer_offload", False, NOT, {}),
    ("optimizer_offload", True, C, {"optimizer_state": {"device": "cpu"}}),
    ("forward_prefetch", False, NOT, {}),
    ("forward_prefetch", True, C, {"forward_prefetch": 1}),
    ("use_orig_params", False, NOT, {}),
    *((key, 1, NOT, {}) for key in UNSHARDED),
    ("dtype", None, NOT, {}),
    (
        "dtype",
        "float16",
        R,
        {"mixed_precision": {"param_dtype": "float16", "reduce_dtype": "fp32"}},
    ),
    ("mixed_precision", None, C, {}),
    ("wrap_policy", None, C, {}),
    ("model_dtype", "fp32", NOT, {}),
    ("model_dtype", "bfloat16", DEC, {}),
    ("mixed_precision.buffer_dtype", "fp32", NOT, {}),
    ("wrap_policy.disable", False, NOT, {}),
    ("wrap_policy.min_num_params", 0, NOT, {}),
    ("wrap_policy.min_num_params", 100, R, {"wrap_policy": {"min_num_params": 100}}),
    ("wrap_policy.transformer_layer_cls_to_wrap", [], NOT, {}),
    (
        "wrap_policy.transformer_layer_cls_to_wrap",
        ["A", "B"],
        R,
        {"wrap_policy": {"classes": ["A", "B"]}},
    ),
    ("use_torch_compile", True, NOT, {}),
    ("entropy_from_logits_with_chunking", False, NOT, {}),
    ("entropy_checkpointing", False, NOT, {}),
    ("forward_only", False, NOT, {}),
    ("forward_only", True, DEC, {}),
    ("fsdp_sizze", 8, DEC, {}),
]
DTYPES = {"param_dtype": "fp16", "reduce_dtype": "bf16"}


def nested(key: str, value: Any) -> dict[str, Any]:
    *around, leaf = key.split(".")
    found: dict[str, Any] = {leaf: value}
    for name in reversed(around):
        found = {name: found}
    return found


def in_engine(key: str, value: Any) -> Report:
    """The engine of the SFT trainer of today."""
    own = {} if key == "fsdp_size" else {"fsdp_size": -1}
    return migrate(dump({"engine": {DEGREE: 1, **own, **nested(key, value)}}), world_size=8)


def in_actor(degree: Any) -> Report:
    """A model of the RL trainers, whose degree stands beside its block."""
    return migrate(dump({"actor": {DEGREE: degree, "fsdp_config": {"param_offload": False}}}))


def in_model(degree: Any, *around: str) -> Report:
    """The SFT trainer of before, whose degree stands beside the model."""
    data: dict[str, Any] = {"model": {"fsdp_config": {"model_dtype": "fp32"}}, DEGREE: degree}
    for name in around:
        data = {name: data}
    return migrate(dump(data))


@pytest.mark.table(
    "ulysses_sequence_parallel_size-many-needs a decision-becomes2",
    "strategy-fsdp2-no longer needed-becomes3",
    "reshard_after_forward-None-no longer needed-becomes7",
    "offload_policy-True-renamed-becomes11",
    "offload_params-True-no longer needed-becomes14",
    "optimizer_offload-False-no longer needed-becomes17",
    "use_orig_params-False-no longer needed-becomes21",
    "model_dtype-bfloat16-needs a decision-becomes37",
    "wrap_policy.min_num_params-0-no longer needed-becomes40",
    "wrap_policy.transformer_layer_cls_to_wrap-value43-renamed-becomes43",
    "entropy_from_logits_with_chunking-False-no longer needed-becomes45",
    "forward_only-False-no longer needed-becomes47",
)
@pytest.mark.parametrize(("key", "value", "status", "becomes"), BLOCK)
def test_a_key_of_the_engine(key: str, value: Any, status: Status, becomes: dict[str, Any]):
    report = in_engine(key, value)
    assert report.dialect == VERL.name
    entry = entry_of(report, f"engine.{key}")
    assert (entry.status, entry.settings) == (status, becomes)
    assert entry.reason
    assert bool(entry.options) == (status is DEC)
    assert settings_of(report) == {**DEFAULT, **becomes}
    parse_config(settings_of(report))
    check_stable(report)


def test_dtypes_that_are_given():
    report = in_engine("mixed_precision", DTYPES)
    assert settings_of(report) == {"mixed_precision": DTYPES}


@pytest.mark.parametrize(
    ("degree", "status", "becomes"), [(1, NOT, {}), (4, C, SEQUENCE), ("many", DEC, {})]
)
def test_the_degree_wherever_it_stands(degree: Any, status: Status, becomes: dict[str, Any]):
    report = in_actor(degree)
    entry = entry_of(report, f"actor.{DEGREE}")
    assert (entry.status, settings_of(report)) == (status, {**DEFAULT, **becomes})
    for around in ((), ("trainer",)):
        report = in_model(degree, *around)
        assert entry_of(report, ".".join((*around, DEGREE))).status is status
        assert settings_of(report) == {**DEFAULT, **becomes}
        parse_config(settings_of(report))
        check_stable(report)


SFT = """
model:
  {checkpointing}
  fsdp_config: {{model_dtype: fp32}}
optim: {{clip_grad: 0.5}}
"""
PPO = """
actor_rollout_ref:
  model: {{{checkpointing}}}
  actor: {{grad_clip: 0.5, fsdp_config: {{param_offload: false}}}}
  ref: {{fsdp_config: {{param_offload: true}}, strategy: {strategy}}}
"""
ON = "enable_gradient_checkpointing: true, enable_activation_offload: true"
AROUND = [
    SFT.format(checkpointing=ON.replace(", ", "\n  ")),
    PPO.format(checkpointing=ON, strategy="fsdp2"),
    PPO.format(checkpointing="enable_gradient_checkpointing: false", strategy="megatron"),
]


def test_what_stands_around_a_model():
    """Checkpointing of the model, clipping of the one that is trained, and no other engine."""
    sft, ppo, mixed = (migrate(text) for text in AROUND)
    model = OmegaConf.create(sft.text).model
    new = OmegaConf.create(ppo.text).actor_rollout_ref
    for found in (model, new.actor, new.ref):
        settings = found.parallelism_config.fsdp2
        assert settings.activation_checkpointing is settings.activation_cpu_offload is True
    for found in (model, new.actor):
        assert found.algorithms.gradient_clipping.clipping_threshold == 0.5
    assert "algorithms" not in new.ref
    off = OmegaConf.create(mixed.text).actor_rollout_ref.actor.parallelism_config.fsdp2
    assert off.activation_checkpointing is False
    assert not ppo.having(DEC, Status.UNSUPPORTED)
    (entry,) = mixed.having(Status.UNSUPPORTED)
    assert entry.key == "actor_rollout_ref.ref.strategy"


def test_every_model_of_a_trainer_has_its_own():
    block = {"fsdp_config": {"param_offload": False, "fsdp_size": 4}}
    text = dump({"actor_rollout_ref": {"actor": {DEGREE: 4, **block}, "ref": {DEGREE: 1, **block}}})
    both = OmegaConf.create(migrate(text).text).actor_rollout_ref
    actor, ref = (both[name].parallelism_config.fsdp2 for name in ("actor", "ref"))
    assert actor.sequence_parallel == SEQUENCE["sequence_parallel"]
    assert "sequence_parallel" not in ref
    assert actor.data_parallel_shard_degree == ref.data_parallel_shard_degree == 4


OFF = """
model:
  enable_gradient_checkpointing: null
  fsdp_config: {model_dtype: fp32}
grad_clip: 0
optim: {clip_grad: 0}
"""


def verl_reports() -> list[Report]:
    """One migration of every row and more."""
    reports = [in_engine(key, value) for key, value, *_ in BLOCK]
    reports += [in_engine("mixed_precision", DTYPES), *(migrate(text) for text in [*AROUND, OFF])]
    for degree in (1, 4, "many"):
        reports += [in_actor(degree), in_model(degree), in_model(degree, "trainer")]
    return reports


def test_every_row_has_a_case():
    assert rows_without_a_case(VERL, verl_reports()) == []
