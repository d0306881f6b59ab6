"""Runs that do not ask for FSDP2 behave with `install()` as they do without: a table of calls."""

from __future__ import annotations

import contextlib
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Trainer, algorithms, callbacks
from composer.checkpoint import load as checkpoint_load
from composer.core import Evaluator
from composer.models import HuggingFaceModel
from composer.utils import checkpoint, get_file
from composer.utils.parallelism import FSDPConfig, ParallelismConfig
from torchmetrics import MeanMetric
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.fsdp1_fixtures import fsdp1_losses, path_of
from tests.support.left_alone import Case, both
from tests.support.models import TinyComposer
from tests.support.training import built, loader_of, samples_of, trainer_for

CASES: dict[str, Case] = {}


def add(called: str, case: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    assert called not in CASES, called
    CASES[called] = lambda folder: case(folder, *args, **kwargs)


# --- Settings. ---

FSDP1_BLOCKS: tuple[Any, ...] = (
    None,
    {},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strateg": "FULL_SHARD"},
    {"device_mesh": [2]},
    {"_device_mesh": 1},
    {1: 2},
    "FULL_SHARD",
    3,
    [],
    FSDPConfig(),
)
PARALLELISM: tuple[Any, ...] = (
    None,
    {},
    [],
    "fsdp",
    3,
    {"xyz": {}},
    {"fdsp": {}},
    {3: {}},
    {"tp": {"tensor_parallel_degree": 2}},
    {"tp": {"degree": 2}},
    {"tp": 1},
    ParallelismConfig(),
    ParallelismConfig(fsdp=FSDPConfig(verbose=True)),
    *({"fsdp": block} for block in FSDP1_BLOCKS),
)


def parsed(_folder: Path, config: Any) -> Any:
    found = object.__new__(Trainer)._parse_parallelism_config(config)
    if found is None:
        return None
    return [None if part is None else vars(part) for part in (found.fsdp, found.tp, found.fsdp2)]


def made(_folder: Path, **kwargs: Any) -> Any:
    trainer = trainer_for(built(TinyComposer), None, samples_of(1, 4), **(PLAIN | kwargs))
    trainer.close()


PLAIN: dict[str, Any] = {"parallelism_config": None, "max_duration": "2ba", "seed": 5}

for number, config in enumerate(PARALLELISM):
    add(f"parsed-{number}", parsed, config)
for name, given in {
    "an argument that there is not": {"modle": 1},
    "a duration that is none": {"max_duration": "10xx"},
    "auto on a CPU": {"device_train_microbatch_size": "auto"},
    "auto under FSDP1 on a CPU": {
        "device_train_microbatch_size": "auto",
        "parallelism_config": {"fsdp": {}},
    },
    "a device mesh": {"parallelism_config": {"fsdp": {"device_mesh": [2]}}},
    "no precision": {"precision": "fp7"},
    "autoresume without a name": {"autoresume": True, "save_folder": "x"},
    "autoresume without a folder": {"autoresume": True, "run_name": "a"},
    "algorithms that are none": {"algorithms": [3]},
    "a model that is none": {"save_folder": 3},
    "an unknown key": {"parallelism_config": {"xyz": {}}},
}.items():
    add(f"made-{name}", made, **given)


# --- Runs. ---


class Measured(TinyComposer):
    """It has a metric, so that evaluation has something to tell."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def get_metrics(self, is_train: bool) -> Any:
        return {"mean": self.metric}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(self.loss(outputs, batch).detach())


class NotANumber(TinyComposer):
    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any) -> torch.Tensor:
        return super().loss(outputs, batch) * float("nan")


def trainer_of(
    folder: Path, make: Callable[[], Any] = Measured, seed: int = 0, **kwargs: Any
) -> Trainer:
    model = built(make, seed)
    optimizer = kwargs.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.01)
    given = {key: value(folder) if callable(value) else value for key, value in kwargs.items()}
    settings = {"run_name": "left-alone", "save_interval": "1ba", **PLAIN, **given}
    return trainer_for(model, optimizer, samples_of(2, 8), **settings)


def fitted(folder: Path, **kwargs: Any) -> Any:
    trainer = trainer_of(folder, **kwargs)
    trainer.fit()
    found = told(trainer)
    trainer.close()
    return found


def told(trainer: Trainer) -> Any:
    """What is left of a run, but for the time it took."""
    state = trainer.state
    return (
        dict(state.model.state_dict()),
        [optimizer.state_dict() for optimizer in state.optimizers],
        str(state.timestamp.batch),
        [type(algorithm).__name__ for algorithm in state.algorithms],
        {key: metric.compute() for key, metric in (state.train_metrics or {}).items()},
    )


def evaluated(folder: Path, **kwargs: Any) -> Any:
    trainer = trainer_of(folder, eval_dataloader=loader_of(samples_of(1, 8), 4), **kwargs)
    trainer.eval()
    found = trainer.state.eval_metrics["eval"]["mean"].compute()
    trainer.close()
    return found


def predicted(folder: Path) -> Any:
    trainer = trainer_of(folder)
    return trainer.predict(loader_of(samples_of(1, 8), 4))


for name, given in {
    "two steps": {},
    "microbatches": {"device_train_microbatch_size": 2},
    "evaluation": {"eval_dataloader": lambda _: loader_of(samples_of(1, 8), 4)},
    "an evaluator": {
        "eval_dataloader": lambda _: Evaluator(
            label="e", dataloader=loader_of(samples_of(1, 8), 4), metric_names=["mean"]
        )
    },
    "NaN": {"make": NotANumber, "callbacks": lambda _: callbacks.NaNMonitor()},
    **{
        name: {"callbacks": lambda _, make=make: make()}
        for name, make in {
            "ActivationMonitor": lambda: callbacks.ActivationMonitor(interval="1ba"),
            "OptimizerMonitor": callbacks.OptimizerMonitor,
            "MemorySnapshot": callbacks.MemorySnapshot,
            "OOMObserver": callbacks.OOMObserver,
            "EarlyStopper": lambda: callbacks.EarlyStopper("mean", "train"),
            "ThresholdStopper": lambda: callbacks.ThresholdStopper(
                "mean", "train", 9.0, stop_on_batch=True
            ),
            "NaNMonitor": callbacks.NaNMonitor,
            "an early stopper of no metric": lambda: callbacks.EarlyStopper("no", "train"),
        }.items()
    },
    **{
        name: {"algorithms": lambda _, make=make: make()}
        for name, make in {
            "EMA": lambda: algorithms.EMA(half_life="1ba"),
            "SWA": lambda: algorithms.SWA(swa_start="1ba", swa_end="2ba"),
            "clipping by norm": lambda: algorithms.GradientClipping("norm", 0.01),
            "clipping by value": lambda: algorithms.GradientClipping("value", 0.01),
            "clipping by units": lambda: algorithms.GradientClipping("adaptive", 0.01),
            "LayerFreezing": lambda: algorithms.LayerFreezing(0.0, 1.0),
            "SAM": algorithms.SAM,
            "StochasticDepth": lambda: algorithms.StochasticDepth("ResNetBottleneck"),
            "ChannelsLast": algorithms.ChannelsLast,
        }.items()
    },
}.items():
    add(f"fit-{name}", fitted, **given)
add("eval", evaluated)
add("eval in microbatches", evaluated, device_train_microbatch_size=2)
add("predict", predicted)


# --- Checkpoints. ---


def saved(folder: Path, name: str = "c.pt", **kwargs: Any) -> str:
    """A checkpoint after two batches, which rank 0 wrote. Collective: yes."""
    trainer = trainer_of(folder, save_folder=None, **kwargs)
    trainer.fit()
    trainer.save_checkpoint(str(folder / name))
    trainer.close()
    return str(folder / name)


def changed(path: str, change: Callable[[Any], object]) -> str:
    if dist.get_rank() == 0:
        values = torch.load(path, weights_only=False)
        change(values)
        torch.save(values, path)
    dist.barrier()
    return path


def wrote(folder: Path, name: str = "c.pt", **kwargs: Any) -> Any:
    """What a checkpoint holds. Collective: yes."""
    trainer = trainer_of(folder)
    trainer.fit()
    given = trainer.save_checkpoint(str(folder / name), **kwargs)
    trainer.close()
    files = sorted(item.name for item in folder.rglob("*"))
    found = None
    if name.endswith(".pt"):
        values = torch.load(folder / name, weights_only=False)
        values["state"].pop("timestamp", None)
        found = values
    return given, files, found


def in_the_way(folder: Path) -> Any:
    (folder / "file").touch()
    return wrote(folder, "file/c.pt")


def kept(folder: Path, **kwargs: Any) -> Any:
    """The files of a run that saves as it goes."""
    fitted(folder, save_folder=str(folder / "saves"), **kwargs)
    dist.barrier()
    return sorted((i.name, i.is_symlink()) for i in (folder / "saves").rglob("*"))


for name, given in {
    "all": {},
    "weights only": {"weights_only": True},
    "without the model": {"ignore_keys": ["state/model/*"]},
    "without anything": {"ignore_keys": ["*"]},
    "without what is not there": {"ignore_keys": ["state/nothing"]},
    "changed by a function": {"ignore_keys": lambda values: values["state"].pop("model")},
    "a tar archive": {"name": "c.tar.gz"},
    "a new folder": {"name": "a/b/c.pt"},
}.items():
    add(f"save-{name}", wrote, **given)
add("save-under a file", in_the_way)
add("saver-all", kept)
add("saver-one", kept, save_num_checkpoints_to_keep=1)
add("saver-weights", kept, save_weights_only=True)
add("saver-other names", kept, save_filename="x{batch}.pt", save_latest_filename="newest")


def resumed(
    folder: Path,
    change: Callable[[Any], object] | None = None,
    damage: Callable[[Path], object] | None = None,
    of: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads what another run saved, and goes on for a batch."""
    path = saved(folder, **(of or {}))
    if change is not None:
        changed(path, change)
    if damage is not None and dist.get_rank() == 0:
        damage(Path(path))
    dist.barrier()
    given = {"load_path": path, "seed": 9, "max_duration": "3ba", **kwargs}
    return fitted(folder, **given)


def renamed(values: Any) -> None:
    model = values["state"]["model"]
    model["not.there"] = model.pop("net.norm.weight")


def without(*keys: str) -> Callable[[Any], object]:
    def change(values: Any) -> None:
        for key in keys:
            values["state"].pop(key)

    return change


def reshaped(values: Any) -> None:
    values["state"]["model"]["net.norm.weight"] = torch.zeros(3)


def described(text: str) -> Callable[[Any], object]:
    """The checkpoint had an algorithm that a load adds."""

    def change(values: Any) -> None:
        saved = {"repr": text, "state": {}}
        values["state"]["algorithms"] = [("BlurPool", saved), ("SomeOfMine", {"repr": "f(1)()"})]

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-900])


