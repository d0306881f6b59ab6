"""The table of replaced attributes: all of it or nothing, and back to exactly what was there."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from composer.core import Event
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from composer_fsdp2 import patches
from composer_fsdp2.errors import PatchError
from composer_fsdp2.fingerprint import fingerprint_text
from composer_fsdp2.foundry import transform
from composer_fsdp2.patches import (
    PatchPoint,
    describe_patches,
    engine,
    install,
    installed,
    patch_states,
    uninstall,
)
from composer_fsdp2.trainer.start import ARGUMENTS
from tests.support.limits import scaled

pytest.importorskip("llmfoundry", reason="needs the extra foundry")

from llmfoundry.models.mpt import MPTConfig
from llmfoundry.models.utils import meta_init_context

PATCHES = tuple(row for row in patches.PATCHES if row.needed())


def current(target: str) -> object:
    return engine._original(*engine._locate(target))


def state() -> list[object]:
    return [current(point.target) for point in PATCHES]


def all_replaced(originals: list[object]) -> bool:
    """Whether every target is a wrapper of what was there, and of nothing in between."""
    return all(
        now is not then and innermost(now) == innermost(then)
        for now, then in zip(state(), originals, strict=True)
    )


def innermost(replaced: object) -> object:
    replaced = getattr(replaced, "__func__", replaced)
    if callable(replaced):
        return inspect.unwrap(replaced)
    if isinstance(replaced, tuple):  # base classes, to which one is added
        return replaced[:1]
    return vars(replaced).get("wrapped", replaced)


def functions() -> list[PatchPoint]:
    return [point for point in PATCHES if is_function(current(point.target))]


def is_function(found: object) -> bool:
    return callable(getattr(found, "__func__", found))


@pytest.fixture(autouse=True)
def originals():
    """Every test starts from, and has to end with, what Composer has."""
    uninstall()
    before = state()
    yield before
    assert all(now is then for now, then in zip(state(), before, strict=True))


def test_in_and_out(originals):
    install()
    assert all_replaced(originals)
    uninstall()
    assert all(now is then for now, then in zip(state(), originals, strict=True))


def test_again_does_nothing(originals):
    install()
    install()
    assert all_replaced(originals)
    uninstall()
    uninstall()


def test_a_block_leaves_things_as_they_were(originals):
    with installed():
        assert all_replaced(originals)
        with installed():
            assert all_replaced(originals)
        assert all_replaced(originals)
    assert state() == originals
    install()
    with installed():
        pass
    assert all_replaced(originals)
    uninstall()


def test_a_block_that_fails_leaves_things_as_they_were(originals):
    with pytest.raises(KeyError), installed():
        raise KeyError
    assert state() == originals


def test_the_replacement_is_what_the_trainer_calls():
    from composer.trainer import Trainer

    with installed():
        trainer = object.__new__(Trainer)
        parsed = trainer._parse_parallelism_config({"fsdp2": {"reshard_after_forward": False}})
        assert parsed.fsdp2.reshard_after_forward is False
        with pytest.raises(ValueError, match="not a key of parallelism_config"):
            trainer._parse_parallelism_config({"fdsp2": {}})


# --- all or nothing ---


def broken(**changes) -> PatchPoint:
    return dataclasses.replace(PATCHES[1], **changes)


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (broken(fingerprints=frozenset({"0" * 16})), "is not one the replacement was written for"),
        (broken(target=PATCHES[1].target + "_of_old"), "does not exist in mosaicml 0."),
        (
            broken(takes=frozenset({"shape"}), fingerprints=frozenset()),
            "takes no shape, which the replacement was written",
        ),
        (broken(target="composer.trainer.trainer:Trainer._gone"), "does not exist"),
        (broken(target="composer.trainer.gone:function"), "does not exist"),
    ],
)
def test_one_core_row_that_does_not_fit_and_nothing_is_replaced(
    monkeypatch, originals, point, said
):
    other = dataclasses.replace(PATCHES[2], fingerprints=frozenset({"1" * 16}))
    monkeypatch.setattr(patches, "PATCHES", (PATCHES[0], point, other))
    with pytest.raises(PatchError) as caught:
        install()
    message = str(caught.value)
    assert f"'{point.target}'" in message
    assert f"'{other.target}'" in message
    assert said in message
    assert re.search(r"Installed are torch 2[^;]*, mosaicml 0[^;]*; install mosaicml 0", message)
    assert state() == originals
    assert "cannot be installed: " in describe_patches(patch_states())
    with pytest.raises(PatchError), installed():
        pass
    monkeypatch.undo()
    install()
    assert all_replaced(originals)
    uninstall()


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("torch", "2.6.0+cu124", r"torch 2.6.0\+cu124 is installed, and .* needs torch 2.7 or"),
        ("mosaicml", "0.31.0", "mosaicml 0.31.0 is installed, and .* needs mosaicml 0.32 or"),
    ],
)
def test_what_is_too_old_is_refused_before_anything(
    monkeypatch, originals, package: str, version: str, said: str
):
    there = importlib.metadata.version
    found = {package: version}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.get(name) or there(name))
    for enter in (install, lambda: installed().__enter__()):
        with pytest.raises(PatchError, match=said) as caught:
            enter()
        assert "\n" not in str(caught.value)
    assert state() == originals


# --- features ---

FEATURES = [row for row in PATCHES if row.feature is not engine.CORE]


def unknown(*_args: object, **_kwargs: object) -> str:
    return "passed on"


def ask_trainer(settings: dict[str, object] | None = None, **arguments: object) -> None:
    """Asks as `Trainer.__init__` does, which has to exist only as far as that."""
    from composer.trainer import Trainer

    trainer = object.__new__(Trainer)
    vars(trainer)[ARGUMENTS] = arguments
    trainer._parse_parallelism_config({"fsdp2": settings or {}})


def made(path: str, **attributes: object) -> object:
    """An object of a class that is not asked to do anything."""
    module, _, name = path.partition(":")
    item = object.__new__(getattr(importlib.import_module(module), name))
    for key, value in attributes.items():
        object.__setattr__(item, key, value)
    return item


def added(kind: str, path: str, **attributes: object) -> Callable[[PatchPoint], object]:
    return lambda _: ask_trainer(**{kind: made(path, **attributes)})


def called(*args: object) -> Callable[[PatchPoint], object]:
    def ask(row: PatchPoint) -> object:
        owner, name = engine._locate(row.target)
        return getattr(owner, name)(*args)

    return ask


def build_tasks_on_several_nodes(_row: PatchPoint) -> None:
    from llmfoundry.utils import builders

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        builders.build_icl_evaluators([], None, 8, 2)


class Shards(torch.nn.Linear, FSDPModule):
    """Looks like a module that FSDP2 has sharded."""

    def __new__(cls, *_args: object, **_kwargs: object):
        return object.__new__(cls)


def sharded_trainer() -> SimpleNamespace:
    model = torch.nn.Linear(1, 1)
    vars(model)["_fsdp2_run"] = SimpleNamespace()
    return SimpleNamespace(state=SimpleNamespace(model=model))


def callback(module: str, name: str) -> tuple[str, Callable[[PatchPoint], object]]:
    return name, added("callbacks", f"composer.callbacks.{module}:{name}", event=Event.BEFORE_LOAD)


_LIONS = "llmfoundry.optim.adaptive_lion:DecoupledAdaLRLion"
_FOUNDRY = "llmfoundry.callbacks"
ASKING: dict[str, Callable[[PatchPoint], object]] = {
    "device_train_microbatch_size: auto": lambda _: ask_trainer(
        device_train_microbatch_size="auto"
    ),
    "Evaluation of a model sharded with FSDP2": called(sharded_trainer()),
    "Trainer.predict with a model sharded with FSDP2": called(sharded_trainer()),
    "Loading with the functions of composer.checkpoint": called("path", "cpu"),
    "tensor_parallel": lambda _: ask_trainer({"tensor_parallel": {"degree": 1}}),
    "async_save": lambda _: ask_trainer({"async_save": True}),
    **dict(
        callback(*names)
        for names in (
            ("load_checkpoint", "LoadCheckpoint"),
            ("optimizer_monitor", "OptimizerMonitor"),
            ("nan_monitor", "NaNMonitor"),
            ("early_stopper", "EarlyStopper"),
            ("threshold_stopper", "ThresholdStopper"),
            ("activation_monitor", "ActivationMonitor"),
            ("memory_snapshot", "MemorySnapshot"),
            ("oom_observer", "OOMObserver"),
        )
    ),
    "GradientClipping with clipping_type adaptive": added(
        "algorithms", "composer.algorithms:GradientClipping", clipping_type="adaptive"
    ),
    "LayerFreezing": added("algorithms", "composer.algorithms:LayerFreezing"),
    "EMA": added("algorithms", "composer.algorithms:EMA"),
    "SWA": added("algorithms", "composer.algorithms:SWA"),
    "SAM": added("algorithms", "composer.algorithms:SAM"),
    "LLM Foundry's training on one rank with FSDP2": lambda _: transform.transform(
        {"parallelism_config": {"fsdp2": {}}}
    ),
    "Tensor parallelism in LLM Foundry's training": lambda _: transform.transform(
        {"parallelism_config": {"fsdp2": {"tensor_parallel": 2}}}
    ),
    "icl_tasks on several nodes": build_tasks_on_several_nodes,
    "LLM Foundry's evaluation with parallelism_config": called({"parallelism_config": {}}),
    "The optimizers DecoupledAdaLRLion and DecoupledClipLion": added("optimizers", _LIONS),
    "The optimizer DecoupledLionW of LLM Foundry": added(
        "optimizers", "llmfoundry.optim.lion:DecoupledLionW"
    ),
    "LLM Foundry's LayerFreezing": added(
        "callbacks", f"{_FOUNDRY}.resumption_callbacks:LayerFreezing"
    ),
    "LLM Foundry's MonolithicCheckpointSaver": added(
        "callbacks", f"{_FOUNDRY}.monolithic_ckpt_callback:MonolithicCheckpointSaver"
    ),
    "save_pretrained of a sharded model": called(Shards(1, 1)),
    "save_pretrained of a sharded PEFT model": called(Shards(1, 1)),
    "generate of a sharded model": called(Shards(1, 1)),
    "resize_token_embeddings of a sharded model": called(Shards(1, 1), 40),
    "FullyShardedDataParallel.summon_full_params of a sharded model": called(Shards(1, 1)),
    "use_auth_token or load_in_8bit with transformers 5": lambda _: PreTrainedModel.from_pretrained(
        "folder", load_in_8bit=False
    ),
    "LLM Foundry's init_empty_weights with transformers 5": lambda _: (
        meta_init_context.init_on_device(torch.device("meta"))
    ),
    "LLM Foundry's MPT with transformers 5": lambda _: MPTConfig(),
}


def test_every_feature_is_asked_for_in_a_test():
    features = {row.feature.name for row in patches.PATCHES if row.feature is not engine.CORE}
    assert features == set(ASKING)


def plant(monkeypatch: pytest.MonkeyPatch, row: PatchPoint) -> None:
    """Puts a source there that nobody has read."""
    if row.source:
        module, _, name = row.source.partition(":")
        found = importlib.import_module(module)
        changed = inspect.getsource(getattr(found, name) if name else found)
        fake = dataclasses.replace(row, fingerprints=frozenset({fingerprint_text("1")}))
        rows = tuple(fake if one is row else one for one in PATCHES)
        monkeypatch.setattr(patches, "PATCHES", rows)
        assert fingerprint_text(changed) in row.fingerprints
        return
    owner, name = engine._locate(row.target)
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, (classmethod, staticmethod)) else lambda item: item
    monkeypatch.setattr(owner, name, kind(unknown))


@pytest.mark.table(
    "composer.trainer.trainer:Trainer._accumulate_time_across_ranks",
    "composer.trainer.trainer:Trainer._train_batch",
    "composer.checkpoint.load:_torch_load_with_validation",
    "composer.algorithms.gradient_clipping.gradient_clipping:_apply_agc",
)
@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.target)
def test_an_unknown_source_switches_its_feature_off(monkeypatch, row: PatchPoint):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plant(monkeypatch, row)
    before = {one.target: current(one.target) for one in PATCHES}
    with installed():
        off = {one.feature for one in patch_states() if one.state == "switched off"}
        assert off == {row.feature.name}
        rest = {one.state for one in patch_states() if one.feature not in off}
        assert rest == {"installed"}
        assert f"switched off with {row.feature.name}: " in describe_patches(patch_states())
        ours = [one for one in PATCHES if one.feature is row.feature and one.asks is None]
        assert all(current(one.target) is before[one.target] for one in ours)
        with pytest.raises(PatchError) as caught:
            ASKING[row.feature.name](row)
        message = str(caught.value)
        assert message.startswith(f"{row.feature.name} is asked for and is switched off. ")
        assert row.versions in message
        assert row.feature.instead in message
    assert not engine._off
    assert all(current(target) is then for target, then in before.items())


def test_before_installing_the_table_says_what_would_be_off(monkeypatch):
    row = next(row for row in FEATURES if row.feature.name == "EMA")
    plant(monkeypatch, row)
    found = {one.feature for one in patch_states() if one.state == "switched off"}
    assert found == {"EMA"}
    assert {one.state for one in patch_states() if one.feature == "EMA"} == {"switched off"}


def plain_trainer() -> SimpleNamespace:
    return SimpleNamespace(state=SimpleNamespace(model=torch.nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("composer.trainer.trainer:Trainer._eval_loop", plain_trainer()),
        ("composer.trainer.trainer:Trainer.predict", plain_trainer()),
        ("llmfoundry.command_utils.eval:make_dataclass_and_log_config", {}),
        ("transformers.modeling_utils:PreTrainedModel.save_pretrained", torch.nn.Linear(1, 1)),
        ("peft.peft_model:PeftModel.save_pretrained", torch.nn.Linear(1, 1)),
        ("transformers.generation.utils:GenerationMixin.generate", torch.nn.Linear(1, 1)),
        (
            "torch.distributed.fsdp:FullyShardedDataParallel.summon_full_params",
            torch.nn.Linear(1, 1),
        ),
    ],
)
def test_calls_that_do_not_ask_for_what_is_off_are_passed_on(monkeypatch, target, given):
    plant(monkeypatch, next(row for row in FEATURES if row.target == target))
    with installed():
        owner, name = engine._locate(target)
        assert getattr(owner, name)(given) == "passed on"


def test_a_run_that_does_not_ask_goes_on(monkeypatch):
    for name in ("EMA", "SWA", "async_save"):
        plant(monkeypatch, next(row for row in FEATURES if row.feature.name == name))
    with installed():
        ask_trainer(callbacks=[made("composer.callbacks:NaNMonitor")])
        ask_trainer({"async_save": False}, device_train_microbatch_size=2)
        with pytest.raises(PatchError, match=r"^EMA "):
            ask_trainer(algorithms=[made("composer.algorithms:EMA")])


def test_rows_of_llm_foundry_wait_for_it(monkeypatch, originals):
    """A run without it is not to import it."""
    monkeypatch.delitem(sys.modules, "llmfoundry")
    install()
    others = [point.package != "llmfoundry" for point in PATCHES]
    assert [now is not then for now, then in zip(state(), originals, strict=True)] == others
    monkeypatch.undo()
    install()
    assert all_replaced(originals)
    uninstall()


@pytest.mark.slow
@pytest.mark.new_python
def test_composer_may_be_imported_later():
    code = """
