"""Loads that must not happen: each is one clear error on every rank, and nothing is changed."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.utils.checkpoint import FileSystemReaderWithValidation
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composer_fsdp2 import installed
from composer_fsdp2.checkpoint.load import load_sharded
from composer_fsdp2.checkpoint.source import (
    FolderCheckpoint,
    open_checkpoint,
    open_on_all_ranks,
)
from composer_fsdp2.errors import CheckpointError
from tests.dist.test_fsdp1_checkpoints import check_state, fit, resume
from tests.support.fsdp1_fixtures import path_of, tiny_model
from tests.support.limits import Limit
from tests.support.models import TinyComposer
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

SHARDED, FULL = "sharded_dtensor_2r", "full_2r"
COMPOSERS_WARNING = pytest.mark.filterwarnings(
    "ignore:ClosureGradScaler is not in the state_dict"  # in a run without FSDP2
)
BOTH = pytest.mark.parametrize("name", [SHARDED, FULL])


def copied(tmp_path: Path, name: str = SHARDED, change: Callable[[Path], object] = str) -> str:
    """A fixture's copy that rank 0 has changed."""
    path = tmp_path / path_of(name).name
    if dist.get_rank() == 0:
        if path_of(name).is_dir():
            shutil.copytree(path_of(name), path, copy_function=shutil.copyfile)
            path.chmod(0o755)
        else:
            shutil.copyfile(path_of(name), path)
        change(path)
    dist.barrier()
    return str(path)


def refusal(name: str = SHARDED, **kwargs: Any) -> str:
    """The error of a load, after seeing that all ranks have it and are still in step."""
    limit = Limit(20)
    with pytest.raises(CheckpointError) as caught:
        resume(name, {"fsdp2": {}}, **kwargs)
    assert limit.left()
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1
    return messages[0]


# --- what does not fit ---


def groups_of(model: Any, *, number: int) -> torch.optim.Optimizer:
    params = list(model.parameters())
    matrices = [p for p in params if p.ndim > 1]
    vectors = [p for p in params if p.ndim <= 1]
    if number == 1:
        return torch.optim.AdamW(params, lr=1e-2)
    return torch.optim.AdamW([{"params": matrices[1:]}, {"params": [*vectors, matrices[0]]}])


@pytest.mark.world_size(2)
@BOTH
def test_two_groups_do_not_become_one(name: str):
    model = tiny_model().build_model(8)
    said = refusal(name, model=model, optimizers=groups_of(model, number=1))
    assert "the checkpoint has 2 and the run 1" in said
    assert "group 0 has only in the run: " in said
    assert "load_ignore_keys: [state/optimizers/*]" in said


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded_flatparam_2r", "full_flatparam_2r"])
def test_one_group_does_not_become_two(name: str):
    model = tiny_model().build_model(8)
    optimizer = tiny_model().build_optimizer(model, 2)
    assert "the checkpoint has 1 and the run 2" in refusal(name, model=model, optimizers=optimizer)


@pytest.mark.world_size(2)
@BOTH
def test_a_parameter_does_not_change_its_group(name: str):
    model = tiny_model().build_model(8)
    said = refusal(name, model=model, optimizers=groups_of(model, number=2))
    assert "group 0 has only in the checkpoint: model.logit_scale" not in said
    assert "group 0 has only in the checkpoint: model.wte.weight" in said
    assert "group 1 has only in the run: model.wte.weight" in said