def archived(path: Path) -> None:
    path.rename(path.with_name("composer_states.pt"))
    with tarfile.open(path.with_name("c.tar"), "w") as archive:
        archive.add(path.with_name("composer_states.pt"), "composer_states.pt")


for name, given in {
    "all": {},
    "weights": {"load_weights_only": True},
    "other names": {"change": renamed},
    "other names, weights": {"change": renamed, "load_weights_only": True},
    "other names, weights, loosely": {
        "change": renamed,
        "load_weights_only": True,
        "load_strict_model_weights": False,
    },
    "other names, loosely": {"change": renamed, "load_strict_model_weights": False},
    "another shape": {"change": reshaped},
    "another shape, loosely": {
        "change": reshaped,
        "load_weights_only": True,
        "load_strict_model_weights": False,
    },
    "no optimizer": {"change": without("optimizers")},
    "another optimizer": {"optimizer": torch.optim.SGD},
    "no schedulers": {"change": without("schedulers")},
    "no timestamp": {"change": without("timestamp")},
    "no scaler": {"change": without("scaler")},
    "no model": {"change": without("model")},
    "no algorithms": {"change": without("algorithms")},
    "no random states": {"change": lambda values: values.pop("rng")},
    "no state": {"change": lambda values: values.clear()},
    "another model": {"make": lambda: TinyComposer(layers=1)},
    "ignored model": {"load_ignore_keys": ["state/model/*"]},
    "ignored all": {"load_ignore_keys": ["*"]},
    "ignored nothing": {"load_ignore_keys": ["state/no*"]},
    "ignored by a function": {
        "load_ignore_keys": lambda _: lambda values: values["state"].pop("optimizers")
    },
    "algorithms of old": {
        "change": lambda values: values["state"].update(algorithms={"BlurPool": {}})
    },
    "an algorithm": {"change": described("BlurPool()")},
    "an algorithm that has changed": {"change": described("BlurPool(no=1)")},
    "an algorithm without a form": {"change": described("<BlurPool at 0x1>")},
    "an algorithm, left out": {
        "change": described("exit()"),
        "load_exclude_algorithms": ["BlurPool"],
    },
    "with EMA": {"of": {"algorithms": lambda _: algorithms.EMA(half_life="1ba")}},
    "into EMA": {"algorithms": lambda _: algorithms.EMA(half_life="1ba")},
    "with a callback": {"of": {"callbacks": lambda _: callbacks.EarlyStopper("mean", "train")}},
    "weights of a run": {
        "change": without("optimizers", "schedulers", "timestamp", "scaler", "algorithms")
    },
    "a list": {"damage": lambda path: torch.save([1, 2], path)},
    # What is no pickle at all is refused by a sentence of ours, with FSDP2 or without.
    "cut off": {"damage": cut},
    "nothing there": {"damage": Path.unlink},
    "a folder": {"damage": lambda path: (path.unlink(), path.mkdir())},
    "an archive": {"damage": archived, "load_path": lambda folder: str(folder / "c.tar")},
    "no archive": {"load_path": lambda folder: str(folder / "no.tar")},
    "a name with the run's": {
        "damage": lambda path: path.rename(path.with_name("left-alone.pt")),
        "load_path": lambda folder: str(folder / "{run_name}.pt"),
    },
    "by a callback": {
        "load_path": None,
        "callbacks": lambda folder: callbacks.LoadCheckpoint(
            str(folder / "c.pt"), load_weights_only=True
        ),
    },
}.items():
    add(f"load-{name}", resumed, **given)


