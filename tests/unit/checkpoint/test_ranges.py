"""A load reads the bytes that it needs, and every byte of them is compared with its checksum."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from composer_fsdp2.checkpoint.load import read_items
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.ranges import plan_ranges
from composer_fsdp2.checkpoint.source import FolderCheckpoint, open_checkpoint
from composer_fsdp2.errors import CheckpointError
from tests.support.saved import save_folder

ROWS, COLUMNS = 510, 300
KEY = "state.w"


class Rank(DefaultLoadPlanner):
    """Loads a box of the tensor, as torch's planner has a rank do."""

    def __init__(self, saved: FolderCheckpoint, starts: Sequence[int], sizes: Sequence[int]):
        super().__init__()
        self.target = torch.zeros(*sizes)
        chunk = ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))
        entry: Any = saved.metadata.state_dict_metadata[KEY]
        self.plan = LoadPlan(create_read_items_for_chunk_list(KEY, entry, [chunk]))
        self.bytes_read = _read_so_far()
        read_items(saved, self.plan, self)
        self.bytes_read = _read_so_far() - self.bytes_read

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.target


def _read_so_far() -> int:
    """Bytes that this process has asked the system for."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(values: torch.Tensor, tmp_path: Path) -> Path:
    return save_folder(tmp_path / "folder", {"state": {"w": values}})


def opened(folder: Path) -> FolderCheckpoint:
    saved = open_checkpoint(folder)
    assert isinstance(saved, FolderCheckpoint)
    return saved


def flip(folder: Path, value: torch.Tensor) -> None:
    """Changes a bit in some values of the piece."""
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(value.numpy().tobytes()) + 1] ^= 0x10
    file.write_bytes(data)


def rows(count: int) -> list[tuple[int, int]]:
    """The rows of each of some ranks, as FSDP2 cuts them."""
    step = -(-ROWS // count)
    return [(start, min(step, ROWS - start)) for start in range(0, ROWS, step)]


@pytest.mark.parametrize("ranks", [1, 2, 7, 100])
def test_ranks_read_their_rows(ranks: int, folder: Path, values: torch.Tensor):
    saved, total = opened(folder), 0
    for start, size in rows(ranks):
        rank = Rank(saved, (start, 0), (size, COLUMNS))
        assert torch.equal(rank.target, values[start : start + size])
        total += rank.bytes_read
    archives = 2000 * len(rows(ranks))
    assert values.nbytes < total < values.nbytes + archives
    before = _read_so_far()
    saved.compare_ranges()
    assert _read_so_far() - before < 1000, "nothing is read twice"


def test_ranks_of_one_row_read_their_columns(folder: Path, values: torch.Tensor):
    """Tensor parallelism cuts columns: of many rows all columns are read, of one row some."""
    saved = opened(folder)
    for start, size in rows(3):
        for column in (0, COLUMNS // 2):
            rank = Rank(saved, (start, column), (size, COLUMNS // 2))
            wanted = values[start : start + size, column : column + COLUMNS // 2]
            assert torch.equal(rank.target, wanted)
            assert rank.bytes_read < size * COLUMNS * 4 + 2000
    before = _read_so_far()
    saved.compare_ranges()
    assert _read_so_far() - before < 1000, "ranks of other columns read the same rows"


@pytest.mark.parametrize("row", [0, 100, ROWS - 1])
def test_a_flipped_byte_is_found(row: int, folder: Path, values: torch.Tensor):
    flip(folder, values[row])
    saved = opened(folder)
    for start, size in rows(7):
        Rank(saved, (start, 0), (size, COLUMNS))
    with pytest.raises(CheckpointError, match=r"'state.w' in .* not those that were written"):
        saved.compare_ranges()


def test_a_byte_that_differs_between_two_ranks(folder: Path, values: torch.Tensor):
    """One of them has read wrong bytes of a disk that gives right ones again."""
    (file,) = folder.glob("*.distcp")
    right, saved = file.read_bytes(), opened(folder)
    for start, size in rows(7):
        Rank(saved, (start, 0), (size, COLUMNS))
    flip(folder, values[100])
    start, size = rows(7)[1]
    Rank(saved, (start, 0), (size, COLUMNS))
    file.write_bytes(right)
    with pytest.raises(CheckpointError, match="not those that were written"):
        saved.compare_ranges()


@pytest.mark.parametrize("damaged", [True, False])
def test_where_ranks_leave_rows_out_all_is_read(damaged: bool, folder: Path, values: torch.Tensor):
    """A checksum is of the whole piece, so a damaged byte that nobody needs is found too."""
    if damaged:
        flip(folder, values[500])
    saved, before = opened(folder), _read_so_far()
    for start, size in ((0, 100), (50, 100), (200, 100)):  # overlapping, and with a gap
        Rank(saved, (start, 0), (size, COLUMNS))
    assert _read_so_far() - before < 0.65 * values.nbytes
    if damaged:
        with pytest.raises(CheckpointError, match="not those that were written"):
            saved.compare_ranges()
    else:
        saved.compare_ranges()
        assert _read_so_far() - before > values.nbytes


def _stored(folder: Path, tensor: Any) -> None:
    """Puts another archive in the place of the piece."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    (info,) = metadata.storage_data.values()
    packed = io.BytesIO()
    torch.save(tensor, packed)
    info.length = len(packed.getvalue())
    (folder / info.relative_path).write_bytes(packed.getvalue())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_transposed_values(folder: Path, values: torch.Tensor):
    """Its rows do not lie behind each other, so all of it is read."""
    _stored(folder, values.t().contiguous().t())
    saved = opened(folder)
    for start, size in rows(3):
        assert torch.equal(
            Rank(saved, (start, 0), (size, COLUMNS)).target, values[start : start + size]
        )
    saved.compare_ranges()