@pytest.mark.table("full_2r")
@pytest.mark.world_size(2)
@BOTH
def test_another_optimizer_is_refused_unless_it_starts_anew(name: str):
    model = tiny_model().build_model(8)
    said = refusal(name, model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
    assert "The run's optimizer is SGD" in said
    assert "has the state of AdamW" in said
    model = tiny_model().build_model(8)
    anew: dict[str, Any] = {
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "load_ignore_keys": ["state/optimizers/*"],
    }
    assert "is for 2 parameter groups, the run has 1" in refusal(name, **anew)
    model = tiny_model().build_model(8)
    anew |= {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    anew["load_ignore_keys"] = ["state/optimizers/*", "state/schedulers/*"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer, _ = resume(name, {"fsdp2": {}}, **anew)
    said = [str(w.message) for w in told]
    for what in ("SGD", "LambdaLR"):  # Composer says so
        assert f"{what} is not in the state_dict. Its state will not be restored." in said
    assert int(trainer.state.timestamp.batch) == 3
    fit(trainer)


@pytest.mark.filterwarnings("ignore:LambdaLR is not in the state_dict")
@pytest.mark.world_size(2)
@BOTH
def test_another_learning_rate_where_schedules_are_ignored(name: str):
    rates: list[list[float]] = []
    own = ["state/schedulers/*", "state/optimizers/*/param_groups/*/lr"]
    for factor, ignored in ((1, None), (10, None), (10, own[:1]), (10, own)):
        model = tiny_model().build_model(8)
        optimizer = tiny_model().build_optimizer(model, 2)
        for group in optimizer.param_groups:
            group["lr"] *= factor
        trainer, _ = resume(
            name, {"fsdp2": {}}, model=model, optimizers=optimizer, load_ignore_keys=ignored
        )
        fit(trainer)
        rates.append([group["lr"] for group in optimizer.param_groups])
    usual, kept, changed, at_once = rates
    assert at_once == changed
    assert kept == usual
    assert min(usual) > 0
    assert changed == pytest.approx([10 * rate for rate in usual])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded_dtensor_weights_only_2r", "full_weights_only_2r"])
def test_weights_alone_do_not_continue_a_run(name: str):
    said = refusal(name, load_weights_only=False)
    assert "holds weights only" in said
    assert "load_weights_only: true" in said


@pytest.mark.world_size(2)
@BOTH
def test_another_architecture(name: str):
    tiny = tiny_model()
    deeper = tiny.build_model(8, n_layers=6)
    said = refusal(name, model=deeper, optimizers=tiny.build_optimizer(deeper))
    assert "not in the checkpoint: state.model.model.blocks.2." in said
    assert " more" in said
    assert said.count("state.model.model.") == 20
    flatter = tiny.build_model(8, n_layers=1)
    said = refusal(name, model=flatter, optimizers=tiny.build_optimizer(flatter))
    assert "not in the run: state.model.model.blocks.1." in said
    wider = tiny.build_model(8, d_ff=32)
    said = refusal(name, model=wider, optimizers=tiny.build_optimizer(wider))
    assert "state.model.model.blocks.0.up.weight (checkpoint (30, 16), run (32, 16))" in said


@pytest.mark.world_size(2)
@BOTH
def test_other_names_are_allowed_when_asked_for(name: str):
    """`load_strict_model_weights: false` is for heads that come or go; what is left out is told."""
    tiny = tiny_model()
    deeper = tiny.build_model(8, n_layers=3)
    before = {k: v.clone() for k, v in deeper.model.blocks[2].state_dict().items()}
    with pytest.warns(UserWarning, match="do not both have") if dist.get_rank() == 0 else _quiet():
        resume(
            name,
            {"fsdp2": {}},
            model=deeper,
            optimizers=tiny.build_optimizer(deeper),
            load_weights_only=True,
            load_strict_model_weights=False,
        )
    found = weights(deeper)
    for key, value in before.items():
        assert torch.equal(found[f"model.blocks.2.{key}"], value)


class _quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


# --- what is missing ---


def without(*keys: str) -> Callable[[Path], None]:
    """Takes keys out of a checkpoint, as if they had never been saved."""

    def change(path: Path) -> None:
        if path.is_file():
            found = torch.load(path, weights_only=False)
            for key in keys:
                holder = found
                *outer, last = key.split("/")
                for part in outer:
                    holder = holder[part]
                del holder[last]
            torch.save(found, path)
            return
        file = path / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        for key in keys:
            dotted = key.replace("/", ".")
            del metadata.state_dict_metadata[dotted]
            del metadata.planner_data[dotted]
            for index in [i for i in metadata.storage_data if i.fqn == dotted]:
                del metadata.storage_data[index]
        file.write_bytes(pickle.dumps(metadata))

    return change


@pytest.mark.world_size(2)
def test_what_an_older_torch_did_not_save_keeps_its_default(tmp_path: Path):
    key = "state/optimizers/AdamW/param_groups/0/fused"
    path = copied(tmp_path, SHARDED, without(key))
    rank0 = dist.get_rank() == 0
    with pytest.warns(UserWarning, match=key.replace("/", ".")) if rank0 else _quiet():
        trainer, _ = resume(SHARDED, {"fsdp2": {}}, load_path=path)
    check_state(trainer, SHARDED)


@pytest.mark.table(
    "sharded_dtensor_2r-state/model/model.blocks.0.up.weight",
    "full_2r-state/model/model.blocks.0.up.weight",
)
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "key",
    [
        "state/model/model.blocks.0.up.weight",
        "state/model/model.out_bias",
        "state/optimizers/AdamW/state/model.blocks.0.up.weight/exp_avg",
    ],
)
@BOTH
def test_a_missing_tensor_is_never_passed_over(name: str, key: str, tmp_path: Path):
    """Also not when a key is missing at which Composer tries again with any key missing."""
    keys = [key] if name == FULL else [key, "state/optimizers/AdamW/param_groups/0/fused"]
    said = refusal(name, load_path=copied(tmp_path, name, without(*keys)))
    assert f"not in the checkpoint: {key.replace('/', '.')}" in said


@pytest.mark.world_size(2)
def test_without_node_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchrun sets GROUP_RANK instead, and Composer unpacks archives only with NODE_RANK."""
    path = tmp_path / "checkpoint.tar.gz"
    if dist.get_rank() == 0:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(path_of(FULL), "composer_states.pt")
    dist.barrier()
    monkeypatch.delenv("NODE_RANK")
    monkeypatch.setenv("GROUP_RANK", "0")
    trainer, _ = resume(FULL, {"fsdp2": {}}, load_path=str(path))
    check_state(trainer, FULL)


# --- what is damaged ---


def flip(path: Path) -> None:
    """Changes one bit of a weight, which torch would load without a word."""
    file, start, saved = path, 0, open_checkpoint(path)
    if isinstance(saved, FolderCheckpoint):
        info = saved.metadata.storage_data[saved.indices("state.model.model.wte.weight")[0]]
        file, start = path / info.relative_path, info.offset
    data = bytearray(file.read_bytes())
    values = saved.tensor("state.model.model.wte.weight").numpy().tobytes()[:32]
    data[data.index(values, start) + 1] ^= 0x10
    file.write_bytes(data)


def truncate(path: Path) -> None:
    target = path / "__1_0.distcp" if path.is_dir() else path
    os.truncate(target, target.stat().st_size // 2)


def foreign(path: Path) -> None:
    shutil.copyfile(path_of("sharded_shardedtensor_2r") / "__1_0.distcp", path / "__1_0.distcp")


def climb(path: Path) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index].relative_path = "../../secret"
    file.write_bytes(pickle.dumps(metadata))


DAMAGE = {
    "flipped byte in a shard": (SHARDED, flip, "not those that were written"),
    "flipped byte in a file": (FULL, flip, "not those that were written"),
    "truncated shard": (SHARDED, truncate, "'__1_0.distcp' has "),
    "truncated file": (FULL, truncate, "is damaged"),
    "missing shard": (
        SHARDED,
        lambda p: (p / "__1_0.distcp").unlink(),
        "'__1_0.distcp' is missing",
    ),
    "foreign shard": (SHARDED, foreign, "__1_0.distcp"),
    "no metadata": (SHARDED, lambda p: (p / ".metadata").unlink(), "no '.metadata'"),
    "empty metadata": (SHARDED, lambda p: (p / ".metadata").write_bytes(b""), "is damaged"),
    "empty file": (FULL, lambda p: p.write_bytes(b""), "is damaged"),
    "text": (FULL, lambda p: p.write_text("weights"), "is damaged"),
    "outside": (SHARDED, climb, "outside of its own folder"),
}


@pytest.mark.table("flipped byte in a shard", "empty metadata", "empty file", "text", "outside")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_nothing_is_changed(damage: str, tmp_path: Path):
    name, change, said = DAMAGE[damage]
    model = tiny_model().build_model(8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = tiny_model().build_optimizer(model)
    path = copied(tmp_path, name, change)
    assert said in refusal(name, model=model, optimizers=optimizer, load_path=path)
    assert largest_difference(model, before) == 0.0


@pytest.mark.world_size(4)
@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_read_parts_of_one_piece(damaged: bool, tmp_path: Path):
    """The checksum is of the whole piece: all ranks find a byte that one of them has read."""
    values = torch.randn(150, 200, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "folder"
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # of a save by one rank
            dcp.save({"w": values}, checkpoint_id=path, no_dist=True)
        if damaged:
            data = bytearray((path / "__0_0.distcp").read_bytes())
            data[data.index(values[60].numpy().tobytes()) + 1] ^= 0x10
            (path / "__0_0.distcp").write_bytes(data)
    dist.barrier()
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layouts = {
        "rows": (meshes, (Shard(0), Shard(0))),
        "replicas": (meshes, (Replicate(), Shard(0))),
        "rows and columns": (meshes, (Shard(0), Shard(1))),
        "columns": (meshes, (Replicate(), Shard(1))),
    }
    for name, (mesh, placements) in layouts.items():
        reader: Any = FileSystemReaderWithValidation(str(path))
        reader.checkpoint = open_checkpoint(path)
        target = {"w": distribute_tensor(torch.zeros_like(values), mesh, placements)}
        with installed():
            if not damaged:
                load_sharded(target, reader)
                assert torch.equal(target["w"].full_tensor(), values), name
                continue
            with pytest.raises(CheckpointError) as caught:
                load_sharded(target, reader)
        messages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, str(caught.value))
        assert len(set(messages)) == 1
        assert "'w' in" in messages[0]
        assert "not those that were written" in messages[0]


@pytest.mark.world_size(4)
def test_one_rank_reads_the_metadata_and_each_file_is_looked_at_once(tmp_path: Path):
    """A thousand ranks would look at a thousand files each, and unpickle millions of pieces."""
    path = Path(copied(tmp_path))
    looked: list[str] = []
    opened: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        stat, read = Path.stat, Path.read_bytes
        patch.setattr(Path, "stat", lambda self, **k: looked.append(self.name) or stat(self, **k))
        patch.setattr(Path, "read_bytes", lambda self: opened.append(self.name) or read(self))
        saved = open_on_all_ranks(path, lambda error: error)
    files = {name for name in os.listdir(path) if name.endswith(".distcp")}
    assert files <= set(saved.files)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (".metadata" in opened, [f for f in looked if f in files]))
    assert [reads for reads, _ in everyone] == [True, False, False, False]
    assert sorted(name for _, names in everyone for name in names) == sorted(files)
    alone = open_checkpoint(path)
    assert isinstance(alone, FolderCheckpoint)
    assert dict(saved.metadata.storage_data) == dict(alone.metadata.storage_data)
    assert saved.tensors == alone.tensors
    assert saved.paths == alone.paths
    for key in saved.tensors:
        assert torch.equal(saved.tensor(key), alone.tensor(key))


@pytest.mark.world_size(2)
def test_nothing_there(tmp_path: Path):
    assert "There is no checkpoint at" in refusal(load_path=str(tmp_path / "gone"))
    assert "it holds nothing" in refusal(load_path=str(tmp_path))
    circle = tmp_path / "circle"
    if dist.get_rank() == 0:
        circle.symlink_to(circle)
    dist.barrier()
    assert "There is no checkpoint at" in refusal(load_path=str(circle))


# --- what would execute code ---


class Evil:
    """Unpickled carelessly, it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.trace)!r}, 'w').close()",)