def again(folder: Path, harm: Callable[[Path], object] | None) -> Any:
    """A run that saves, and one with `autoresume`."""
    saves = str(folder / "saves")
    fitted(folder, save_folder=saves)
    if harm is not None and dist.get_rank() == 0:
        harm(folder / "saves")
    dist.barrier()
    found = fitted(folder, save_folder=saves, autoresume=True, max_duration="3ba")
    dist.barrier()
    return found, sorted(item.name for item in (folder / "saves").rglob("*"))


for name, harm in {
    "whole": None,
    "no link": lambda saves: (saves / "latest-rank0.pt").unlink(),
    "the newest cut off": lambda saves: cut(saves / "ep0-ba2-rank0.pt"),
    "nothing": lambda saves: [item.unlink() for item in list(saves.iterdir())],
}.items():
    add(f"autoresume-{name}", again, harm)


def functions_of_composer(folder: Path, name: str) -> Any:
    path, state = folder / "r.pkl", SimpleNamespace(fsdp_config=None)
    if name == "garbage":
        path.write_bytes(b"garbage")
    elif name != "nothing":
        path.write_bytes(pickle.dumps({"rng": [], "callbacks": 3} if name == "other" else name))
    return checkpoint_load.load_resumption_checkpoint(state, str(path))


def read(folder: Path, **kwargs: Any) -> Any:
    return checkpoint.safe_torch_load(saved(folder), **kwargs)["state"]["model"]


