"""The table of callbacks and algorithms: complete, and refusing in full."""

from __future__ import annotations

import re
from typing import Any

import pytest
from composer import algorithms, callbacks
from composer.algorithms import GradientClipping, StochasticDepth
from composer.core import Algorithm, Callback
from torch import nn
from torch.optim import SGD

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.trainer.extensions.table import (
    ALGORITHMS,
    CALLBACKS,
    Extension,
    check_extensions,
    check_held_parameters,
    items_of,
)

REFUSING = [entry for entry in (*CALLBACKS, *ALGORITHMS) if entry.refusal is not None]


@pytest.mark.parametrize(
    ("package", "base", "listed"),
    [(callbacks, Callback, CALLBACKS), (algorithms, Algorithm, ALGORITHMS)],
)
def test_everything_composer_exports_is_listed(
    package: Any, base: type, listed: tuple[Extension, ...]
):
    exported = [name for name in package.__all__ if issubclass(getattr(package, name), base)]
    assert sorted(exported) == [entry.name for entry in listed]


@pytest.mark.parametrize("entry", REFUSING, ids=lambda entry: entry.name)
def test_a_refusal_has_three_sentences(entry: Extension):
    assert entry.refusal is not None
    assert len(re.findall(r"[a-z`'\])][.](?: |$)", entry.refusal.message)) == 2


class OwnDepth(StochasticDepth):
    pass


def test_what_a_user_derives_is_refused_too():
    algorithms = [GradientClipping("norm", 1.0), OwnDepth("ResNetBottleneck")]
    with pytest.raises(ConfigError, match=r"^StochasticDepth with `stochastic_method: block`"):
        check_extensions(items_of({"algorithms": algorithms}))


class Watch(Callback):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def test_a_callback_that_holds_a_parameter_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight = model[1].weight
    copied = Watch(module=model[1], value=weight.detach().clone(), read=lambda: model[1].weight)
    free = [copied, SGD(model.parameters(), 0.1)]
    check_held_parameters(model, free)
    for kept in (weight, [{"head": weight}]):
        match = r"^'kept' of Watch holds the parameter '1\.weight'\. .* Hold the module"
        with pytest.raises(ConfigError, match=match):
            check_held_parameters(model, [*free, Watch(kept=kept)])
