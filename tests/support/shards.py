"""Lets several sessions of tests on one machine read MDS shards at the same time.

MosaicML Streaming numbers its shared memory by what it finds on the machine: two runs that start
together take the same number. It passes over a number whose lock file is in the temporary folder.
So each session takes a block of numbers, and a temporary folder with the files of all below it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import tempfile
from multiprocessing import shared_memory
from pathlib import Path
from typing import TextIO

__all__ = ["FIRST", "SHARED_MEMORY", "claim_numbers", "free_numbers"]

SHARED_MEMORY = Path("/dev/shm")
_BLOCK = 64
FIRST = "COMPOSER_FSDP2_TESTS_FIRST_NUMBER"


def claim_numbers() -> TextIO:
    """Gives this session and what it starts their block; they have it until the file is closed."""
    root = Path(tempfile.gettempdir())
    for number in itertools.count(1):  # the first block stays for runs that are no tests
        claim = (root / f"composer-fsdp2-tests-{number}.lock").open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            continue
        folder = root / f"composer-fsdp2-tests-{number}"
        folder.mkdir(exist_ok=True)
        for taken in range(number * _BLOCK):
            (folder / f"{taken:06}_barrier_filelock").touch()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        os.environ[FIRST] = str(number * _BLOCK)
        free_numbers()
        return claim
    raise AssertionError


def free_numbers() -> None:
    """Removes what runs of this session have left; none may be reading shards."""
    for name in _own(SHARED_MEMORY):
        # Python's tracker of shared memory would miss a file that is removed without it.
        left = shared_memory.SharedMemory(name)
        left.close()
        left.unlink()
    folder = Path(tempfile.gettempdir())
    for name in _own(folder):
        (folder / name).unlink()


def _own(folder: Path) -> list[str]:
    """Files with a number of this session."""
    first = int(os.environ[FIRST])
    block = range(first, first + _BLOCK)
    names = [file.name for file in folder.glob("[0-9]*_*")]
    return [name for name in names if (n := re.match(r"\d{6}(?=_)", name)) and int(n[0]) in block]
