"""`verify`, `convert` and a load find the same: they read in the same way."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from composer_fsdp2.checkpoint.contents import CHECKSUMS
from composer_fsdp2.checkpoint.describe import verify_checkpoint
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.source import FolderCheckpoint, open_checkpoint
from composer_fsdp2.errors import CheckpointError
from tests.support.saved import as_newer_torch, save_file, save_folder, small_state
from tests.unit.checkpoint.test_damage import EMBED, found_by, run, save_ours


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_ours(tmp_path / "folder", small_state())


# --- Where pieces are. ---


def _rewritten(folder: Path, change: Callable[[Any], object], *, checked: bool) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    if not checked:
        (folder / CHECKSUMS).unlink(missing_ok=True)


def _moved(folder: Path, by: int) -> Callable[[Any], None]:
    """A chunk of the embedding, and where the file says it is, begin some rows elsewhere."""
    del folder

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[EMBED].chunks
        chunk = chunks[-1]
        old, new = chunk.offsets, torch.Size((chunk.offsets[0] ^ by, *chunk.offsets[1:]))
        chunk.offsets = new
        index = next(i for i in metadata.storage_data if i.fqn == EMBED and i.offset == old)
        info = metadata.storage_data.pop(index)
        metadata.storage_data[MetadataIndex(EMBED, new, index.index)] = info

    return change


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("composer_fsdp2.checkpoint.convert._PIECE_BYTES", 300)
    return save_ours(tmp_path / "folder", small_state())


@pytest.mark.table("4-with a digest", "64-without")
@pytest.mark.parametrize("checked", [True, False], ids=["with a digest", "without"])
@pytest.mark.parametrize("by", [1, 2, 4, 8, 64])
def test_a_piece_that_begins_elsewhere(by: int, checked: bool, pieces: Path):
    _rewritten(pieces, _moved(pieces, by), checked=checked)
    said = "is not what was written beside it" if checked else f"pieces of '{EMBED}'"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(pieces)
    found_by(pieces, said)


def test_every_bit_of_metadata(folder: Path):
    """A sample of them: what opens at all is not what was written, and nothing is loaded."""
    data, choose = (folder / METADATA).read_bytes(), random.Random(2)
    for _ in range(300):
        at = choose.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :]
        (folder / METADATA).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)


# --- Damage in what is no tensor. ---


@pytest.mark.matrix
def test_verify_finds_what_a_load_refuses(folder: Path):
    """Any bit of an object, in its header, its directory or its values."""
    (folder / CHECKSUMS).unlink()
    source = open_checkpoint(folder)
    assert isinstance(source, FolderCheckpoint)
    key = "state.run_name"
    info = source.metadata.storage_data[source.indices(key)[0]]
    file = folder / info.relative_path
    data, choose, refused = file.read_bytes(), random.Random(3), 0
    for _ in range(250):
        at = info.offset + choose.randrange(info.length)
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :])
        try:
            open_checkpoint(folder).object(key)
        except CheckpointError:
            refused += 1
            assert verify_checkpoint(folder, lambda *_: None)["problems"], at
    assert refused > 50


# --- Hostile pickles. ---


class Runs:
    """Unpickling it calls a function."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def _packed(value: Any, protocol: int) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def _legacy(value: Any, protocol: int) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _in_an_entry(folder: Path, data: bytes, key: str = "state.run_name") -> None:
    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == key)
        info = metadata.storage_data[index]
        with (folder / info.relative_path).open("ab") as file:
            info.offset, info.length = file.tell(), len(data)
            file.write(data)

    _rewritten(folder, change, checked=False)


PLACES = ("entry", "tensor", "metadata", "file", "old file")


