"""What Composer reads of a checkpoint, read without executing anything that is in it."""

from __future__ import annotations

import ast
import contextlib
import tarfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from composer.utils import checkpoint as composers

from composer_fsdp2.checkpoint.load import (
    check_fit,
    load_sharded,
    read_items,
)
from composer_fsdp2.checkpoint.metadata import METADATA
from composer_fsdp2.checkpoint.source import FileCheckpoint, FolderCheckpoint, flatten
from composer_fsdp2.errors import CheckpointError
from composer_fsdp2.trainer.load_steps import (
    StateDict,
    left_out_notes,
    remove_keys,
    run_on_all_ranks,
    warn_on_rank_0,
)

__all__ = [
    "load_sharded_safely",
    "read_file",
    "read_folder_data",
    "read_folder_metadata",
    "unpacking_safely",
    "vet_algorithms",
]


@contextlib.contextmanager
def unpacking_safely() -> Generator[None]:
    """Archives are unpacked inside their folder, and hold nothing but files and folders.

    Raises:
        CheckpointError: a member wants to go elsewhere.
    """
    unset = object()
    before = vars(tarfile.TarFile).get("extraction_filter", unset)
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    try:
        yield
    except tarfile.FilterError as error:
        raise CheckpointError(
            f"The archive has a member that does not belong into a checkpoint: {error}. Unpacking "
            "it could overwrite any file. Do not use this archive."
        ) from None
    finally:
        if before is unset:
            del tarfile.TarFile.extraction_filter
        else:
            tarfile.TarFile.extraction_filter = before


def vet_algorithms(state_dict: Mapping[str, Any]) -> None:
    """Refuses algorithms whose description is more than a call with plain arguments.

    Composer evaluates the description, which comes from the checkpoint.

    Raises:
        CheckpointError: evaluating it could execute code.
    """
    algorithms = state_dict.get("algorithms")
    for entry in algorithms if isinstance(algorithms, list) else ():
        name, value = entry
        text = value.get("repr", "") if isinstance(value, Mapping) else ""
        if not _is_plain_call(str(name), str(text)):
            raise CheckpointError(
                f"The checkpoint describes its algorithm '{name}' as {text[:100]!r}. Composer "
                "would evaluate that, and it is more than a name with plain arguments, so it could "
                "execute code. Leave the algorithms out with load_ignore_keys: [state/algorithms]."
            )


def _is_plain_call(name: str, text: str) -> bool:
    try:
        call = ast.parse(text, mode="eval").body
        # No assert: `python -O` would drop it, and Composer evaluates what passes here.
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                ast.literal_eval(argument)
            return True
    except (SyntaxError, ValueError, RecursionError):
        pass
    # The default `repr` of an object cannot be evaluated; Composer warns and goes on.
    return text.startswith("<") and text.endswith(">")


def read_file(path: str | Path, map_location: str) -> Any:
    """Stands in for the function that unpickles a file. `map_location` is always the CPU."""
    del map_location
    return FileCheckpoint(Path(composers._ensure_valid_checkpoint(path))).values


def read_folder_metadata(reader: Any) -> Any:
    """Stands in for `FileSystemReaderWithValidation.read_metadata`."""
    folder = Path(reader.path)
    composers._ensure_valid_checkpoint(folder / METADATA)
    if not hasattr(reader, "checkpoint"):
        reader.checkpoint = FolderCheckpoint(folder, incomplete=True)
    return reader.checkpoint.metadata


def read_folder_data(reader: Any, plan: Any, planner: Any) -> Any:
    """Stands in for `FileSystemReaderWithValidation.read_data`."""
    folder: FolderCheckpoint = reader.checkpoint
    specs: dict[str, list[tuple[int, int]]] = {}
    for item in plan.items:
        info = folder.metadata.storage_data[item.storage_index]
        specs.setdefault(info.relative_path, []).append((info.offset, info.length))
    for name, spec in specs.items():
        composers._ensure_valid_checkpoint(folder.path / name, spec)
    read_items(folder, plan, planner)
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return done


def load_sharded_safely(
    state_dict: StateDict, storage_reader: Any, load_planner: Any = None
) -> None:
    """Stands in for `dist_cp_load`, which meets one missing key by asking for no key at all.

    Raises:
        CheckpointError: it does not fit, or executes code.
    """
    saved = FolderCheckpoint(Path(storage_reader.path), incomplete=True)
    flat, _ = flatten(state_dict)
    fit = run_on_all_ranks(lambda: check_fit(saved, flat, strict=False))
    warn_on_rank_0(left_out_notes(saved, fit))
    remove_keys(state_dict, [key for key in fit.left_out if not key.startswith("state.model.")])
    load_sharded(state_dict, storage_reader, load_planner)
    run_on_all_ranks(lambda: vet_algorithms(state_dict.get("state", {})))
