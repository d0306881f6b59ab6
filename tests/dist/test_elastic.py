"""torchrun's agent starts ranks again: after a death, with fewer or more of them, without a node.

The agents here are those of torchrun with torchrun's arguments, but their ranks are forked from
processes that have imported everything.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback
from composer.core import State
from torch import distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch
from torch.utils.data import DataLoader

from composer_fsdp2 import installed
from composer_fsdp2.trainer.start import warn_of_shared_store
from tests.support.faults_table import record
from tests.support.limits import scaled
from tests.support.models import TinyComposer
from tests.support.pool import start_server
from tests.support.shards import free_numbers
from tests.support.training import built, largest_difference, samples_of, trainer_for, weights

STEPS, EVERY, GLOBAL_BATCH = 8, 2, 8
KILLED_AT = 5
COLLECTIVE_SECONDS = scaled(15.0)
"""Long enough for a busy machine; a test waits for it once, without computing."""

PRELOAD = ["torch.distributed.run", "torch.distributed.launcher.api", "tests.support.training"]


def train(folder: Path, happens: Callable[[State], object] = id, **kwargs: Any) -> int:
    """One run on any number of ranks, resumed if there is something to resume from.

    Returns:
        The batch it resumed at.
    """
    model = built(TinyComposer)
    world_size = int(os.environ["WORLD_SIZE"])
    with installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Autoresume")
        warnings.filterwarnings("ignore", message=r".* is not in the state_dict")
        warnings.filterwarnings("ignore", message="The current world size")  # of random states
        trainer = trainer_for(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            samples_of(STEPS, GLOBAL_BATCH),
            batch=GLOBAL_BATCH // world_size,
            save_folder=str(folder),
            save_interval=f"{EVERY}ba",
            autoresume=True,
            run_name="again",
            callbacks=[Fate(happens)],
            dist_timeout=COLLECTIVE_SECONDS,
            **{"max_duration": f"{STEPS}ba", **kwargs},
        )
        at = int(trainer.state.timestamp.batch)
        trainer.fit()
        trainer.close()
    found = weights(model)
    if dist.get_rank() == 0:
        torch.save(found, folder.with_suffix(".pt"))
    return at


class Fate(Callback):
    """What happens to a rank at the end of each batch."""

    def __init__(self, happens: Callable[[State], object]) -> None:
        self.happens = happens

    def batch_end(self, state: State, logger: Any) -> None:
        self.happens(state)


def difference(folder: Path, whole: Path) -> float:
    """Between the last weights of two runs."""
    return largest_difference(*(torch.load(f.with_suffix(".pt")) for f in (folder, whole)))


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, nodes: object
) -> Path:
    """Of a run on two ranks that nobody disturbs; asks for `nodes` only to have them started."""
    from tests.conftest import POOLS

    folder = tmp_path_factory.mktemp("elastic") / "whole"
    request.config.stash[POOLS].get(2).run(partial(train, folder))
    return folder


# --- A rank dies. ---


@pytest.mark.table
@pytest.mark.fault("restart by torchrun's agent after a rank was killed", "survived")
@pytest.mark.parametrize("newest", ["whole", "half written"])
def test_a_killed_rank_and_one_restart(newest: str, tmp_path: Path, whole: Path):
    folder = tmp_path / "run"
    dies = partial(die, folder=folder, newest=newest)
    arguments = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-endpoint=localhost:0"]
    with agent(arguments, folder, dies) as process:
        process.join(120)
        assert process.exitcode == 0
    # Of the first attempt, and of the second.
    assert starts(folder) == [(2, 0), (2, 4 if newest == "whole" else 2)]
    assert difference(folder, whole) == 0.0


def die(state: State, folder: Path, newest: str) -> None:
    """Rank 1 does, once."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and state.timestamp.batch == KILLED_AT and dist.get_rank() == 1:
        if newest == "half written":
            file = folder / "ep0-ba4" / "__0_0.distcp"
            os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def told(folder: Path, happens: Callable[[State], object]) -> None:
    """Trains and leaves a note of where each attempt began."""

    def noting(state: State) -> None:
        notes.append(f"{dist.get_world_size()} {int(state.timestamp.batch) - 1}\n")
        if len(notes) == 1 and dist.get_rank() == 0:
            with folder.with_suffix(".starts").open("a") as file:
                file.write(notes[0])
        happens(state)

    notes: list[str] = []
    try:
        torch.set_num_threads(1)  # not before the fork: the pool of threads would not come along
        train(folder, noting)
    except RuntimeError:
        folder.with_suffix(f".failed{dist.get_rank()}").touch()
        raise


