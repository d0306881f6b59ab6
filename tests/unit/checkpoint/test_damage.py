"""Checkpoints that are damaged, incomplete or hostile, and destinations that fail."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from typer.testing import CliRunner

from composer_fsdp2.checkpoint.contents import CHECKSUMS
from composer_fsdp2.checkpoint.convert import convert_to_sharded, write_full
from composer_fsdp2.checkpoint.huggingface import write_huggingface
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.pickles import TRUST_VARIABLE
from composer_fsdp2.checkpoint.source import FolderCheckpoint, open_checkpoint
from composer_fsdp2.checkpoint.staging import staged
from composer_fsdp2.cli import checkpoint
from composer_fsdp2.cli.main import app
from composer_fsdp2.errors import CheckpointError
from tests.support.saved import no_space, save_file, save_folder, small_state

EMBED = "state.model.model.embed.weight"


def run(*args: object) -> tuple[int, str]:
    """Exit code and all text of `composer-fsdp2 checkpoint ARGS`, without line breaks."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards and our checksums, in pieces of a few rows."""
    return save_ours(tmp_path / "folder", small_state())


def save_ours(path: Path, state: dict[str, Any]) -> Path:
    file = save_file(path.with_suffix(".source"), state)
    # More than one tensor to a file, and more than one file.
    convert_to_sharded(open_checkpoint(file), path, 12_000, lambda *_: None)
    file.unlink()
    return path


def found_by(path: Path, *parts: str) -> None:
    """`verify` finds it, nothing is converted, and no command leaves a trace."""
    code, text = run("verify", path)
    assert code == 1
    for part in parts:
        assert part in text
    beside = sorted(path.parent.iterdir())
    for to in ("sharded", "full"):
        code, text = run("convert", path, path.parent / "out", "--to", to)
        assert code == 2
        assert "CheckpointError" in text
    assert sorted(path.parent.iterdir()) == beside


# --- Damage. ---


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _place(folder: Path, key: str) -> tuple[Path, int, int]:
    """File, and where in it the first bytes of a value are."""
    source = open_checkpoint(folder)
    assert isinstance(source, FolderCheckpoint)
    index = source.indices(key)[0]
    info = source.metadata.storage_data[index]
    return folder / info.relative_path, info.offset, info.length


def _flip_value(folder: Path, key: str) -> None:
    file, start, _ = _place(folder, key)
    mark = open_checkpoint(folder).tensor(key).numpy().tobytes()[:32]
    _flip(file, file.read_bytes().index(mark, start) + 5)


def test_flipped_byte_in_a_tensor(folder: Path):
    _flip_value(folder, EMBED)
    found_by(folder, f"'{EMBED}' in", "is damaged: bytes in", "Take another checkpoint")
    # What needs no tensor is still there.
    assert run("inspect", folder)[0] == 0


def test_flipped_byte_in_an_object(folder: Path):
    key = "state.run_name"
    file, start, _ = _place(folder, key)
    _flip(file, file.read_bytes().index(b"small", start))
    found_by(folder, f"'{key}' in", "is damaged")
    code, text = run("inspect", folder)
    assert code == 1
    assert f"problem '{key}' in" in text
    assert "world size 2" in text


def test_flipped_byte_in_metadata(folder: Path):
    """A name changes and everything can still be read, so only the digest can tell."""
    metadata = folder / METADATA
    data = metadata.read_bytes().replace(b"model.norm.weight", b"model.nprm.weight")
    metadata.write_bytes(data)
    code, text = run("verify", folder)
    assert code == 1
    assert f"is not what was written beside it in '{CHECKSUMS}'" in text


@pytest.mark.parametrize("optimizers", [[], None])
def test_optimizers_that_are_a_value_of_their_own(optimizers: Any, tmp_path: Path):
    state = small_state()
    state["state"]["optimizers"] = optimizers
    assert run("inspect", save_file(tmp_path / "file", state))[0] == 0


