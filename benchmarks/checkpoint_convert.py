"""Memory and time of converting a checkpoint offline, against a plain copy of the same bytes.

Method: 64 tensors of 32 MB of random values (2 GB) are written once, as one file and as a folder
in which four ranks would have written each tensor in four pieces. Each conversion runs in a fresh
process, through the command line's own function. Memory is RssAnon of that process, sampled every
millisecond by a thread and minus what it was before: pages of mapped files are not counted, the
kernel takes them back when it wants. Time is wall clock from start to finish, fsync included,
divided by that of copying the source's files in the same process, fsync included; the source is in
the page cache for both, and the order of the two is swapped from one conversion to the next.

Goal: memory <= 2 x the largest tensor + 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import resident
import shapes
import torch

TENSORS, ROWS, COLUMNS = 64, 4096, 2048
LARGEST_BYTES = ROWS * COLUMNS * 4
GOAL_BYTES = 2 * LARGEST_BYTES + (1 << 30)
RANKS = 4
CASES = tuple((source, to) for source in ("sharded", "full") for to in ("sharded", "hf", "full"))


def make(folder: Path) -> None:
    """Writes the checkpoint as a file and as a folder of pieces, and a config beside them."""
    from composer_fsdp2.checkpoint import convert
    from composer_fsdp2.checkpoint.source import open_checkpoint

    torch.manual_seed(0)
    model = {f"model.{i}.weight": torch.randn(ROWS, COLUMNS) for i in range(TENSORS)}
    torch.save({"state": {"model": model}}, folder / "full")
    del model
    convert._PIECE_BYTES = LARGEST_BYTES // RANKS
    file_bytes = TENSORS * LARGEST_BYTES // RANKS
    source = open_checkpoint(folder / "full")
    convert.convert_to_sharded(source, folder / "sharded", file_bytes, lambda *_: None)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def seconds(body: Callable[[], object]) -> float:
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def copy(source: Path, destination: Path) -> None:
    """As `cp` does it, and on the disk at the end."""
    if source.is_dir():
        shutil.copytree(source, destination)
    else:
        shutil.copyfile(source, destination)
    for file in [*destination.rglob("*"), destination]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def read(source: Path) -> None:
    """Into the page cache."""
    for file in [source] if source.is_file() else sorted(source.iterdir()):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def measure(conn: Connection, folder: Path, source: str, to: str, copy_first: bool) -> None:
    """One conversion and one copy, in a process of their own."""
    path, out, copied = folder / source, folder / "out", folder / "copied"
    config = folder / "config.json" if to == "hf" else None

    peaks: list[int] = []

    def ours() -> float:
        with resident.Peak.watched() as peak:
            taken = seconds(lambda: _convert(path, out, to, config))
        peaks.append(peak.above)
        return taken

    def theirs() -> float:
        return seconds(lambda: copy(path, copied))

    # Imports, and a first conversion's allocations inside libraries, are not the checkpoint's.
    _warm_up(folder)
    read(path)
    results = {body.__name__: body() for body in ((theirs, ours) if copy_first else (ours, theirs))}
    remove(out)
    remove(copied)
    conn.send((peaks[0], results["ours"], results["theirs"]))


def _warm_up(folder: Path) -> None:
    small = folder / "small"
    torch.save({"state": {"model": {"model.w": torch.ones(2)}}}, small)
    for to in ("sharded", "hf", "full"):
        _convert(small, folder / "warm", to, folder / "config.json" if to == "hf" else None)
        remove(folder / "warm")


def _convert(source: Path, destination: Path, to: str, config: Path | None) -> None:
    from composer_fsdp2.cli.checkpoint import convert

    convert(source, destination, to, config=config)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure; 9 GB are needed")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make(folder)
        for i, (source, to) in enumerate(CASES):
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(theirs, folder, source, to, i % 2 == 0))
            process.start()
            theirs.close()
            peak, converted, copied = ours.recv()
            process.join()
            case = f"{source}_to_{to}"
            figures[f"{case}_peak_mib"] = peak / 2**20
            figures[f"{case}_to_copy"] = converted / copied
            figures[f"{case}_seconds"] = converted
    peaks = [value for key, value in figures.items() if key.endswith("_peak_mib")]
    sizes = {"bytes": TENSORS * LARGEST_BYTES, "largest_mib": LARGEST_BYTES / 2**20}
    shapes.emit(
        "checkpoint_convert", {**sizes, "peak_mib": max(peaks), **figures}, GOAL_BYTES / 2**20
    )


if __name__ == "__main__":
    main()
