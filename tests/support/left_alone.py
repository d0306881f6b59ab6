"""What Composer does without FSDP2, as plain values: with `install()` it has to do the same.

A case is a function of a folder. What it returns, raises and warns of is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from composer_fsdp2 import installed
from composer_fsdp2.patches import uninstall

Case = Callable[[Path], Any]

_RANDOM = re.compile(r"/tmp/[\w./-]+|tmp[a-z0-9_]{8}|0x[0-9a-f]+|\d{12,}|\d+ samples/sec")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that somebody outside sees of a case."""

    result: Any
    error: str
    warned: tuple[str, ...]


def outcome(case: Case, folder: Path, *, ours: bool) -> Outcome:
    """Runs a case with the package installed, or with Composer alone."""
    uninstall()
    folder.mkdir(parents=True, exist_ok=True)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    result, error = None, ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with installed() if ours else contextlib.nullcontext():
                result = plain(case(folder), folder)
        except BaseException as caught:  # torch's CheckpointException is no Exception
            error = f"{type(caught).__name__}: {_steady(str(caught), folder)}"
    # Of files and threads that the garbage collector finds some time.
    kinds = (ResourceWarning, DeprecationWarning, FutureWarning)
    shown = [w for w in told if not issubclass(w.category, kinds)]
    texts = sorted(f"{w.category.__name__}: {_steady(str(w.message), folder)}" for w in shown)
    return Outcome(result, error, tuple(texts))


def _steady(text: str, folder: Path) -> str:
    """Without what differs from one run to the next, and without lines of a traceback."""
    kept = text.replace(str(folder), "FOLDER")
    # torch puts the tracebacks of all ranks into one error; ours has frames of its own in it.
    lines = [line for line in kept.splitlines() if not line.startswith(("  ", "Traceback"))]
    return _RANDOM.sub("SOMEWHERE", "\n".join(lines))


def plain(value: Any, folder: Path) -> Any:
    """A value that can be compared: tensors by their bytes, objects by their names."""
    match value:
        case torch.Tensor():
            data = value.detach().cpu().contiguous().view(-1)
            bits = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
            return str(value.dtype), tuple(value.shape), hashlib.sha256(bits).hexdigest()[:12]
        case nn.Module():
            return plain(dict(value.state_dict()), folder)
        case Mapping():
            return {str(key): plain(item, folder) for key, item in value.items()}
        case list() | tuple() | set():
            return [plain(item, folder) for item in value]
        case None | bool() | int() | str() | float():
            return _steady(repr(value), folder)
        case Path():
            return value.name
        case datetime.timedelta() | datetime.datetime():
            return "a time"
        case _:
            return type(value).__qualname__


def both(case: Case, folder: Path) -> Iterator[Outcome]:
    """Composer alone, and then with the package installed."""
    for ours in (False, True):
        # The same name, because names get into errors and checkpoints.
        yield outcome(case, folder / str(ours) / "run", ours=ours)