def test_metadata_of_something_else(folder: Path):
    (folder / CHECKSUMS).unlink()
    (folder / METADATA).write_bytes(pickle.dumps({"state": 1}))
    with pytest.raises(CheckpointError, match="holds a dict, not the metadata of a checkpoint"):
        open_checkpoint(folder)


def test_unreadable_metadata(folder: Path):
    (folder / METADATA).write_bytes(b"\x80\x04garbage")
    found_by(folder, METADATA, "is damaged")
    code, text = run("inspect", folder)
    assert code == 1
    assert "folder: sharded" in text
    assert "__0_0.distcp" in run("inspect", folder, "--json")[1]


def test_unreadable_checksums(folder: Path):
    (folder / CHECKSUMS).write_text("{}")
    found_by(folder, f"{CHECKSUMS}' is damaged")


def test_cut_off_shard(folder: Path):
    file = folder / "__1_0.distcp"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    found_by(folder, f"'__1_0.distcp' has {size - 1} of {size} bytes")
    assert run("inspect", folder)[0] == 1


def test_missing_shard(folder: Path):
    (folder / "__0_0.distcp").unlink()
    found_by(folder, "'__0_0.distcp' is missing")
    code, text = run("inspect", folder)
    assert code == 1
    assert "parameters 648" in text  # a tie is known from checksums in the files
    assert text.count("problem") == 1


def test_cut_off_shard_of_others(folder: Path):
    """Without our list of sizes the last value that is needed tells."""
    (folder / CHECKSUMS).unlink()
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    found_by(folder, "'__0_0.distcp' has")


def test_foreign_shard_of_another_layout(folder: Path):
    """Long enough, and none of its values is where this checkpoint has one."""
    file = folder / "__1_0.distcp"
    file.write_bytes(bytes(37) + (folder / "__0_0.distcp").read_bytes() * 2)
    found_by(folder, "__1_0.distcp", "is damaged")


def test_foreign_shard_with_other_shapes(tmp_path: Path):
    """Each value is an archive in itself whole, only of another shape."""
    ours = save_folder(tmp_path / "ours", {"state": {"model": {"w": torch.zeros(1, 64)}}})
    other = save_folder(tmp_path / "other", {"state": {"model": {"w": torch.zeros(64, 1)}}})
    shutil.copy(other / "__0_0.distcp", ours / "__0_0.distcp")
    found_by(ours, "of shape (64, 1), where the metadata promises", "another checkpoint")
    with pytest.raises(CheckpointError, match="promises"):
        open_checkpoint(ours).tensor("state.model.w")


@pytest.mark.parametrize("key", [EMBED, "state.run_name"])
def test_metadata_that_leaves_out_a_piece(key: str, folder: Path):
    def drop(metadata: Any) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == key]:
            del metadata.storage_data[index]

    _rewrite(folder, drop)
    found_by(folder, f"'{key}'")
    assert run("inspect", folder)[0] == 1
    with pytest.raises(CheckpointError, match="is incomplete"):
        open_checkpoint(folder)


def _rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / CHECKSUMS).unlink()


def test_metadata_that_describes_a_piece_twice_or_nowhere(folder: Path):
    def move(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == EMBED)
        info = metadata.storage_data.pop(index)
        metadata.storage_data[MetadataIndex(EMBED, (5, 5), index.index)] = info

    _rewrite(folder, move)
    found_by(folder, f"pieces of '{EMBED}' hold 0 of 320 elements")


def test_metadata_with_a_part_missing(folder: Path):
    _rewrite(folder, lambda metadata: delattr(metadata.state_dict_metadata[EMBED], "properties"))
    found_by(folder, "is damaged: it does not describe a checkpoint")


