"""House rules about Python: what a file may import, name and assign. Source in, offenders out."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "composer_fsdp2"
Found = tuple[int, str]
"""Line and text of an offender."""

ORDER = (
    *(
        "pins",
        "errors",
        "fingerprint",
        "torch_private",
        "progress",
        "ranks",
        "text",
        "config",
        "plan",
    ),
    *(
        "blocks",
        "parallel",
        "shard",
        "step",
        "guards",
        "optim",
        "checkpoint",
        "patches",
        "prepare",
        "estimate",
        "trainer",
        "foundry",
        "tools",
        "cli",
    ),
)
"""Stages of the way a model takes. Each may import itself and those before it."""
ROOM = "torch_private/"
"""The only folder that names private members of torch."""
GLUE = {
    "patches": {"composer", "llmfoundry", "transformers"},
    "prepare": {"composer", "transformers"},
    "trainer": {"composer", "transformers"},
    "foundry": {"composer", "llmfoundry", "transformers"},
    "cli": {"composer", "llmfoundry", "transformers"},
}
"""The libraries we plug into, and the only stages that may know them."""
TORCH_ALONE = {"torch_private", *ORDER[ORDER.index("ranks") : ORDER.index("checkpoint")]}
CHECKPOINT_ALONE = {"huggingface_hub", "numpy", "safetensors", "torch", "tqdm"}
"""Libraries that these stages, and checkpoint, may import; no other."""
REPLACING = (ROOM, "patches/")
"""The only folders that may assign to attributes of other packages."""

ANYWHERE = {"_buffers", "_modules", "_parameters", "_version"}
"""Private members of torch that any file may name: see [Note: private members]."""
NOT_TORCHS = {
    # Composer
    *("_activation_checkpointing", "_adjust_device_train_microbatch_size", "_apply_fsdp"),
    *("_ensure_valid_checkpoint", "_fsdp_wrap"),
    *("_format_path_with_rank_zero", "_get_integrations_state_dict", "_get_local_rank_zero_path"),
    *("_get_num_ranks_that_saved_rng", "_get_state_metadata", "_original_model"),
    *("_save_checkpoint", "_train_data_spec", "_train_microbatches"),
    *("_update_num_consecutive_thrashes", "_use_closures", "_write_checkpoint_file"),
    # transformers
    *("_init_weights", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    *("_keys_to_ignore_on_load_unexpected", "_no_split_modules"),
    "_prepare_encoder_decoder_kwargs_for_generation",
    # torchao, Python
    *("_precomputed_scale", "_exit"),
    # fields of ours that a file reads of a class in the file beside it
    *("_enter", "_places"),
}
WITHOUT_UNDERSCORE = {
    *("all_reduce_grads", "comm_ctx", "device_handle", "finalize_backward", "fsdp_params"),
    *("is_unsharded", "mesh_info", "post_backward", "post_forward_mesh_info", "reduce_grads"),
    *("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed", "unsharded_param"),
    *("unsharded_accumulated_grad", "queue_callback"),
}
"""Members of torch's classes that are private as a whole."""


