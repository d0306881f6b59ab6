"""`migrate --code` on methods of objects whose type is not known, and beside notebooks."""

from __future__ import annotations

import pytest

from composer_fsdp2.tools.migrate.python_code.files import migrate_code
from composer_fsdp2.tools.migrate.python_code.uses import Source, find_uses


def test_a_notebook_that_speaks_of_fsdp_is_named_and_others_are_not(tmp_path):
    (tmp_path / "plot.ipynb").write_text('{"cells": []}')
    (tmp_path / "train.ipynb").write_text('{"cells": [{"source": "from torch import FSDP"}]}')
    plot, train = migrate_code(tmp_path)
    assert not plot.needs_work
    assert train.needs_work
    assert f"jupyter nbconvert --to script {train.path}" in str(train.problem)


@pytest.mark.parametrize(
    "code",
    [
        "model.clip_grad_norm_(1.0)",
        "self.model.clip_grad_norm_(max_norm=clip)",
        "def step(net, clip):\n    norm = net.clip_grad_norm_(clip)",
        "clip = state.model.module.clip_grad_norm_",
    ],
)
def test_clipping_of_an_untyped_model_is_perhaps(code):
    (use,) = find_uses(Source.read(code.encode()))
    assert (use.row.title, use.certain) == ("FSDP.clip_grad_norm_", False)


@pytest.mark.parametrize(
    "code",
    [
        "torch.nn.utils.clip_grad_norm_(p, 1.0)",
        "from torch.nn.utils import clip_grad_norm_\nclip_grad_norm_(p, 1.0)",
        "from torch import nn\nnn.utils.clip_grad_norm_(p, 1.0)",
        "import torch.nn.utils as u\nu.clip_grad_norm_(p, 1.0)",
        "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        "self.fabric.clip_grad_norm_(p, 1.0)",
    ],
)
def test_clipping_by_other_functions_is_not_reported(code):
    assert find_uses(Source.read(code.encode())) == []