def test_another_shape(folder: Path, values: torch.Tensor):
    _stored(folder, values.reshape(COLUMNS, ROWS))
    with pytest.raises(CheckpointError, match="where the metadata promises"):
        Rank(opened(folder), (0, 0), (10, COLUMNS))


class Evil:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_nothing_is_executed(folder: Path, values: torch.Tensor, tmp_path: Path):
    _stored(folder, [values, Evil(tmp_path / "created")])
    with pytest.raises(CheckpointError, match="which is not data"):
        Rank(opened(folder), (0, 0), (10, COLUMNS))
    assert not (tmp_path / "created").exists()


def test_an_archive_that_is_cut_short_in_the_middle(folder: Path, values: torch.Tensor):
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    at = data.index(values[100].numpy().tobytes())
    file.write_bytes(data[:at] + data[at + 64 :] + bytes(64))
    with pytest.raises(CheckpointError, match="is damaged"):
        Rank(opened(folder), (0, 0), (10, COLUMNS))


def test_boxes_of_three_dims():
    """Experts in one tensor: rows of one of them, and all of some."""

    def spans(*views: Any) -> Any:
        return plan_ranges((4, 64, 64), 4, views, 4 * 4 * 64 * 64 + 1500)

    expert = 64 * 64 * 4
    assert spans(lambda t: t[1]) == [(expert, 2 * expert)]
    assert spans(lambda t: t[1:3]) == [(expert, 3 * expert)]
    assert spans(lambda t: t[1, 8:16]) == [(expert + 8 * 256, expert + 16 * 256)]
    assert spans(lambda t: t[1:3, 8:16]) == [(expert, 3 * expert)]
    assert spans(lambda t: t[3, 5, :32]) == [(3 * expert + 5 * 256, 3 * expert + 5 * 256 + 128)]
    assert spans(lambda t: t[0], lambda t: t[1]) == [(0, 2 * expert)]
    assert spans(lambda t: t[2], lambda t: t[0]) == [(0, expert), (2 * expert, 3 * expert)]
    assert spans(lambda t: t[:0]) == []
    assert spans(lambda t: t[:]) is None
    # A rank of many has some rows of each expert.
    parts = [(start + 16 * 256, start + 32 * 256) for start in range(0, 4 * expert, expert)]
    assert spans(lambda t: t[:, 16:32]) == parts
    assert spans(lambda t: t[:, 16:32, 8:12]) == parts
    assert spans(lambda t: t[1:3, 16:32]) == parts[1:3]
    assert spans(lambda t: t[:, :, :32]) is None
