"""Several nodes with one working directory, as Slurm starts them, on one host."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from composer.core import Callback, State
from composer.utils import dist
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch

from composer_fsdp2 import installed
from composer_fsdp2.cli import main
from tests.support.foundry import PRELOAD as FOUNDRY
from tests.support.foundry import run_of, write_assets
from tests.support.limits import Limit
from tests.support.pool import start_server

pytest.importorskip("llmfoundry", reason="needs the extra foundry")
PRELOAD = (*FOUNDRY, "composer_fsdp2.cli.main", "torch.distributed.run")

NODES, RANKS_PER_NODE = 2, 2
SAVED_EVERY, KILLED_AT, BATCHES = 2, 3, 4


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    questions = (folder / "questions.jsonl").read_text().splitlines()
    rows = [{**json.loads(row), "category": f"c{n % 2}"} for n, row in enumerate(questions)]
    (folder / "categories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# --- Files by which a node's ranks wait for its first. ---


@contextmanager
def on_two_nodes(folder: Path) -> Iterator[None]:
    """Has the four ranks of a pool be two nodes of torchrun in one folder."""
    rank, before = int(os.environ["RANK"]), Path.cwd()
    os.environ |= {
        "LOCAL_RANK": str(rank % RANKS_PER_NODE),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
        "GROUP_RANK": str(rank // RANKS_PER_NODE),
    }
    del os.environ["NODE_RANK"]
    os.chdir(folder)
    try:
        with installed():
            yield
    finally:
        os.chdir(before)


@pytest.mark.world_size(4)
def test_every_node_has_a_file_of_its_own(tmp_path: Path, assets: Path):
    from llmfoundry.utils.builders import build_tokenizer

    with on_two_nodes(tmp_path):
        names = dist.all_gather_object(dist.get_node_signal_file_name())
        assert names[0] == names[1] != names[2] == names[3]
        build_tokenizer(f"{assets}/tokenizer", {"model_max_length": 24})
        with dist.busy_wait_for_local_rank_zero(str(tmp_path)):
            pass
        dist.barrier()
        assert not list(tmp_path.iterdir())


@pytest.mark.world_size(4)
@pytest.mark.parametrize("categories", [False, True])
def test_every_node_copies_tasks_for_itself(categories: bool, tmp_path: Path, assets: Path):
    from llmfoundry.utils import builders

    task = {
        "label": "questions",
        "dataset_uri": f"{assets}/{'categories' if categories else 'questions'}.jsonl",
        "num_fewshot": [1],
        "icl_task_type": "language_modeling",
        "has_categories": categories,
    }
    with on_two_nodes(tmp_path):
        tokenizer = builders.build_tokenizer(f"{assets}/tokenizer", {"model_max_length": 24})
        for _ in range(2):  # a run, and the next one in its folder
            evaluators, _ = builders.build_icl_evaluators([task], tokenizer, 24, 2)
            sizes = [len(one.dataloader.dataloader.dataset) for one in evaluators]
            assert sizes == ([4, 4] if categories else [8])
            dist.barrier()


# --- Two agents of torchrun, whose ranks are forked from processes that have imported all. ---


class Noted(Callback):
    """Appends the loss of every batch to a file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def batch_end(self, state: State, logger: Any) -> None:
        if os.environ["RANK"] == "0":
            loss = float(state.total_loss_dict["loss/train/total"])
            with self.file.open("a") as file:
                file.write(f"{int(state.timestamp.batch)} {loss!r}\n")


