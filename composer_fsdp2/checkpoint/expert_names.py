"""Shows the experts of a checkpoint under the names that a model has for them.

transformers 4 has matrices for each expert, transformers 5 a stack of them for each layer; see
[Note: merged experts] in `pretrained`. A matrix is a box of the stack, and so is a matrix of an
optimizer's moments. So pieces of a folder of shards get the name and the offsets that they have in
the other form, and no tensor is put together.

[Note: values of all experts] A stack has one `step` for all of its experts. It can be shown for a
checkpoint with matrices where all of them have the same, which they do not where experts without
tokens are not called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.storage import StorageReader

from composer_fsdp2.checkpoint.convert import nest
from composer_fsdp2.checkpoint.load import load_sharded
from composer_fsdp2.checkpoint.pretrained import BLOCKS, expert_matrices
from composer_fsdp2.checkpoint.ranges import View
from composer_fsdp2.checkpoint.source import Checkpoint, FolderCheckpoint, KeyPath, flatten
from composer_fsdp2.errors import CheckpointError

__all__ = ["ExpertNames", "RenamedFolder"]


@dataclass(frozen=True, slots=True)
class _SavedParts:
    """FQNs in the checkpoint that the values of a parameter come from."""

    fqns: tuple[str, ...]
    per_expert: int = 0
    """matrices of an expert in a stack; 0 for a parameter that has another name alone"""
    count: int = 0
    """matrices in the stack"""
    number: int | None = None
    """of this matrix in the stack; None if the parameter is the stack"""


class ExpertNames:
    """Finds the experts that a checkpoint has in another form than a model. Collective: no.

    Args:
        saved: an open checkpoint.
        model: FQNs of parameters and buffers of the model, in an order that all ranks have.

    Attributes:
        sources: FQN of the model -> where the checkpoint has its values; empty for one form.
        fqns: FQN of the checkpoint -> FQNs of the model.
    """

    def __init__(self, saved: Checkpoint, model: Collection[str]) -> None:
        theirs = {str(path[0]): None for path in saved.under("state", "model").values() if path}
        only_theirs = dict.fromkeys(fqn for fqn in theirs if fqn not in model)
        only_ours = dict.fromkeys(fqn for fqn in model if fqn not in theirs)
        sources: dict[str, _SavedParts] = {}
        for stack, rows in expert_matrices(only_theirs).items():
            if stack in only_ours:
                fqns = tuple(chain.from_iterable(rows))
                sources[stack] = _SavedParts(fqns, len(rows[0]), len(fqns))
        for stack, rows in expert_matrices(only_ours).items():
            fqns = tuple(chain.from_iterable(rows)) if stack in only_theirs else ()
            for number, fqn in enumerate(fqns):
                sources[fqn] = _SavedParts((stack,), len(rows[0]), len(fqns), number)
        for old, new in (BLOCKS, BLOCKS[::-1]) if sources else ():
            moved = {fqn: fqn.replace(new, old) for fqn in only_ours if fqn not in sources}
            sources |= {
                fqn: _SavedParts((name,)) for fqn, name in moved.items() if name in only_theirs
            }
        # Ranks distribute the tensors of a file in the order of its dictionaries.
        self.sources = {fqn: sources[fqn] for fqn in only_ours if fqn in sources}
        self.fqns: defaultdict[str, list[str]] = defaultdict(list)
        for fqn, source in self.sources.items():
            for old in source.fqns:
                self.fqns[old].append(fqn)

    def __bool__(self) -> bool:
        """Returns whether the two differ."""
        return bool(self.sources)

    def renamed(self, values: Any, where: str = "") -> Any:
        """Returns nested values with the names of the model. Stacks are put together in memory.

        Args:
            values: dictionaries, lists of FQNs, and anything else.
            where: path of keys to them, for the error.

        Raises:
            CheckpointError: see [Note: values of all experts].
        """
        if isinstance(values, list):
            if all(isinstance(item, str) for item in values):
                return list(dict.fromkeys(n for o in values for n in self.fqns.get(o, [o])))
            return [self.renamed(item, where) for item in values]
        if not isinstance(values, dict):
            return values
        joined = {
            key: self.renamed(item, f"{where}/{key}")
            for key, item in values.items()
            if key not in self.fqns
        }
        for fqn, source in self.sources.items() if len(joined) < len(values) else ():
            parts = [values.get(old) for old in source.fqns]
            if any(part is not None for part in parts):
                joined[fqn] = _joined(parts, source, f"{where}/{fqn}")
        return joined

    def keys(self, saved: Checkpoint) -> Iterator[tuple[KeyPath, _SavedParts, list[str | None]]]:
        """Yields the key path of each value in the model's form, and keys that it is made of."""
        keys: defaultdict[str, dict[tuple[KeyPath, KeyPath], str]] = defaultdict(dict)
        for key, path in saved.paths.items():
            at = next((i for i, part in enumerate(path) if part in self.fqns), None)
            if at is None:
                yield path, _SavedParts((key,)), [key]
            else:
                keys[str(path[at])][path[:at], path[at + 1 :]] = key
        for fqn, source in self.sources.items():
            for around in dict.fromkeys(chain.from_iterable(keys[old] for old in source.fqns)):
                yield (
                    (*around[0], fqn, *around[1]),
                    source,
                    [keys[old].get(around) for old in source.fqns],
                )