def _hostile(place: str, value: Any, protocol: int, tmp_path: Path) -> Path:
    state, file = small_state(), tmp_path / "a.pt"
    if place in ("file", "old file"):
        state["state"]["run_name"] = value
        file.write_bytes((_packed if place == "file" else _legacy)(state, protocol))
        return file
    path = save_folder(tmp_path / "folder", state)
    if place == "metadata":
        (path / METADATA).write_bytes(pickle.dumps(value, protocol))
    else:
        key = "state.run_name" if place == "entry" else "state.model.model.norm.weight"
        _in_an_entry(path, _packed(value, protocol), key)
    return path


@pytest.mark.table("check_call-subprocess.check_call-old file-5", "eval-eval-tensor-5")
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (os.system, "os.system"),
        (subprocess.check_call, "subprocess.check_call"),
        (eval, "eval"),
        (sys.exit, "sys.exit"),
    ],
)
def test_it_is_called_what_it_is(
    call: Callable[..., Any], asked: str, place: str, protocol: int, tmp_path: Path
):
    path = _hostile(place, Runs(call, "true"), protocol, tmp_path)
    found_by(path, " asks for '", f"{asked}', which is not data")
    for command in (["verify", path], ["convert", path, tmp_path / "out", "--to", "full"]):
        text = run(*command)[1]
        assert "is damaged" not in text
        assert "weights_only" not in text
        assert "COMPOSER_FSDP2_TRUST" in text


@pytest.mark.parametrize(("kind", "spread"), [("file", False), ("folder", False), ("folder", True)])
def test_algorithms_that_would_be_evaluated(kind: str, spread: bool, tmp_path: Path):
    saved: Any = {"repr": "BlurPool(print('executed'))"}
    state = small_state()
    state["state"]["algorithms"] = {"BlurPool": saved} if spread else [("BlurPool", saved)]
    path = (save_file if kind == "file" else save_folder)(tmp_path / "saved", state)
    found_by(path, "Composer would evaluate that")


# --- Archives that grow. ---


@pytest.mark.table("command3")
@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["convert"], ["diff"]])
def test_a_compressed_file_is_not_inflated(command: list[str], tmp_path: Path):
    """32 MB of zeros take 33 kB; nobody may need the memory to say no."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save({"state": {"model": {"w": torch.zeros(8_000_000)}}}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    plain.unlink()
    assert packed.stat().st_size < 1_000_000
    extra = {"convert": [tmp_path / "out", "--to", "full"], "diff": [packed]}.get(command[0], [])
    code, text = run(*command, packed, *extra)
    assert code in (1, 2)
    assert "is compressed" in text
    assert "32,0" in text


def test_damage_does_not_come_with_advice(tmp_path: Path):
    """torch adds how to switch its check off to whatever is wrong with a pickle."""
    path = save_file(tmp_path / "a.pt", small_state())
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("data.pkl"):
                data = data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :]
            new.writestr(member.filename, data)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        open_checkpoint(tmp_path / "b.pt")
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_newer_torch_is_no_damage(tmp_path: Path, monkeypatch, trusted: bool):
    save_folder(tmp_path / "a", small_state())
    metadata = FileSystemReader(tmp_path / "a").read_metadata()
    if trusted:
        monkeypatch.setenv("COMPOSER_FSDP2_TRUST", str(tmp_path))
    (tmp_path / "a" / METADATA).write_bytes(as_newer_torch(metadata))
    with pytest.raises(CheckpointError, match="was written by a newer torch than") as caught:
        open_checkpoint(tmp_path / "a")
    assert "damaged:" not in str(caught.value)
    assert "--to full" in str(caught.value)
    (problem,) = verify_checkpoint(tmp_path / "a", lambda *_: None)["problems"]
    assert "newer torch" in problem


def test_properties_of_tensors_are_torchs_own(tmp_path: Path):
    save_folder(tmp_path / "a", small_state())
    found = FolderCheckpoint(tmp_path / "a").metadata
    own = FileSystemReader(tmp_path / "a").read_metadata()
    assert found.state_dict_metadata == own.state_dict_metadata
    kinds = {
        type(getattr(entry, "properties", None)) for entry in found.state_dict_metadata.values()
    }
    assert kinds <= {TensorProperties, type(None)}
