"""Collects the origin of the names in a Python file, without importing anything.

[Note: one file, one scope] Names are collected for the whole file. A name that is imported and
bound to something else as well, in whatever function, is not certain. The values that names hold
are followed through one assignment and no further; reads of shards that are missed raise
`ShardReadError` in the run.
"""

from __future__ import annotations

import ast
import re

from composer_fsdp2.tools.migrate.python_code.row import Found
from composer_fsdp2.tools.migrate.python_code.table import CODE_ROWS

__all__ = ["CONFIG_CALLEES", "CONFIG_NAMES", "Names", "dotted", "last_name"]

_CLASSES = frozenset(home for row in CODE_ROWS if row.found is Found.MEMBER for home in row.homes)
_KEY_ROWS = [row for row in CODE_ROWS if row.found is Found.KEY]
CONFIG_CALLEES = frozenset(home for row in _KEY_ROWS for home in row.homes)
"""functions that take a configuration whose keys are looked at"""
CONFIG_NAMES = frozenset(name for row in _KEY_ROWS for name in row.owners)
"""arguments that hold such a configuration"""

_COLLECTIONS = ("parameters", "named_parameters", "state_dict", "get_model_state_dict")
_TENSORS = ("grad", "weight", "bias")
_OTHER_STATE = re.compile("sched|scaler|sampler|loader|timestamp|metric", re.IGNORECASE)
_WHOLE_OR_LOCAL = {
    *("full_tensor", "to_local", "numel", "nelement", "size", "shape", "dim", "ndim", "dtype"),
    *("device", "stride", "layout", "names", "keys", "element_size", "data_ptr", "requires_grad"),
    *("type", "get_device", "placements", "device_mesh", "itemsize", "nbytes", "backward"),
}
"""attributes of a shard that can be read"""


def dotted(node: ast.AST) -> str:
    """Returns `a.b.c` as text, or an empty text for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """Returns the name after the last dot, or an empty text."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class Names:
    """Holds the origins of a file's names."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, list[str]] = {}
        self.aliases: dict[str, list[str]] = {}
        self.bound: set[str] = set()
        """names that something else than an import or alias is bound to"""
        self.wildcards: list[str] = []
        self.modules: dict[str, bool] = {}
        """expressions that hold FSDP1 modules; False where `isinstance` asks whether they do"""
        self.configs: set[str] = set()
        """expressions that a Trainer takes its configuration from"""
        self.shards: set[str] = set()
        """names of parameters, gradients and state dicts"""
        self.tests: set[ast.AST] = set()
        """parts of conditions"""
        self._meanings: dict[str, dict[str, bool]] = {}
        nodes = list(ast.walk(tree))
        self._read_bindings(nodes)
        for node in nodes:
            self._read_objects(node)
            self._read_shards(node)
        self.configs.discard("")
        self.modules.pop("", None)

    def meanings(self, node: ast.AST) -> dict[str, bool]:
        """Returns the full names that an expression may stand for, and whether that is certain."""
        text = dotted(node)
        if text in self._meanings:
            return self._meanings[text]
        found = self._meanings[text] = {}
        left, seen = [(text, True)], set[str]()
        while left:
            name, certain = left.pop()
            head, dot, rest = name.partition(".")
            certain = certain and head not in self.bound
            found |= {f"{full}{dot}{rest}": certain for full in self.imported.get(head, ())}
            if head not in seen:
                left += [(f"{other}{dot}{rest}", certain) for other in self.aliases.get(head, ())]
            seen.add(head)
            if head not in self.imported and head not in self.aliases and head not in self.bound:
                found |= {f"{module}.{name}": False for module in self.wildcards}
        return found

    def holds_shards(self, node: ast.AST) -> bool:
        """Returns whether an expression is made of parameters, gradients or a state dict."""
        found = False
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and part.attr in _WHOLE_OR_LOCAL:
                return False
            found |= isinstance(part, ast.Attribute) and part.attr in _TENSORS
            found |= isinstance(part, ast.Name) and part.id in self.shards
            found |= _is_collection(part)
        return found

    def _read_bindings(self, nodes: list[ast.AST]) -> None:
        """Reads imports, aliases and all other bindings."""
        passed_over: set[ast.AST] = set()
        for node in nodes:
            match node:
                case ast.Import():
                    for alias in node.names:
                        first = alias.name.partition(".")[0]
                        full = alias.name if alias.asname else first
                        self.imported.setdefault(alias.asname or first, []).append(full)
                case ast.ImportFrom():
                    module = "." * node.level + (node.module or "")
                    self.wildcards += [module for alias in node.names if alias.name == "*"]
                    for alias in node.names:
                        full = f"{module}.{alias.name}"
                        self.imported.setdefault(alias.asname or alias.name, []).append(full)
                case ast.Assign(targets=[ast.Name() as target], value=ast.Name() | ast.Attribute()):
                    self.aliases.setdefault(target.id, []).append(dotted(node.value))
                    passed_over.add(target)
                case ast.Assign(targets=[ast.Name() as target], value=ast.Constant(value=None)):
                    passed_over.add(target)  # `FSDP = None` where an import failed
                case ast.Name(ctx=ast.Store()) if node not in passed_over:
                    self.bound.add(node.id)
                case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self.bound.add(name)
                case _:
                    pass

    def _read_objects(self, node: ast.AST) -> None:
        """Reads which expressions hold FSDP1 modules and configurations of a Trainer."""
        match node:
            case ast.Assign(value=ast.Call(func=called)) if self._is_class(called):
                self.modules |= dict.fromkeys(map(dotted, node.targets), True)
            case ast.AnnAssign() if self._is_class(node.annotation):
                self.modules[dotted(node.target)] = True
            case ast.arg() if node.annotation and self._is_class(node.annotation):
                self.modules[node.arg] = True
            case ast.Call(func=ast.Name(id="isinstance"), args=[asked, class_]):
                if self._is_class(class_):
                    self.modules.setdefault(dotted(asked), False)
            case ast.Call() if CONFIG_CALLEES & self.meanings(node.func).keys():
                given = [k.value for k in node.keywords if k.arg in CONFIG_NAMES]
                self.configs.update(map(dotted, given))
            case _:
                pass

    def _read_shards(self, node: ast.AST) -> None:
        """Reads which names hold parameters; a call may return anything for those it is given."""
        match node:
            case ast.For() | ast.comprehension() if self.holds_shards(node.iter):
                names = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)]
                self.shards.update(names[-1:])  # of a name and its parameter the second
            case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
                value = node.value
                own = value.func if isinstance(value, ast.Call) else value
                if _is_collection(value) or self.holds_shards(own):
                    self.shards.add(dotted(target))
            case ast.If() | ast.While() | ast.Assert() | ast.IfExp():
                self.tests.update(ast.walk(node.test))
            case _:
                pass

    def _is_class(self, node: ast.AST) -> bool:
        return bool(_CLASSES & self.meanings(node).keys())


def _is_collection(node: ast.AST) -> bool:
    """Returns whether an expression calls for all parameters or a state dict of them."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in _COLLECTIONS:
        return False
    return not _OTHER_STATE.search(ast.unparse(node.func))