class Source:
    """A file of Python.

    Args:
        name: path from the root of the repository.
        text: content of the file.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tree = ast.parse(text)
        self.nodes: list[Any] = list(ast.walk(self.tree))
        self.own = name.removeprefix(f"{PACKAGE}/")
        self.part = self.own.removesuffix(".py").partition("/")[0]

    @cached_property
    def imports(self) -> list[Found]:
        """Lines and full dotted names; `from a import b` gives `a.b`, a module or a name."""
        found: list[Found] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = self.name.split("/")[: -node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        return found

    @property
    def own_imports(self) -> list[Found]:
        """Lines and names below the package."""
        start = f"{PACKAGE}."
        return [(n, name.removeprefix(start)) for n, name in self.imports if start in name]


# --- The package: arrows, and who touches other packages. ---


def wrong_arrows(source: Source) -> Iterator[Found]:
    """Yields imports that lead up."""
    if source.part not in {*ORDER, "__init__"}:
        yield 1, f"'{source.part}' is no stage of ORDER in .ci/rules.py"
    for line, name in source.own_imports:
        part = name.partition(".")[0]
        known = part in ORDER and source.part in ORDER  # no name of the package itself
        if known and ORDER.index(part) > ORDER.index(source.part):
            yield line, f"'{source.part}' may not import '{name}'"


def imported_patches(source: Source) -> Iterator[Found]:
    """Yields imports of the tables in the stages of their replacements, but for their state."""
    if source.part in {"prepare", "trainer"}:
        for line, name in source.own_imports:
            if name.startswith("patches") and name not in {
                "patches.install_for_models",
                "patches.engine.check_features",
            }:
                yield line, name


def shared_names(sources: Iterable[Source]) -> Iterator[tuple[Source, Found]]:
    """Yields classes and public functions whose name stands for another thing in another file.

    Commands are named as what they do, and `patches` as the engine's functions that users call.
    """
    first: dict[str, Source] = {}
    for source in sources:
        for node in source.tree.body:
            is_class = isinstance(node, ast.ClassDef)
            if not is_class and not isinstance(node, ast.FunctionDef):
                continue
            name = node.name.lstrip("_") if is_class else node.name
            if name.startswith("_") or source.part == "cli":
                continue
            other = first.setdefault(name, source)
            if other is not source:
                yield source, (node.lineno, f"'{name}' is another thing in {other.own}")


def wrong_libraries(source: Source) -> Iterator[Found]:
    """Yields imports of libraries that the stage may not know."""
    refused = set.union(*GLUE.values()) - GLUE.get(source.part, set())
    only = {"torch"} if source.part in TORCH_ALONE else None
    only = CHECKPOINT_ALONE if source.part == "checkpoint" else only
    for line, name in source.imports:
        library = name.partition(".")[0]
        known = only is None or library in {*only, PACKAGE, *sys.stdlib_module_names}
        if library in refused or not known:
            yield line, f"'{source.part}' may not import '{library}'"
        if "torch.distributed.fsdp._fully_shard." in f"{name}.":
            yield line, f"'{name}' is private and moving: use torch.distributed.fsdp"


def foreign_assignments(source: Source) -> Iterator[Found]:
    """Yields every `a.b = x`, `del a.b` and `setattr(a, ...)` where `a` is another package's."""
    if source.own.startswith(REPLACING):
        return
    own = {PACKAGE, *sys.stdlib_module_names}
    foreign = set()
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            for alias in node.names:
                origin = getattr(node, "module", None) or alias.name
                if origin.partition(".")[0] not in own:
                    foreign.add((alias.asname or alias.name).partition(".")[0])
    for node in source.nodes:
        target = None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target = node
        elif isinstance(node, ast.Call) and _root_name(node.func) in {"delattr", "setattr"}:
            target = node.args[0]
        if target is not None and _root_name(target) in foreign:
            yield node.lineno, f"'{ast.unparse(target)}' belongs to another package"


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def caught_asserts(source: Source) -> Iterator[Found]:
    """Yields handlers of AssertionError: `python -O` drops the asserts that they wait for."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = ast.unparse(node.type)
            if "AssertionError" in caught:
                yield node.lineno, f"'{caught}' is caught, and python -O raises none"


def private_members(source: Source) -> Iterator[Found]:
    """Yields private members of torch outside of their room."""
    if source.own.startswith(ROOM):
        return
    known = _own_names(source) | ANYWHERE | NOT_TORCHS
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            private = _is_private(node.attr) and node.attr not in known
            names = [node.attr] * (private or node.attr in WITHOUT_UNDERSCORE)
        elif isinstance(node, ast.Call):
            texts = _texts(node)
            names = [name for name in texts if _is_private(name) and name not in known]
            names += filter(_is_private_module, texts)
        yield from ((node.lineno, name) for name in names)
    yield from (found for found in source.imports if _is_private_module(found[1]))


def _own_names(source: Source) -> set[str]:
    """Returns attributes that the file itself defines: methods, fields, what it sets on `self`."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(inner.name)
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    found.add(inner.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update({node.attr} if ast.unparse(node.value) == "self" else ())
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private_module(name: str) -> bool:
    first, *others = name.split(".")
    return first == "torch" and any(map(_is_private, others))


def _texts(call: ast.Call) -> list[str]:
    """Returns the strings that `getattr` and its kind, or `import_module`, are given."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in {"attrgetter", "delattr", "getattr", "hasattr", "import_module", "setattr"}:
        return []
    return [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def vague_docstrings(source: Source) -> Iterator[Found]:
    """Yields docstrings that say neither what is done nor what something is."""
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = str(node.value.value).lstrip()
            if text.startswith(("What ", "Stands in ")):
                yield node.lineno, text.partition("\n")[0]


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Returns modules that import themselves by way of others, also inside functions."""
    found: list[str] = []
    for start in imports:
        seen: set[str] = set()
        open_ends = [*imports[start]]
        while open_ends:
            if (name := open_ends.pop()) not in seen:
                seen.add(name)
                open_ends += imports.get(name, ())
        found += [start] if start in seen else []
    return found


def module_imports(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Returns the modules of the package that each module imports; packages are left out."""
    modules = {s.own.removesuffix(".py").replace("/", "."): s for s in sources}
    modules = {name: source for name, source in modules.items() if "__init__" not in name}
    return {
        name: {m for _, full in source.own_imports for m in (full, full.rpartition(".")[0])}
        & modules.keys()
        for name, source in modules.items()
    }


# --- All Python of the repository, and the tests. ---


def paths_outside(source: Source) -> Iterator[Found]:
    """Yields paths worked out from `__file__` that leave the repository.

    A clone in an empty folder has all that tests need. Names and imports of names are followed.
    """
    file = ROOT / source.name
    names = _paths_named(source)
    for node in source.nodes:
        found = _place(node, file, names)
        if found and not found.is_relative_to(ROOT):
            yield node.lineno, f"'{ast.unparse(node)}' is outside of the repository"


def _place(node: ast.AST, file: Path, names: dict[str, Path]) -> Path | None:
    """Returns the path that an expression stands for, as far as the source shows it."""
    match node:
        case ast.Call(ast.Name("Path"), [ast.Name("__file__")]):
            return file
        case ast.Name(name):
            return names.get(name)
        case ast.Call(ast.Attribute(base, "resolve" | "absolute")):
            return _place(base, file, names)
        case ast.Attribute(base, "parent"):
            found = _place(base, file, names)
            return found and found.parent
        case ast.Subscript(ast.Attribute(base, "parents"), ast.Constant(int(number))):
            found = _place(base, file, names)
            return found and found.parents[number]
        case ast.BinOp(base, ast.Div(), part):
            found = _place(base, file, names)
            # A part that is computed counts as the name of one file or folder.
            added = str(part.value) if isinstance(part, ast.Constant) else "one"
            return found and Path(os.path.normpath(found / added))
    return None


@cache
def _paths_named(source: Source) -> dict[str, Path]:
    """Returns names of a module that are paths: its own and those it imports from ours."""
    names: dict[str, Path] = {}
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            file = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            theirs = _paths_named(read(file)) if file.exists() else {}
            names |= {a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = _place(node.value, ROOT / source.name, names)
            if found:
                names[node.targets[0].id] = found
    return names


@cache
def read(file: Path) -> Source:
    """Returns a file of the repository, which is parsed once."""
    return Source(file.relative_to(ROOT).as_posix(), file.read_text())


# --- Lengths: questions that a reviewer asks. ---


def statements(source: Source) -> int:
    """Counts statements. Docstrings, of fields too, are none."""
    count = 0
    for node in source.nodes:
        match node:
            case ast.Expr(ast.Constant(str())):
                pass
            case ast.stmt():
                count += 1
    return count


def lengths(source: Source, file: int = 500, function: int = 60) -> Iterator[Found]:
    """Yields files and functions with more lines; docstrings of functions are left out."""
    count = source.text.count("\n")
    if count > file:
        yield 1, f"{count} lines"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count, first = node.end_lineno - node.lineno + 1, node.body[0]  # type: ignore[operator]
            if ast.get_docstring(node):
                count -= first.end_lineno - first.lineno + 1  # type: ignore[operator]
            if count > function:
                yield node.lineno, f"'{node.name}' has {count} lines"
