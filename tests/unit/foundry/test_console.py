"""The console of `composer-fsdp2 train`: one line an interval, and no bar where nobody sees it."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from composer import Callback, DataSpec, Evaluator, Logger, State, Trainer
from composer.models import ComposerClassifier
from torch import nn

from composer_fsdp2.foundry import console
from composer_fsdp2.foundry.console import NAME, LineConsole, one_line_console


def changed(terminal: bool, monkeypatch, **cfg: Any) -> tuple[Any, Any, Any]:
    """The keys of Composer, and the interval of ours."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    before = dict(cfg)
    found = one_line_console(cfg)
    assert cfg == before
    ours = (found.get("loggers") or {}).get(NAME, {}).get("interval")
    return found.get("progress_bar"), found.get("log_to_console"), ours


@pytest.mark.parametrize(
    ("terminal", "cfg", "expected"),
    [
        (True, {}, (False, False, "1ba")),
        (False, {"console_log_interval": "10ba"}, (False, False, "10ba")),
        (True, {"log_to_console": False}, (None, False, None)),
        (True, {"log_to_console": False, "progress_bar": True}, (True, False, None)),
        (False, {"log_to_console": False, "progress_bar": True}, (False, False, "10ba")),
        (True, {"log_to_console": True, "progress_bar": True}, (True, False, "1ba")),
        (False, {"progress_bar": True, "console_log_interval": 1}, (False, False, 1)),
    ],
)
def test_the_keys_of_a_run_keep_their_meaning(monkeypatch, terminal, cfg, expected):
    assert changed(terminal, monkeypatch, **cfg) == expected


def test_other_loggers_stay():
    assert list(one_line_console({"loggers": {"tensorboard": {}}})["loggers"]) == [
        "tensorboard",
        NAME,
    ]


def test_other_packages_log_warnings_alone_unless_asked():
    assert one_line_console({"log_to_console": False})["python_log_level"] == "warning"
    for level in ("debug", None):
        assert one_line_console({"python_log_level": level})["python_log_level"] == level


@pytest.mark.parametrize("interval", ["1sec", "10tok", "x"])
def test_an_interval_that_cannot_be(interval):
    with pytest.raises(ValueError, match=r"(?i)console_log_interval|time string|convert"):
        LineConsole(interval)


def rows(count: int) -> DataSpec:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.argmax(1) % 2)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    return DataSpec(loader, get_num_tokens_in_batch=lambda batch: 8)


def lines_of(capsys, duration: str, interval: str, **kwargs: Any) -> list[str]:
    model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
    trainer = Trainer(
        model=model,
        train_dataloader=rows(8),
        eval_dataloader=Evaluator(label="held_out", dataloader=rows(4)),
        max_duration=duration,
        eval_interval=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loggers=[LineConsole(interval)],
        progress_bar=False,
        log_to_console=False,
        device="cpu",
        **kwargs,
    )
    trainer.fit()
    trainer.close()
    return capsys.readouterr().err.splitlines()


NUMBER = r"[\d.,e+-]+"


def test_a_line_an_interval(capsys):
    lines = lines_of(capsys, "8ba", "2ba")
    trained = [line for line in lines if "loss" in line]
    assert [line.split("   ")[0] for line in trained] == [f"batch {n}/8" for n in (1, 2, 4, 6, 8)]
    assert re.fullmatch(
        rf"batch 4/8   loss {NUMBER}   {NUMBER} tokens/s   memory {NUMBER} GB   \d\d:\d\d left",
        trained[2],
    )
    assert trained[-1].endswith("00:00 left")
    (evaluated,) = (line for line in lines if "evaluated" in line)
    assert re.fullmatch(rf"batch 8/8   evaluated on held_out(   \w+ {NUMBER})+", evaluated), (
        evaluated
    )
    assert len(lines) == 6


def test_epochs(capsys):
    lines = [line for line in lines_of(capsys, "2ep", "1ep") if "loss" in line]
    assert [line.split("   loss")[0] for line in lines] == [
        "batch 1   epoch 1/2",
        "batch 4   epoch 1/2",
        "batch 8   epoch 2/2",
    ]


class Efficiency(Callback):
    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics({"throughput/device/mfu": 0.4123})


def test_mfu_of_a_callback_is_shown(capsys):
    lines = lines_of(capsys, "4ba", "1ba", callbacks=[Efficiency()])
    assert sum("   MFU 41.2%   " in line for line in lines) >= 3


def test_only_rank_0_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    console._show("hidden")
    assert capsys.readouterr().err == ""
