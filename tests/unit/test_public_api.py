"""What users rely on. A change here is a change of the package's contract."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

import composer_fsdp2

NAMES = [
    "ActivationPlan",
    "ActivationSpec",
    "CheckpointError",
    "ConfigError",
    "FSDP2Config",
    "FSDP2Monitor",
    "ModelWeights",
    "Muon",
    "PatchError",
    "PlanError",
    "ShardUnit",
    "TrainerFSDP2Config",
    "WrapPlan",
    "__version__",
    "apply_activation",
    "apply_plan",
    "clip_grad_norm_",
    "full_tensor",
    "install",
    "installed",
    "parse_config",
    "plan_activation",
    "plan_wrapping",
    "prepare_fully_shard",
    "sequence_attention",
    "summon_full_params",
    "tied_groups",
    "uninstall",
]


def test_the_public_names():
    assert sorted(composer_fsdp2.__all__) == NAMES
    assert dir(composer_fsdp2) == sorted(composer_fsdp2.__all__)


def test_every_public_name_is_there():
    named = [name for name in NAMES if name != "__version__"]
    assert [getattr(composer_fsdp2, name).__name__ for name in named] == named
    assert all(getattr(composer_fsdp2, name).__doc__ for name in named)


@pytest.mark.smoke
@pytest.mark.parametrize("module", ["", ".cli.main", ".foundry.transform"])
def test_importing_has_no_side_effect(module: str):
    heavy = {"composer", "llmfoundry", "transformers"}
    code = f"import sys, composer_fsdp2{module}; print(*sys.modules.keys() & {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.new_python
def test_a_run_loads_only_the_rooms_it_asks_for():
    code = """
import sys
import composer_fsdp2.trainer.start, composer_fsdp2.trainer.loop.step
rooms = ("parallel.tensor.", "parallel.sequence.", "parallel.expert.", "optim.muon.", "estimate.")
found = [name.removeprefix("composer_fsdp2.") for name in sys.modules]
print(*sorted(name for name in found if name.startswith(rooms)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    rooms = ("expert", "sequence", "tensor")
    assert done.stdout.split() == [f"parallel.{room}.transformation" for room in rooms]


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'prepare_module'"):
        _ = composer_fsdp2.prepare_module


def test_errors_are_what_callers_may_already_catch():
    for error in ("ConfigError", "PlanError", "CheckpointError"):
        assert issubclass(getattr(composer_fsdp2, error), ValueError)
    assert issubclass(composer_fsdp2.PatchError, RuntimeError)


def test_the_drop_in_has_the_signature_of_what_it_replaces():
    from composer.distributed import prepare_fsdp_module

    theirs = list(inspect.signature(prepare_fsdp_module).parameters.values())
    ours = list(inspect.signature(composer_fsdp2.prepare_fully_shard).parameters.values())
    assert [p.name for p in ours[:3]] == ["model", "optimizers", "fsdp2_config"]
    assert [p.name for p in theirs[:3]] == ["model", "optimizers", "fsdp_config"]
    assert [p.name for p in ours[3:]] == [p.name for p in theirs[3:]]
    assert [(p.default, p.kind) for p in ours] == [(p.default, p.kind) for p in theirs]


def test_summon_full_params_has_the_signature_of_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    theirs = inspect.signature(FSDP.summon_full_params).parameters.values()
    ours = inspect.signature(composer_fsdp2.summon_full_params).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


def test_clip_grad_norm_has_the_signature_of_torch():
    theirs = inspect.signature(torch.nn.utils.clip_grad_norm_).parameters.values()
    ours = inspect.signature(composer_fsdp2.clip_grad_norm_).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


# --- Examples of docstrings. ---


@pytest.fixture
def alone(monkeypatch) -> Iterator[None]:
    """One rank that is its own world, for examples that are collective."""
    for key in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(key, "0")
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)
    dist.destroy_process_group()


def run_example(name: str, text: str) -> str:
    """Returns the differences from what an example shows; empty where there are none."""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    return "".join(said)


@pytest.mark.usefixtures("alone")
def test_examples_run():
    docs = {name: inspect.getdoc(getattr(composer_fsdp2, name)) or "" for name in NAMES}
    said = {name: run_example(name, text) for name, text in docs.items() if ">>> " in text}
    assert len(said) > 15
    assert {name: text for name, text in said.items() if text} == {}


def test_a_wrong_example_is_found():
    assert "Expected:" in run_example("wrong", ">>> 1 + 1\n3\n")