import sys
import composer_fsdp2
composer_fsdp2.install()
from composer import Trainer
assert hasattr(Trainer._parse_parallelism_config, "__wrapped__")
assert "llmfoundry" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(120))


# --- the table ---


def test_every_row_says_what_and_why():
    for point in PATCHES:
        assert ":" in point.target
        assert bool(point.fingerprints) != bool(point.takes)
        assert re.match(r"(mosaicml|llm-foundry|peft|torch|transformers) \d", point.versions)
        assert point.feature is engine.CORE or point.feature.instead.endswith(".")
        assert len(point.why.split()) > 5
    assert len({point.target for point in PATCHES}) == len(PATCHES)


def test_replacements_take_the_same_arguments():
    for point in functions():
        found = current(point.target)
        theirs = inspect.signature(getattr(found, "__func__", found)).parameters.values()
        ours = inspect.signature(engine._resolve(point.replacement))
        passed = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = {p.name: p.default for p in theirs if p.kind is p.KEYWORD_ONLY}
        ours.bind("original", *passed, **named)
        required = [p.name for p in theirs if p.default is p.empty and p.name in passed]
        ours.bind("original", *required)


def test_a_replaced_function_still_looks_like_the_original(originals):
    with installed():
        for now, then in zip(state(), originals, strict=True):
            if is_function(then):
                assert is_function(now)
                now, then = (getattr(item, "__func__", item) for item in (now, then))
                assert inspect.signature(now) == inspect.signature(then)
            assert now.__doc__ == then.__doc__