def starts(folder: Path) -> list[tuple[int, ...]]:
    """Number of ranks and first batch of each attempt."""
    lines = folder.with_suffix(".starts").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@contextmanager
def agent(arguments: list[str], *given: Any) -> Iterator[ForkServerProcess]:
    """torchrun as a process of its own, whose ranks are `told` something; nothing stays behind."""
    process = start_server().Process(target=run_agent, args=(arguments, given))
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def run_agent(
    arguments: list[str],
    given: tuple[Any, ...],
    before: Callable[[], object] = os.setsid,
) -> None:
    before()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Or torch's agents give the ranks of each attempt the addresses of the one before.
    os.environ.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    parsed = torchrun.get_args_parser().parse_args(
        ["--rdzv-backend=c10d", "--rdzv-id=1", "--start-method=fork", *arguments, "none.py"]
    )
    config, _, _ = torchrun.config_from_args(parsed)
    elastic_launch(config, told)(*given)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({}, False),
    ],
)
def test_a_store_shared_by_all_attempts(environment: dict[str, str], told: bool, monkeypatch: Any):
    for name, value in {"RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_shared_store()
    found = [str(warning.message) for warning in caught]
    assert [("again 3 times" in t, "TORCH_DISABLE_SHARE" in t) for t in found] == [
        (True,) * 2
    ] * told


# --- Another number of ranks. ---


@pytest.mark.table
@pytest.mark.fault("restart with another number of ranks", "survived")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_another_number_of_ranks(before: int, after: int, ranks: Any, tmp_path: Path, whole: Path):
    folder = tmp_path / "run"
    ranks(before, partial(train, folder, max_duration=f"{KILLED_AT}ba"))
    shutil.rmtree(folder / "ep0-ba5")  # Composer saves at the end, which a killed run does not
    assert ranks(after, train, folder) == [4] * after
    assert difference(folder, whole) <= 1e-6


@pytest.mark.fault(
    "restart with another number of ranks, in MosaicML Streaming's order", "survived"
)
def test_another_number_of_ranks_reads_the_same_batches(ranks: Any, tmp_path: Path):
    """Of shuffled shards, across the end of an epoch of 8 batches."""
    shards, folder, undisturbed = (tmp_path / name for name in ("mds", "run", "undisturbed"))
    write_shards(shards)
    (found, *_) = ranks(4, train_streamed, folder, shards, f"{KILLED_AT}ba")
    resumed = ranks(2, train_streamed, folder, shards, "12ba")
    (expected, *_) = ranks(2, train_streamed, undisturbed, shards, "12ba")
    assert [at for at, _ in resumed] == [KILLED_AT] * 2
    assert found[1] + resumed[0][1] == expected[1]
    assert difference(folder, undisturbed) <= 1e-6
    # Each epoch has an order of its own, which depends on the number of canonical nodes.
    first, second = expected[1][:STEPS], expected[1][STEPS:]
    rows = torch.cat(samples_of(STEPS, GLOBAL_BATCH).tensors, dim=1).tolist()
    assert sorted(chain.from_iterable(first)) == sorted(rows)
    assert first[:4] != second
    (other, *_) = ranks(2, train_streamed, tmp_path / "other", shards, "1ba", 1)
    assert other[1] != first[:1]


Row = list[int]


def write_shards(folder: Path) -> None:
    """Writes the samples of an epoch as eight MDS shards."""
    streaming = pytest.importorskip("streaming", reason="needs the extra foundry")
    columns = dict.fromkeys(("ids", "targets"), "ndarray:int64")
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=900) as writer:
        for ids, targets in samples_of(STEPS, GLOBAL_BATCH):
            writer.write({"ids": ids.numpy(), "targets": targets.numpy()})
    assert len(list(folder.glob("*.mds"))) > 4


def train_streamed(
    folder: Path, shards: Path, duration: str, canonical_nodes: int = 2
) -> tuple[int, list[list[Row]]]:
    """Trains on shuffled shards.

    Returns:
        The batch it resumed at, and the rows of each global batch in the order of their values.
    """
    from streaming import StreamingDataset

    if dist.get_rank() == 0:
        free_numbers()
    dist.barrier()
    batch = GLOBAL_BATCH // dist.get_world_size()
    dataset = StreamingDataset(
        local=str(shards), shuffle=True, batch_size=batch, num_canonical_nodes=canonical_nodes
    )
    loader = DataLoader(dataset, batch, collate_fn=collate)
    rows: list[list[Row]] = []

    def note(state: State) -> None:
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, torch.cat(list(state.batch), dim=1).tolist())
        rows.append(sorted(chain.from_iterable(shares)))

    return train(folder, note, train_dataloader=loader, max_duration=duration), rows


