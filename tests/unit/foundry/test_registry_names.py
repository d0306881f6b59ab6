"""A name that no registry has is refused before anything is built."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from composer_fsdp2 import ConfigError
from tests.support.foundry import FSDP2, run_of, write_assets

pytest.importorskip("llmfoundry", reason="needs the extra foundry")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return run_of(folder, FSDP2, {"callbacks": {"lr_monitor": {}}, "loggers": None})


def check(cfg: dict[str, Any]) -> dict[str, Any]:
    from llmfoundry.registry import config_transforms

    from composer_fsdp2.foundry.registered import register
    from composer_fsdp2.foundry.registry_names import checking_names

    register()
    return checking_names(config_transforms.get_all())(cfg)


def test_known_names_pass(good: dict[str, Any]):
    assert check(good) == good


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "mpt_causal_lmm"}}, "model.name: 'mpt_causal_lmm'.*'mpt_causal_lm'"),
        ({"optimizer": {"name": "muonn"}}, "optimizer.name: 'muonn'.*Did you mean 'muon'"),
        ({"scheduler": {"name": None}}, "scheduler.name: null is in no registry of schedulers"),
        ({"train_loader": {"name": "texts"}}, "train_loader.name: 'texts'.*'text'"),
        ({"callbacks": {"lr_monitr": {}}}, "callbacks: 'lr_monitr'.*'lr_monitor'"),
        ({"loggers": {"wandbb": {}}}, "loggers: 'wandbb'.*'wandb'"),
    ],
)
def test_an_unknown_name_is_refused(good: dict[str, Any], changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        check({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optimizer": {"name": "muon", "betas": [0.9, 0.95]}},
            r"optimizer: Muon has no argument 'betas'. Did you mean 'adamw_betas'\? Write one of",
        ),
        (
            {"scheduler": {"name": "cosine_with_warmup", "t_warmpu": "1ba"}},
            r"scheduler: \w+ has no argument 't_warmpu'. Did you mean 't_warmup'\?",
        ),
        (
            {"callbacks": {"speed_monitor": {"windowsize": 3}}},
            r"callbacks.speed_monitor: SpeedMonitor has no argument 'windowsize'. "
            r"Did you mean 'window_size'\?",
        ),
        ({"callbacks": {"scheduled_gc": {1: 2}}}, "ScheduledGarbageCollector has no argument 1"),
        (
            {"algorithms": {"gradient_clipping": {"threshold": 1}}},
            "GradientClipping has no argument 'threshold'.*'clipping_threshold'",
        ),
        ({"loggers": {"tensorboard": {"log_folder": "x"}}}, "no argument 'log_folder'.*'log_dir'"),
    ],
)
def test_an_unknown_argument_is_refused(good: dict[str, Any], changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        check({**good, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {
            "optimizer": {
                "name": "decoupled_lionw",
                "lr": 1,
                "disable_grad": "a",
                "param_groups": [],
            }
        },
        {"optimizer": {"name": "adalr_lion", "lr": 1, "outlier_threshold": 2.0}},
        {"loggers": {"wandb": {"project": "a", "init_kwargs": {"anything": 1}}}},
        {"callbacks": {"hf_checkpointer": {"save_folder": "a", "save_interval": "1ba"}}},
        {"callbacks": {"run_timeout": {"timeout": 3}, "curriculum_learning": {"schedule": []}}},
        {"callbacks": {"lr_monitor": None}, "scheduler": {"name": "constant_with_warmup"}},
    ],
)
def test_arguments_of_every_kind_pass(good: dict[str, Any], changes: dict[str, Any]):
    cfg = {**good, **changes}
    assert check(cfg) == cfg


def test_all_are_named_at_once(good: dict[str, Any]):
    wrong = {**good, "optimizer": {"name": "a"}, "model": {"name": "b"}}
    with pytest.raises(ConfigError, match=r"model.name: 'b'(.|\n)*optimizer.name: 'a'"):
        check(wrong)


def own_transform(folder: Path, body: str) -> Any:
    """A config transform as a file of `code_paths` brings it."""
    from llmfoundry.utils.registry_utils import import_file

    path = folder / "own_transform.py"
    path.write_text(f"{body}\ndef own(cfg):\n    cfg['model']['name'] = 'mpt_causal_lm'\n")
    return import_file(path).own


@pytest.mark.parametrize(
    ("body", "block", "is_refused"),
    [
        ("", "model", False),  # the code names it
        ("", "optimizer", True),
        ("import another_package_of_mine", "optimizer", False),  # which may do anything
    ],
)
def test_another_transform_may_still_change_what_it_names(
    good: dict[str, Any],
    body: str,
    block: str,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from llmfoundry.registry import config_transforms
    from llmfoundry.utils.registry_utils import save_registry

    from composer_fsdp2.foundry.registry_names import checking_names

    monkeypatch.setitem(sys.modules, "another_package_of_mine", ModuleType("mine"))
    harmless = list(config_transforms.get_all())
    wrong = {**good, block: {"name": "b"}}
    refused = pytest.raises(ConfigError, match=f"{block}.name: 'b'")
    with save_registry(), refused if is_refused else contextlib.nullcontext():
        config_transforms.register("own", func=own_transform(tmp_path, body))
        assert checking_names(harmless)(wrong) == wrong


def test_a_transform_that_does_not_tell_where_it_is_written(good: dict[str, Any]):
    from llmfoundry.registry import config_transforms
    from llmfoundry.utils.registry_utils import save_registry

    from composer_fsdp2.foundry.registry_names import checking_names

    harmless = list(config_transforms.get_all())
    wrong = {**good, "model": {"name": "b"}}
    with save_registry():
        config_transforms.register("own", func=functools.partial(dict))
        assert checking_names(harmless)(wrong) == wrong