@pytest.mark.table("../outside", "a/../../b")
@pytest.mark.parametrize("place", ["../outside", "/etc/passwd", "a/../../b"])
def test_path_that_climbs_out(place: str, folder: Path):
    def move(metadata: Any) -> None:
        metadata.storage_data[MetadataIndex("state.run_name")].relative_path = place

    _rewrite(folder, move)
    found_by(folder, f"in '{place}', outside of its own folder", "Do not use this checkpoint")
    code, text = run("inspect", folder)
    assert code == 1
    assert "is damaged" not in text  # which would ask for a new copy


@pytest.mark.table("a\\x00b", "\\u202e__0_0.distcp")
@pytest.mark.parametrize("place", ["", ".", "a\0b", "\ud800", "\u202e__0_0.distcp"])
def test_path_that_is_no_file_here(place: str, folder: Path):
    def move(metadata: Any) -> None:
        metadata.storage_data[MetadataIndex("state.run_name")].relative_path = place

    _rewrite(folder, move)
    found_by(folder)


def test_keys_that_cannot_be_written(folder: Path):
    def rename(metadata: Any) -> None:
        metadata.state_dict_metadata["\ud800"] = metadata.state_dict_metadata.pop(EMBED)

    _rewrite(folder, rename)
    found_by(folder, "does not describe a checkpoint")


@pytest.mark.table("size-True", "chunk offset-True")
@pytest.mark.parametrize("number", [math.nan, math.inf, -0.0, 1.5, True, "1", None, -1, 10**30])
@pytest.mark.parametrize("where", ["offset", "length", "size", "chunk size", "chunk offset"])
def test_numbers_that_count_nothing(where: str, number: Any, folder: Path):
    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == EMBED)
        entry = metadata.state_dict_metadata[EMBED]
        if where in ("offset", "length"):
            setattr(metadata.storage_data[index], where, number)
        elif where == "size":
            entry.size = (number, 8)
        else:
            chunk = entry.chunks[0]
            setattr(chunk, f"{where.removeprefix('chunk ')}s", (number, 8))

    _rewrite(folder, change)
    with pytest.raises(CheckpointError, match=r"no number|no attribute|incomplete"):
        open_checkpoint(folder)