def test_the_table_as_text():
    text = describe_patches(patch_states())
    for point in PATCHES:
        assert f"{point.target}\n  fits, not installed\n  because it {point.why}" in text
    with installed():
        assert describe_patches(patch_states()).count("\n  installed\n") == len(PATCHES)


# --- upstream ---

_LINK = re.compile(r"https://github.com/[\w-]+/([\w-]+)/blob/v([\d.]+)/(?:src/)?(.*)#L(\d+)")
_DISTRIBUTIONS = {"composer": "mosaicml", "pytorch": "torch"}


@pytest.mark.table(
    "composer.trainer.trainer:Trainer._train_loop",
    "composer.trainer.trainer:Trainer._train_microbatches",
    "composer.checkpoint.load:load_resumption_checkpoint",
    "composer.callbacks.checkpoint_saver:CheckpointSaver.init",
    "composer.callbacks.checkpoint_saver:CheckpointSaver.post_close",
    "composer.callbacks.nan_monitor:NaNMonitor.after_loss",
    "composer.callbacks.memory_snapshot:MemorySnapshot.init",
    "composer.algorithms.layer_freezing.layer_freezing:freeze_layers",
    "composer.algorithms.swa.swa:AveragedModel",
    "llmfoundry.optim.adaptive_lion:dist",
    ("llmfoundry.callbacks.monolithic_ckpt_callback:MonolithicCheckpointSaver._save_checkpoint"),
)
@pytest.mark.parametrize("row", PATCHES, ids=lambda row: row.target)
def test_the_link_is_to_the_lines_that_were_read(row: PatchPoint):
    found = _LINK.fullmatch(row.upstream)
    assert found is not None
    repository, version, path, line = found.groups()
    installed_version = importlib.metadata.version(_DISTRIBUTIONS.get(repository, repository))
    if installed_version.partition("+")[0] != version:
        return  # lines of another version
    item = pkgutil.resolve_name(row.source) if row.source else current(row.target)
    item = inspect.unwrap(getattr(item, "__func__", item))
    assert str(inspect.getsourcefile(item)).endswith(f"site-packages/{path}")
    assert int(line) == max(1, inspect.getsourcelines(item)[1])