class Death(Callback):
    """Ends the second node, its agent and its ranks, as a loss of power does."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: State, logger: Any) -> None:
        if (os.environ["GROUP_RANK"], int(state.timestamp.batch)) == ("1", self.batch):
            while f"\n{self.batch} " not in Path("losses").read_text():
                time.sleep(0.01)  # rank 0 of the other node has not come as far yet
            os.killpg(0, signal.SIGKILL)


def be_agent(folder: Path, arguments: Sequence[str], log: Path) -> None:
    """Is torchrun on one node: it and its ranks are a process group of their own."""
    os.setsid()
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    options = [
        *(f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}", "--start-method=fork"),
        # They meet at a file: no port is chosen that others could take.
        *("--rdzv-backend=c10d", "--rdzv-id=1", f"--rdzv-endpoint={log.parent}/meeting"),
        *("--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"),
    ]
    parsed = torchrun.get_args_parser().parse_args([*options, "none.py"])
    config, _, _ = torchrun.config_from_args(parsed)
    elastic_launch(config, be_rank)(arguments)


def be_rank(arguments: Sequence[str]) -> None:
    from llmfoundry import registry

    registry.callbacks.register("noted", func=Noted)
    registry.callbacks.register("death", func=Death)
    main.app(arguments)


@contextmanager
def node(*given: Any) -> Iterator[ForkServerProcess]:
    """An agent and its ranks; nothing of it stays behind."""
    process = start_server().Process(target=be_agent, args=given)
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


class Job:
    """Starts of one run on two nodes that share a folder."""

    def __init__(self, folder: Path, cfg: dict[str, Any]) -> None:
        self.folder = folder / "shared"
        self.folder.mkdir()
        self._run, self._logs = folder / "run.yaml", folder
        self._run.write_text(json.dumps(cfg))

    def start(self, *overrides: str) -> list[int | None]:
        """What the agents end with."""
        logs = self._logs / f"start-{len(list(self._logs.iterdir()))}"
        logs.mkdir()
        limit, files = Limit(120), [logs / f"{number}.log" for number in range(NODES)]
        arguments = ("train", str(self._run), "--no-check", *overrides)
        with ExitStack() as stack:
            nodes = [stack.enter_context(node(self.folder, arguments, file)) for file in files]
            for one in nodes:
                one.join(limit.left())
            codes = [one.exitcode for one in nodes]
        for file in files:
            print(file.read_text()[-4000:])
        return codes

    def losses(self, name: str) -> dict[int, float]:
        """Of every batch; one that was trained twice has the loss of the second time."""
        lines = (self.folder / name).read_text().splitlines()
        return {int(batch): float(loss) for batch, loss in map(str.split, lines)}


@pytest.fixture
def job(tmp_path: Path, assets: Path) -> Job:
    changes = {
        "parallelism_config": {"fsdp2": {}},
        "loggers": {},
        "callbacks": {"noted": {"file": "losses"}},
        "save_folder": "checkpoints",
        "save_interval": f"{SAVED_EVERY}ba",
        "autoresume": True,
        "max_duration": f"{BATCHES}ba",
    }
    return Job(tmp_path, {**run_of(assets, loader="finetuning"), **changes})


def test_two_nodes_train_in_one_folder(job: Job):
    """No shared memory: Streaming on both would take one another's for that of its own node."""
    assert job.start() == [0, 0]
    assert len(job.losses("losses")) == BATCHES
    assert (job.folder / "checkpoints" / f"ep0-ba{BATCHES}" / ".metadata").is_file()
    assert not list(job.folder.glob("._signal*"))


@pytest.mark.slow
@pytest.mark.fault("a node of two is killed, and the job starts again", "survived")
def test_a_node_is_killed_and_the_job_starts_again(job: Job):
    assert job.start("callbacks.noted.file=whole", "save_folder=whole_checkpoints") == [0, 0]
    assert job.start(f"callbacks.death.batch={KILLED_AT}") == [1, -signal.SIGKILL]
    assert max(job.losses("losses")) == KILLED_AT
    assert job.start() == [0, 0]
    assert job.losses("losses") == job.losses("whole")
    starts = [line.split()[0] for line in (job.folder / "losses").read_text().splitlines()]
    assert starts == ["1", "2", "3", "3", "4"]