def evil_metadata(trace: Path) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.storage_meta = Evil(trace)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def evil_entry(trace: Path) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        info = metadata.storage_data[MetadataIndex("state.run_name")]
        packed = io.BytesIO()
        torch.save(Evil(trace), packed)
        with (path / info.relative_path).open("ab") as file:
            info.offset, info.length = file.tell(), len(packed.getvalue())
            file.write(packed.getvalue())
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def evil_file(trace: Path) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        found = torch.load(path, weights_only=False)
        found["state"]["run_name"] = Evil(trace)
        torch.save(found, path)

    return change


EVIL = {
    "metadata": (SHARDED, evil_metadata),
    "entry": (SHARDED, evil_entry),
    "file": (FULL, evil_file),
}


@pytest.mark.table("metadata-fsdp2", "entry-plain")
@COMPOSERS_WARNING
@pytest.mark.world_size(2)
@pytest.mark.parametrize("parallelism", [{"fsdp2": {}}, None], ids=["fsdp2", "plain"])
@pytest.mark.parametrize("place", EVIL)
def test_nothing_in_a_checkpoint_is_executed(
    place: str, parallelism: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name, make = EVIL[place]
    trace = tmp_path / "executed"
    path = copied(tmp_path, name, make(trace))
    with pytest.raises(CheckpointError, match="exec") as caught:
        resume(name, parallelism, load_path=path)
    assert "COMPOSER_FSDP2_TRUST" in str(caught.value)
    assert not trace.exists()
    dist.barrier()
    monkeypatch.setenv("COMPOSER_FSDP2_TRUST", path)
    resume(name, parallelism, load_path=path)
    assert trace.exists(), "the test's pickle would not have executed anything anyway"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("place", EVIL)
def test_composers_own_readers_execute_nothing(place: str, tmp_path: Path):
    """These are what a run under FSDP1 loads with."""
    from composer.utils import checkpoint as composers

    name, make = EVIL[place]
    trace = tmp_path / "executed"
    path = copied(tmp_path, name, make(trace))

    def read() -> None:
        if place == "file":
            composers.safe_torch_load(path)
        else:
            reader = composers.FileSystemReaderWithValidation(path)
            composers.dist_cp_load({"state": {"run_name": ""}}, reader)

    # torch wraps what a rank raises while it loads a folder.
    with installed(), pytest.raises((CheckpointError, CheckpointException), match="exec"):
        read()
    assert not trace.exists()


@pytest.mark.world_size(1)
@COMPOSERS_WARNING
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # by Composer
def test_resumption_files_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Composer's second way of saving the rest of a run, a plain pickle."""
    from composer.checkpoint import load as composers
    from composer.checkpoint.save import save_resumption_state_to_disk

    trainer, _ = resume(FULL, None)
    trainer.state.callbacks = []  # Composer's function wants a state of every one
    path, trace = tmp_path / "resumption.pkl", tmp_path / "executed"
    save_resumption_state_to_disk(trainer.state, str(path))
    with installed():
        rng = composers.load_resumption_checkpoint(trainer.state, str(path))
        assert torch.equal(rng[0]["torch"], torch.get_rng_state())
        path.write_bytes(pickle.dumps({"rng": Evil(trace)}))
        with pytest.raises(CheckpointError, match="exec"):
            composers.load_resumption_checkpoint(trainer.state, str(path))
        assert not trace.exists()
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises((pickle.UnpicklingError, EOFError)):  # as without the package
            composers.load_resumption_checkpoint(trainer.state, str(path))
        monkeypatch.setenv("COMPOSER_FSDP2_TRUST", str(tmp_path))
        path.write_bytes(pickle.dumps({"rng": Evil(trace), "rank_zero_seed": 0}))
        composers.load_resumption_checkpoint(trainer.state, str(path))
    assert trace.exists()


@pytest.mark.world_size(2)
def test_text_that_composer_would_evaluate(tmp_path: Path):
    trace = tmp_path / "executed"
    text = f"BlurPool(open({str(trace)!r}, 'w').close())"

    def change(path: Path) -> None:
        found = torch.load(path, weights_only=False)
        found["state"]["algorithms"] = [("BlurPool", {"repr": text})]
        torch.save(found, path)

    assert "could execute code" in refusal(FULL, load_path=copied(tmp_path, FULL, change))
    assert not trace.exists()


@pytest.mark.world_size(2)
def test_an_archive_that_climbs_out(tmp_path: Path):
    path = tmp_path / "inner" / "checkpoint.tar"
    if dist.get_rank() == 0:
        path.parent.mkdir()
        with tarfile.open(path, "w") as archive:
            archive.add(path_of(FULL), "../../climbed")
    dist.barrier()
    assert "does not belong into a checkpoint" in refusal(FULL, load_path=str(path))


# --- the user's planners ---


class Counting(DefaultLoadPlanner):
    """Counts what it was asked for."""

    asked = 0

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        type(self).asked += 1
        return super().resolve_tensor(read_item)


@pytest.mark.world_size(2)
def test_a_planner_of_the_user_is_used():
    Counting.asked = 0
    with installed():
        trainer, _ = resume(SHARDED, {"fsdp2": {"load_planner": Counting()}})
    check_state(trainer, SHARDED)
    assert Counting.asked > 50


@pytest.mark.world_size(2)
def test_load_ignore_keys_leave_what_the_run_has(tmp_path: Path):
    del tmp_path
    for name in (SHARDED, FULL):
        model = tiny_model().build_model(8)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        resume(
            name,
            {"fsdp2": {}},
            model=model,
            optimizers=tiny_model().build_optimizer(model),
            load_ignore_keys=["state/model/model.wpe*", "state/rank_zero_seed"],
        )
        found = weights(model)
        assert torch.equal(found["model.wpe.weight"], before["model.wpe.weight"])
        assert not torch.equal(found["model.wte.weight"], before["model.wte.weight"])


@pytest.mark.world_size(2)
def test_losing_precision_is_told(tmp_path: Path):
    """A checkpoint in float32 does not fit exactly into parameters in bfloat16."""
    with installed():
        model = built(TinyComposer)
        trainer = trainer_for(
            model, torch.optim.SGD(model.parameters(), lr=0.1), samples_of(1, 8),
            save_folder=str(tmp_path), save_interval="1ba",
        )  # fmt: skip
        trainer.fit()
        trainer.close()
        smaller = built(TinyComposer, 1).to(torch.bfloat16)
        rank0 = dist.get_rank() == 0
        with pytest.warns(UserWarning, match="lose precision") if rank0 else _quiet():
            trainer_for(
                smaller, torch.optim.SGD(smaller.parameters(), lr=0.1), samples_of(1, 8),
                load_path=str(tmp_path / "ep0-ba1"), load_weights_only=True,
            )  # fmt: skip
