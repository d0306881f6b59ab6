"""Places in a Python file that read numbers out of parameters, gradients or state dicts.

Under FSDP2 these are shards: reading raises, see [Note: numbers of shards]. What an expression
holds is followed from `parameters()`, `state_dict()` and `.grad` through assignments, loops and
torch's functions, in the order of the file. Whether the model is sharded cannot be seen, so every
place is a 'perhaps'.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from enum import Enum

from composer_fsdp2.tools.migrate.python_code.known import last_name
from composer_fsdp2.tools.migrate.python_code.names import dotted
from composer_fsdp2.tools.migrate.python_code.row import CodeRow, Found, Kind
from composer_fsdp2.tools.migrate.python_code.source import Source, Unreadable
from composer_fsdp2.tools.migrate.python_code.uses import Use

__all__ = ["READ_ROWS", "find_reads"]


def _row(title: str, names: tuple[str, ...], use: str, reason: str) -> CodeRow:
    return CodeRow(
        title=title, found=Found.READ, names=names, kind=Kind.BY_HAND, use=use, reason=reason
    )


_NUMBER = _row(
    "number of a parameter",
    ("item", "float", "int", "bool", "complex", "any", "all"),
    "float(composer_fsdp2.full_tensor(model, name).norm()) on every rank, or read inside "
    "composer_fsdp2.summon_full_params(model)",
    "parameters, their gradients and values of state_dict() are shards: one number read out of "
    "them raises ShardReadError",
)
_VALUES = _row(
    "values of a parameter",
    ("tolist", "numpy", "asarray", "array"),
    "composer_fsdp2.full_tensor(model, name).numpy() on every rank, or read inside "
    "composer_fsdp2.summon_full_params(model)",
    "a rank holds a part of the values; param.to_local() is that part",
)
_SAVED = _row(
    "parameters saved with torch.save or pickle",
    ("save", "dump", "dumps"),
    "save_folder of the Trainer, or torch.save inside composer_fsdp2.summon_full_params(model)",
    "a shard would be written under the shape of the whole tensor; pickling one raises "
    "ShardReadError",
)
READ_ROWS: tuple[CodeRow, ...] = (_NUMBER, _VALUES, _SAVED)
"""what is found here, beside the table of uses of FSDP1"""

_WORTH_A_LOOK = re.compile(r"parameters\(|state_dict\(|\.grad\b|\.weight\b|\.bias\b")
_MANY = ("parameters", "named_parameters", "state_dict", "get_model_state_dict")
_ONE = ("grad", "weight", "bias")
_OTHER_STATE = re.compile("sched|scaler|sampler|loader|timestamp|metric", re.IGNORECASE)
_PASSED_ON = (
    *("values", "items", "copy", "list", "tuple", "dict", "filter", "zip", "enumerate"),
    *("sorted", "reversed", "iter", "chain", "pop", "get", "next"),
)
_PLAIN = {
    *("full_tensor", "to_local", "numel", "nelement", "size", "shape", "dim", "ndim", "dtype"),
    *("device", "stride", "layout", "names", "keys", "element_size", "data_ptr", "requires_grad"),
    *("type", "get_device", "item", "tolist", "numpy", "placements", "device_mesh", "itemsize"),
    *("nbytes", "storage_offset", "name", "backward", "register_hook", "grad_fn"),
}
_FOLDS = ("sum", "max", "min", "abs", "pow")
_READING = ("float", "int", "bool", "complex")


class _Holds(Enum):
    ONE = "a tensor"
    MANY = "a collection of them"


def find_reads(source: Source) -> list[Use]:
    """All places, in order. Collective: no.

    Raises:
        Unreadable: when the file is nested too deeply.
    """
    if not _WORTH_A_LOOK.search(source.text):
        return []
    reader = _Reader(source)
    try:
        reader.visit(source.tree)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    return sorted(reader.found.values(), key=lambda use: (use.line, use.column))


class _Reader(ast.NodeVisitor):
    """Follows what names hold, and notes what is read out of it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: dict[tuple[int, int], Use] = {}
        self.scopes: list[dict[str, _Holds | None]] = [{}]
        self.known: dict[ast.AST, _Holds | None] = {}
        self.whole = False

    def _report(self, row: CodeRow, node: ast.expr) -> None:
        if self.whole:
            return
        column = self.source.column(node.lineno, node.col_offset) + 1
        code = self.source.lines[node.lineno - 1].strip()
        use = Use(row, node.lineno, column, False, code)
        self.found.setdefault((node.lineno, column), use)

    # --- What an expression holds. ---

    def holds(self, node: ast.AST) -> _Holds | None:
        """Returns the value, found out once: an expression is looked at where it is evaluated."""
        if node not in self.known:
            self.known[node] = self._holds(node)
        return self.known[node]

    def _holds(self, node: ast.AST) -> _Holds | None:
        if isinstance(node, ast.Name | ast.Attribute):
            return self._of_name(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return _Holds.ONE if self.holds(node.value) else None
        if isinstance(node, ast.BinOp):
            return self._any_of((node.left, node.right), _Holds.ONE)
        if isinstance(node, ast.UnaryOp):
            return None if isinstance(node.op, ast.Not) else self.holds(node.operand)
        if isinstance(node, ast.IfExp):
            return self.holds(node.body) or self.holds(node.orelse)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._any_of(node.elts, _Holds.MANY)
        if isinstance(node, ast.Dict):
            return self._any_of(node.values, _Holds.MANY)
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            element = node.value if isinstance(node, ast.DictComp) else node.elt
            return self._within(node.generators, lambda: self._any_of([element], _Holds.MANY))
        return None

    def _any_of(self, nodes: Iterable[ast.AST], then: _Holds) -> _Holds | None:
        return then if any(self.holds(node) for node in nodes) else None

    def _of_name(self, node: ast.Name | ast.Attribute) -> _Holds | None:
        text = dotted(node)
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if not isinstance(node, ast.Attribute) or node.attr in _PLAIN:
            return None
        if node.attr in _ONE:
            return _Holds.ONE
        return _Holds.ONE if self.holds(node.value) is _Holds.ONE else None

    def _of_call(self, node: ast.Call) -> _Holds | None:
        name, callee = last_name(node.func), node.func
        owner = callee.value if isinstance(callee, ast.Attribute) else None
        if name in _MANY:
            other = owner is not None and _OTHER_STATE.search(dotted(owner) or "")
            return None if other else _Holds.MANY
        if name in _PLAIN:
            return None
        if name in _PASSED_ON:
            held = [self.holds(one) for one in [*node.args, *([owner] if owner else [])]]
            found = next((one for one in held if one), None)
            return _Holds.ONE if found and name in ("pop", "get", "next") else found
        if name in _FOLDS and owner is None:
            return self._any_of(node.args, _Holds.ONE)
        if (dotted(node.func) or "").startswith("torch."):
            return self._any_of(node.args, _Holds.ONE)
        return _Holds.ONE if owner is not None and self.holds(owner) is _Holds.ONE else None

    # --- What names are bound to. ---

    def _bind(self, target: ast.AST, held: _Holds | None, *, every: bool = False) -> None:
        """Of a pair, such as a name and its parameter, the last holds the tensor."""
        if isinstance(target, ast.Tuple | ast.List):
            for place, inner in enumerate(target.elts):
                last = place == len(target.elts) - 1
                self._bind(inner, held if every or last else None)
        elif (text := dotted(target)) is not None:
            self.scopes[0 if "." in text else -1][text] = held

    def _loop(self, target: ast.AST, over: ast.expr) -> None:
        zipped = isinstance(over, ast.Call) and last_name(over.func) == "zip"
        self._bind(target, _Holds.ONE if self.holds(over) else None, every=zipped)

    def _within(
        self, generators: list[ast.comprehension], act: Callable[[], _Holds | None]
    ) -> _Holds | None:
        self.scopes.append({})
        for generator in generators:
            self._loop(generator.target, generator.iter)
        found = act()
        self.scopes.pop()
        return found

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, self.holds(node.value), every=True)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._bind(node.target, self.holds(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self.holds(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if held := self.holds(node.value):
            self._bind(node.target, held)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._loop(node.target, node.iter)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    visit_AsyncFor = visit_For

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scopes.append({})
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = self.whole
        for item in node.items:
            called = item.context_expr
            name = last_name(called.func) if isinstance(called, ast.Call) else ""
            self.whole = self.whole or name == "summon_full_params"
        self.generic_visit(node)
        self.whole = before

    visit_AsyncWith = visit_With

    # --- What is read. ---

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self.holds(node)
        self.scopes.append({})
        for generator in node.generators:
            self.visit(generator.iter)
            self._loop(generator.target, generator.iter)
            for test in generator.ifs:
                self._test(test)
                self.visit(test)
        self.visit(node.elt)
        self.scopes.pop()

    visit_ListComp = _comprehension
    visit_SetComp = _comprehension
    visit_GeneratorExp = _comprehension

    def visit_DictComp(self, node: ast.DictComp) -> None:
        pair = ast.Tuple([node.key, node.value], ast.Load())
        self._comprehension(ast.GeneratorExp(pair, node.generators))

    def visit_Call(self, node: ast.Call) -> None:
        name, callee = last_name(node.func), dotted(node.func) or ""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        first = node.args[0] if node.args else None
        if owner is not None and name in ("item", "tolist", "numpy"):
            if self.holds(owner) is _Holds.ONE:
                self._report(_NUMBER if name == "item" else _VALUES, node)
        elif first is not None:
            held = self.holds(first)
            if callee in _READING or callee.startswith("math."):
                if held is _Holds.ONE:
                    self._report(_NUMBER, node)
            elif callee in ("np.asarray", "np.array", "numpy.asarray", "numpy.array"):
                if held:
                    self._report(_VALUES, node)
            elif callee in ("torch.save", "pickle.dump", "pickle.dumps") and held:
                self._report(_SAVED, node)
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        # Places inside f-strings are right only from Python 3.12 on; the value's own is near.
        if node.format_spec is not None and self.holds(node.value) is _Holds.ONE:
            self._report(_NUMBER, node.value)
        self.generic_visit(node)

    def _test(self, test: ast.expr) -> None:
        if isinstance(test, ast.BoolOp):
            for value in test.values:
                self._test(value)
        elif isinstance(test, ast.UnaryOp):
            self._test(test.operand)
        elif (
            isinstance(test, ast.Call)
            and last_name(test.func) in ("any", "all")
            and self.holds(test) is _Holds.ONE
        ):
            self._report(_NUMBER, test)

    def _tested(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        self._test(node.test)
        self.generic_visit(node)

    visit_If = _tested
    visit_While = _tested
    visit_IfExp = _tested
    visit_Assert = _tested