def _joined(parts: Sequence[Any], source: _SavedParts, where: str) -> Any:
    """Returns the value of a parameter, or of each key of its state, from those of its sources."""
    first = next(part for part in parts if part is not None)
    if isinstance(first, dict):
        keys = dict.fromkeys(chain.from_iterable(part or () for part in parts))
        return {
            key: _joined([(part or {}).get(key) for part in parts], source, f"{where}/{key}")
            for key in keys
        }
    shapes = {part.shape if isinstance(part, torch.Tensor) else None for part in parts}
    shape: Any = shapes.pop() if len(shapes) == 1 else None
    if _is_stacked(shape, source):
        if source.number is None:
            return torch.cat(list(parts)).view(-1, source.per_expert * shape[0], shape[1])
        expert, matrix = divmod(source.number, source.per_expert)
        return first[expert].chunk(source.per_expert)[matrix]
    _check_equal(where, parts)
    return first


def _is_stacked(shape: Any, source: _SavedParts) -> bool:
    """Returns whether values of this shape, of each source, are boxes of a stack, or a stack."""
    if not source.per_expert or shape is None:
        return False
    if source.number is None:
        return len(shape) == 2
    return len(shape) == 3 and shape[0] * source.per_expert == source.count


def _check_equal(where: str, values: Sequence[Any]) -> None:
    """Refuses values of experts that differ where the model has one; see the note above.

    Raises:
        CheckpointError: they differ, or some experts have none.
    """
    first = values[0]
    for value in values[1:]:
        is_tensor = isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor)
        if not (torch.equal(value, first) if is_tensor else value == first) or value is None:
            raise CheckpointError(
                f"'{where}' differs between the experts of the checkpoint, because some had no "
                "tokens in some steps. This model has one value for all experts of a layer, so the "
                "run would go on from other state than was saved. Start from the weights with "
                "load_weights_only: true, or go on with the transformers that saved it."
            )