def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """Copies arrays that cannot be written to."""
    return tuple(torch.stack([torch.tensor(s[k]) for s in samples]) for k in ("ids", "targets"))


# --- A node without a network. ---


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Connection]]:
    """Two of them, trained beside the other tests: they spend most of their time waiting."""
    folder = tmp_path_factory.mktemp("nodes") / "run"
    ours, theirs = start_server().Pipe()
    process = start_server().Process(target=two_nodes, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        yield folder, ours
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.matrix
@pytest.mark.fault
def test_a_node_is_cut_off_and_comes_back(nodes: tuple[Path, Connection], whole: Path):
    folder, report = nodes
    assert report.poll(200), "the nodes were still busy after 200 s"
    found = report.recv()
    if isinstance(found, str):
        pytest.skip(found)
    # With both nodes, with the first alone, and with both again.
    assert starts(folder) == [(2, 0), (1, 4), (2, 6)]
    assert difference(folder, whole) <= 1e-6
    record("a node is cut off", "reported", found)
    record("a node is cut off and comes back", "survived")


CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
FIRST, SECOND = "10.77.0.1", "10.77.0.2"


def two_nodes(folder: Path, report: Connection) -> None:
    """Runs on both, in networks that only they see; reports when both ranks had noticed the cut."""
    os.setsid()
    try:
        far = make_network()
    except (OSError, subprocess.CalledProcessError) as error:
        report.send(f"needs network devices of its own: {error}")
        return
    here = node(folder, FIRST, "near", None)
    there = node(folder, SECOND, "far", far)
    wait_for(folder.with_suffix(".ready"))
    ip("link set near down")
    folder.with_suffix(".cut").touch()
    cut = time.monotonic()
    for rank in range(2):
        wait_for(folder.with_suffix(f".failed{rank}"))
    reported = time.monotonic() - cut
    there.kill()  # it waits for the store of the first for as long as the system does
    wait_for(folder.with_suffix(".alone"))
    ip("link set near up")
    there = node(folder, SECOND, "far", far)
    here.join()
    there.join()
    assert here.exitcode == there.exitcode == 0
    report.send(reported)


def make_network() -> int:
    """Leaves the machine's network for one of two nodes; returns the process that is the other."""
    user, group = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    is_made, made = os.pipe()
    far = os.fork()
    if far == 0:
        unshare(CLONE_NEWNET)
        os.write(made, b"1")
        signal.pause()
    os.read(is_made, 1)
    ip(f"link add near type veth peer name far netns {far}")
    for name, address, where in (("near", FIRST, None), ("far", SECOND, far)):
        for command in (
            f"addr add {address}/24 dev {name}",
            f"link set {name} up",
            "link set lo up",
        ):
            ip(command, where)
    return far


def unshare(what: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(what):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(node: int | None) -> None:
    if node is not None:
        with open(f"/proc/{node}/ns/net") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0


def ip(command: str, node: int | None = None) -> None:
    subprocess.run(["ip", *command.split()], check=True, preexec_fn=partial(enter, node))


def node(folder: Path, address: str, device: str, where: int | None) -> ForkProcess:
    arguments = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", f"--local-addr={address}"),
        f"--rdzv-endpoint={FIRST}:29400",
        f"--rdzv-conf=is_host={int(address == FIRST)},last_call_timeout=2,read_timeout=5",
    ]

    def before() -> None:
        enter(where)
        os.environ["GLOO_SOCKET_IFNAME"] = device

    given = (folder, partial(be_cut_off, folder=folder))
    process = multiprocessing.get_context("fork").Process(
        target=run_agent, args=(arguments, given, before)
    )
    process.start()
    return process


def be_cut_off(state: State, folder: Path) -> None:
    """The first node waits for the cut, and when it is alone, for the other to come back."""
    if dist.get_rank() > 0:
        return
    if dist.get_world_size() == 2 and state.timestamp.batch == KILLED_AT:
        folder.with_suffix(".ready").touch()
        wait_for(folder.with_suffix(".cut"))
    if dist.get_world_size() == 1 and state.timestamp.batch == STEPS - 1:
        folder.with_suffix(".alone").touch()
        time.sleep(600)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