def fetched(folder: Path, path: str) -> Any:
    return get_file(str(folder / path), str(folder / f"got-{dist.get_rank()}"))


def of_state(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.fit()
    found = trainer.state.state_dict()
    found.pop("timestamp")
    other = trainer_of(folder, seed=8)
    other.state.load_model_state(found, other.logger, strict=True)
    return list(found), dict(other.state.model.state_dict())


for name in ("nothing", "garbage", "text", "other"):
    add(f"resumption-{name}", functions_of_composer, name)
add("safe_torch_load", read)
add("get_file", fetched, "no.pt")
add("state", of_state)

# --- Models of others. ---


def language_model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=17, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    torch.manual_seed(1)
    return GPT2LMHeadModel(config)


def generated(_folder: Path, **kwargs: Any) -> Any:
    ids = torch.ones(1, 3, dtype=torch.long)
    mask = torch.ones_like(ids)
    return language_model().generate(ids, attention_mask=mask, pad_token_id=0, **kwargs)


def exported(folder: Path, *args: Any, **kwargs: Any) -> Any:
    folder = folder / str(dist.get_rank())
    with contextlib.suppress(FileExistsError):
        language_model().save_pretrained(folder, *args, **kwargs)
    return sorted(item.name for item in folder.iterdir()), (folder / "config.json").read_text()


def wrapped(_folder: Path) -> Any:
    return HuggingFaceModel(language_model()).generate(torch.ones(1, 3, dtype=torch.long))


add("generate", generated, max_new_tokens=2)
add("generate, wrong", generated, max_new_token=2)
add("save_pretrained", exported)
add("save_pretrained, in parts", exported, max_shard_size="1KB")
add("save_pretrained, not main", exported, is_main_process=False)
add("save_pretrained, wrong", exported, 1, 2, 3, 4, 5, 6, 7, 8, 9)
add("generate, wrapped", wrapped)

# --- FSDP1, on the CPU. ---


def under_fsdp1(_folder: Path, name: str, **kwargs: Any) -> Any:
    return fsdp1_losses(name, **kwargs)


for name in ("full_2r", "sharded_dtensor_2r", "sharded_legacy_optimizer_root_2r"):
    add(f"fsdp1-{name}", under_fsdp1, name)
add("fsdp1-no folder", under_fsdp1, "sharded_dtensor_2r", load_path="not/there")
add("fsdp1-a file", under_fsdp1, "sharded_dtensor_2r", load_path=str(path_of("full_2r")))
add(
    "fsdp1-ignored keys",
    under_fsdp1,
    "sharded_dtensor_2r",
    load_ignore_keys=["state/model/model.out_bias", "state/no*"],
)


def _marked(name: str) -> Any:
    # Where autoresume fails, Composer lets rank 0 raise and the others wait.
    return pytest.param(name, marks=pytest.mark.world_size(1 if "autoresume" in name else 2))


@pytest.mark.table("save-under a file", "load-cut off")
@pytest.mark.parametrize("name", list(map(_marked, CASES)))
def test_with_and_without_it(name: str, tmp_path: Path):
    alone, with_ours = both(
        CASES[name], tmp_path / str(dist.get_rank()) if _apart(name) else tmp_path
    )
    assert with_ours == alone


def _apart(name: str) -> bool:
    """Whether each rank has a folder of its own."""
    return name.startswith(("resumption", "get_file"))