class RenamedFolder(FolderCheckpoint):
    """A folder of shards as if it had been saved with the names of the model.

    Attributes:
        of_all: key -> keys in the folder whose values have to be the same; see the note above.
    """

    def __init__(self, saved: FolderCheckpoint, names: ExpertNames) -> None:
        self.path, self.files, self.problems = saved.path, saved.files, saved.problems
        self.of_all: dict[str, list[str | None]] = {}
        self._saved = saved
        self._origins: dict[MetadataIndex, tuple[MetadataIndex, Any]] = {}
        self._last: tuple[MetadataIndex, Any] | None = None
        entries, paths = {}, {}
        for path, source, keys in names.keys(saved):
            key = ".".join(map(str, path))
            paths[key], entries[key] = path, self._entry(key, source, keys)
        stored = saved.metadata.storage_data
        storage = {index: stored[origin] for index, (origin, _) in self._origins.items()}
        self.tabulate(
            replace(
                saved.metadata,
                state_dict_metadata=entries,
                planner_data=paths,
                storage_data=storage,
            )
        )

    def check_values_of_all(self, reader: StorageReader, state: Mapping[str, Any]) -> None:
        """Refuses values of experts that differ where the run has one.

        Collective: yes, over the default group.

        Args:
            reader: of the folder with its own names.
            state: state dict of the run.

        Raises:
            CheckpointError: on every rank; see [Note: values of all experts].
        """
        flat, _ = flatten(state)
        compared = {key: saved for key, saved in self.of_all.items() if key in flat}
        if not compared:
            return
        tensors = self._saved.tensors
        keys = {key for saved in compared.values() for key in saved if key is not None}
        empty = {
            key: torch.empty(tensors[key].shape, dtype=tensors[key].dtype)
            for key in keys & tensors.keys()
        }
        values = nest((self._saved.paths[key], empty.get(key)) for key in sorted(keys))
        load_sharded(values, reader)
        saved_values, _ = flatten(values)
        for key, saved in compared.items():
            _check_equal(key, [saved_values.get(each or "") for each in saved])

    def piece(self, index: MetadataIndex, file: Any = None, views: Sequence[View] = ()) -> Any:
        """Returns an object or a piece, cut out of what the folder has. See `FolderCheckpoint`."""
        origin, box = self._origins[index]
        if box is None:
            return self._saved.piece(origin, file, views)
        if views:
            wanted: list[View] = [lambda piece, view=view: view(piece[box]) for view in views]
            return self._saved.piece(origin, file, wanted)[box]
        # Boxes of one piece of a stack are read one after the other.
        if self._last is None or self._last[0] != origin or file is not None:
            self._last = (origin, self._saved.piece(origin, file))
        return self._last[1][box]

    def compare_ranges(self) -> None:
        """Compares what was read of the folder. See `FolderCheckpoint`. Collective: yes."""
        self._saved.compare_ranges()

    def _entry(self, key: str, source: _SavedParts, keys: Sequence[str | None]) -> Any:
        """Notes where the pieces of a value are, and returns its metadata."""
        saved_entries: Any = self._saved.metadata.state_dict_metadata
        present = [old for old in keys if old is not None]
        first_entry = saved_entries[present[0]]
        shapes = {getattr(saved_entries[old], "size", None) for old in present}
        shape: Any = shapes.pop() if len(shapes) == 1 and len(present) == len(keys) else None
        if not _is_stacked(shape, source):
            if len(keys) > 1:
                self.of_all[key] = list(keys)
            for index in self._saved.indices(present[0]):
                self._origins[replace(index, fqn=key)] = index, None
            return first_entry
        rows = shape[-2] // (1 if source.number is None else source.per_expert)
        chunks: list[ChunkStorageMetadata] = []
        for number, old in enumerate(present):
            expert, matrix = divmod(source.number or number, source.per_expert)
            begin, end = matrix * rows, (matrix + 1) * rows
            stored: Any = saved_entries[old]
            sizes_at = {chunk.offsets: chunk.sizes for chunk in stored.chunks}
            for index in self._saved.indices(old):
                start: Any = index.offset
                sizes: Any = sizes_at[start]
                if source.number is None:
                    box: Any = (None,)
                    offsets, sizes = (expert, begin + start[0], start[1]), (1, *sizes)
                elif expert in range(start[0], start[0] + sizes[0]):
                    first, last = max(start[1], begin), min(start[1] + sizes[1], end)
                    box = (expert - start[0], slice(first - start[1], last - start[1]))
                    offsets, sizes = (first - begin, start[2]), (last - first, sizes[2])
                else:
                    continue
                if min(sizes) > 0:
                    chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                    self._origins[MetadataIndex(key, torch.Size(offsets))] = index, box
        if source.number is None:
            stack = (len(keys) // source.per_expert, source.per_expert * rows, shape[1])
            return replace(first_entry, size=torch.Size(stack), chunks=chunks)
        return replace(first_entry, size=torch.Size((rows, shape[2])), chunks=chunks)