def test_more_elements_than_bytes(folder: Path):
    """Nobody allocates what a file of a few bytes promises."""
    many = 10**15

    def enlarge(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[EMBED]
        entry.size = torch.Size((many, 8))
        entry.chunks[0].sizes = torch.Size((many - 40 + entry.chunks[0].sizes[0], 8))

    _rewrite(folder, enlarge)
    found_by(folder, f"of {many * 32} bytes")


@pytest.mark.table("../outside-1", ".metadata-nan")
@pytest.mark.parametrize(
    ("name", "size"), [("../outside", 1), ("/etc/passwd", 1), (METADATA, math.nan), ("x", "1")]
)
def test_checksums_that_make_no_sense(name: str, size: Any, folder: Path):
    found = json.loads((folder / CHECKSUMS).read_text())
    found["files"][name] = size
    (folder / CHECKSUMS).write_text(json.dumps(found))
    found_by(folder, f"{CHECKSUMS}' is damaged")


def test_link_where_a_conversion_is_written(folder: Path, tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    for to in ("sharded", "full"):
        (tmp_path / f".incomplete.{to}").symlink_to(precious)
        assert run("convert", folder, tmp_path / to, "--to", to)[0] == 0
    assert [item.name for item in precious.iterdir()] == ["file"]
    assert not (tmp_path / "sharded").is_symlink()


@pytest.mark.parametrize("where", ["tensor", "object"])
def test_flipped_byte_in_a_file(where: str, tmp_path: Path):
    state = small_state()
    file = save_file(tmp_path / "a.pt", state)
    mark = state["state"]["model"]["model.embed.weight"].numpy().tobytes()[:32]
    _flip(file, file.read_bytes().index(mark if where == "tensor" else b"small"))
    found_by(file, "is damaged: bytes in")


def test_cut_off_file(tmp_path: Path):
    file = save_file(tmp_path / "a.pt", small_state())
    file.write_bytes(file.read_bytes()[:-100])
    found_by(file, "a.pt is damaged")
    assert run("inspect", file)[0] == 1


def test_every_damaged_value_is_named(folder: Path):
    for key in (EMBED, "state.model.model.norm.weight"):
        _flip_value(folder, key)
    problems = json.loads(run("verify", folder, "--json")[1])["problems"]
    assert len(problems) == 2


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folder_that_is_no_checkpoint(command: str, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "ep0-ba5").mkdir()
    code, text = run(command, tmp_path / "a")
    assert code == 1
    assert "the folder has no '.metadata' (it holds ep0-ba5)" in text
    assert run("convert", tmp_path / "a", tmp_path / "b", "--to", "full")[0] == 2


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_weights_of_hugging_face_are_not_called_damaged(command: str, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"{}".ljust(16))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        code, text = run(command, path)
        assert code == 1
        assert "holds weights as Hugging Face's libraries write them" in text


def test_a_file_without_checksums_is_not_called_whole(tmp_path: Path):
    values = {"state": {"model": {"a": torch.ones(4)}}}
    torch.save(values, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    code, text = run("verify", tmp_path / "b.pt")
    assert code == 0
    assert "has no checksums to compare" in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_nothing_at_all(command: str, tmp_path: Path):
    code, text = run(command, tmp_path / "nowhere")
    assert code == 2
    assert "There is no checkpoint at" in text


# --- Hostile checkpoints. ---


class Evil:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


COMMANDS = (["inspect"], ["verify"], ["convert", "full"], ["convert", "sharded"], ["diff"])


def _attack(source: Path, command: list[str], tmp_path: Path) -> tuple[int, str]:
    if command[0] == "convert":
        return run("convert", source, tmp_path / "out", "--to", command[1])
    return run(command[0], source, *([source] if command[0] == "diff" else []))


def _hostile(kind: str, tmp_path: Path) -> Path:
    state = small_state()
    evil = Evil(tmp_path / "created")
    if kind == ".metadata":
        path = save_folder(tmp_path / "folder", state)
        (path / METADATA).write_bytes(pickle.dumps(evil))
        return path
    state["state"]["run_name"] = evil
    if kind == "file":
        return save_file(tmp_path / "a.pt", state)
    return save_folder(tmp_path / "folder", state)


@pytest.mark.table("convert full-byte entry", "diff-.metadata")
@pytest.mark.parametrize("kind", [".metadata", "byte entry", "file"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_is_executed(kind: str, command: list[str], tmp_path: Path):
    source = _hostile(kind, tmp_path)
    code, text = _attack(source, command, tmp_path)
    assert not (tmp_path / "created").exists()
    assert code in (1, 2)
    assert "io.open" in text
    assert TRUST_VARIABLE in text


def test_trusted_checkpoints_may(tmp_path: Path, monkeypatch):
    source = _hostile("byte entry", tmp_path)
    monkeypatch.setenv(TRUST_VARIABLE, str(source))
    with pytest.warns(ResourceWarning):
        assert _attack(source, ["inspect"], tmp_path)[0] == 0
    assert (tmp_path / "created").exists()


# --- Destinations. ---

WRITERS: dict[str, Callable[..., object]] = {
    "sharded": lambda source, path, advance: convert_to_sharded(source, path, 10**9, advance),
    "full": write_full,
    "hf": lambda source, path, advance: write_huggingface(
        source, path, 10**9, advance, config=path.parent / "config.json"
    ),
}


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return save_ours(tmp_path / "source", small_state())


@pytest.fixture(params=WRITERS)
def to(request) -> str:
    return request.param


def convert(source: Path, destination: Path, to: str) -> tuple[int, str]:
    extra = ["--config", source.parent / "config.json"] if to == "hf" else []
    return run("convert", source, destination, "--to", to, *extra)


def unchanged(tmp_path: Path) -> None:
    assert sorted(item.name for item in tmp_path.iterdir()) == ["config.json", "source"]


@pytest.mark.parametrize("kind", ["file", "full folder", "link"])
def test_existing_destination_is_refused(kind: str, to: str, source: Path, tmp_path: Path):
    there = tmp_path / "there"
    if kind == "file":
        there.write_text("precious")
    elif kind == "link":
        there.symlink_to(tmp_path / "nowhere")
    else:
        there.mkdir()
        (there / "file").write_text("precious")
    code, text = convert(source, there, to)
    assert code == 2
    assert f"'{there}' exists already" in text
    assert not (tmp_path / "nowhere").exists()
    if kind != "link":
        assert (there / "file" if kind == "full folder" else there).read_text() == "precious"


@pytest.mark.table("sharded-missing", "full-source/.metadata")
@pytest.mark.parametrize("parent", ["/proc/self", "missing", "source/.metadata"])
def test_destination_that_cannot_be_written(parent: str, to: str, source: Path, tmp_path: Path):
    """Root may write anywhere but in /proc; the others fail for everybody."""
    code, text = convert(source, tmp_path / parent / "out", to)
    assert code == 2
    assert "CheckpointError: " in text
    assert "could not be written: " in text
    unchanged(tmp_path)


def test_destination_whose_name_is_too_long(to: str, source: Path, tmp_path: Path):
    code, text = convert(source, tmp_path / ("x" * 300), to)
    assert code == 2
    assert "could not be written: File name too long" in text
    unchanged(tmp_path)


# The last but one breaks off inside torch's writer, the last in the files that come after it.
@pytest.mark.table("full-1000", "hf-1000")
@pytest.mark.parametrize("size_bytes", [0, 1000, 2000])
def test_full_disk(size_bytes: int, to: str, source: Path, tmp_path: Path):
    before = signal.getsignal(signal.SIGXFSZ)
    assert before == signal.SIG_IGN, "Python ignores the signal, so that writing fails instead"
    with no_space(size_bytes):
        code, text = convert(source, tmp_path / "out", to)
    assert code == 2
    assert "could not be written: File too large" in text
    assert text.count("Error") == 1
    unchanged(tmp_path)


def test_no_room_to_put_tensors_together(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("composer_fsdp2.checkpoint.convert._PIECE_BYTES", 100)
    (tmp_path / "config.json").write_text("{}")
    source = save_ours(tmp_path / "source", small_state())
    with no_space(1500):
        code, text = convert(source, tmp_path / "out", "full")
    assert code == 2
    assert "could not be written: File too large" in text
    unchanged(tmp_path)


@pytest.fixture
def interruptible():
    """Importing Composer anywhere in the session makes an interrupt end the process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("after", [1, 2])
def test_interrupted(after: int, to: str, source: Path, tmp_path: Path):
    calls = []

    def interrupt(*progress: int) -> None:
        calls.append(progress)
        if len(calls) == after:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        WRITERS[to](open_checkpoint(source), tmp_path / "out", interrupt)
    unchanged(tmp_path)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_command(to: str, source: Path, tmp_path: Path, monkeypatch):
    @contextmanager
    def progress(_title: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint, "progress", progress)
    code, text = convert(source, tmp_path / "out", to)
    assert code == 2
    assert text.startswith("CheckpointError: Interrupted before")
    unchanged(tmp_path)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_inside_torchs_writer(tmp_path: Path):
    """torch's writer raises an error of its own over it."""

    class Slow:
        written = 0

        def write(self, data: Any) -> int:
            self.written += len(data)
            if self.written > 1000:
                signal.raise_signal(signal.SIGINT)
            return len(data)

    out = tmp_path / "out"

    def write() -> None:
        with staged(out, folder=True) as path:
            (path / "file").touch()
            torch.save(torch.zeros(10_000), Slow())  # pyright: ignore[reportArgumentType]

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_other_errors_stay_what_they_are(tmp_path: Path):
    def write() -> None:
        with staged(tmp_path / "a", folder=False) as path:
            path.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert list(tmp_path.iterdir()) == []
