"""Checks the house rules, and lists every offender as `FILE:LINE: rule: text`.

    python .ci/rules.py source   # arrows, private members, links and the like; Python alone
    python .ci/rules.py made     # pages that are made from code, public docstrings; the package
    python .ci/rules.py tables   # long tables in the tests that run by default; the package
    python .ci/rules.py          # the first two
    python .ci/rules.py size     # statements of the package, by folder; docstrings are not counted

Lengths of files and functions are questions: notes, which do not fail. prose.py checks phrases.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import prose
import rules_code as code
import rules_pages as pages
from rules_code import PACKAGE, ROOT, Found, Source, read

NEVER_RAISES = {"apply_activation", "uninstall"}
WITH_SOURCE = {
    *("FSDP2Monitor", "apply_activation", "apply_plan", "clip_grad_norm_", "prepare_fully_shard"),
    *("summon_full_params", "tied_groups"),
}
"""Public names with a formula, or a behaviour that is torch's or Composer's."""

TIERS = {"accelerator", "data", "dist", "e2e", "fake", "gpu", "matrix", "support", "unit"}
"""Folders of tests/ that a run of the tests selects, and those without tests."""
BUILT_IN = {"filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"}
MOST_ROWS = 12
"""Rows of a test that run by default; the others are of the matrix."""

MADE = (
    ("docs/architecture.md", "tests.support.folders_table"),
    ("docs/how-it-works.md", "tests.support.transformations_list"),
    ("docs/odd-models.md", "tests.support.odd_models_page"),
    ("docs/reference/api.md", "tests.support.api_page"),
    ("docs/reference/callbacks.md", "tests.support.extension_table"),
    ("docs/reference/command-line.md", "tests.support.command_line_page"),
    ("docs/reference/errors.md", "tests.support.run_mistakes_page"),
    ("docs/reference/errors.md", "tests.support.settings_mistakes"),
    ("docs/reference/migration-keys.md", "tests.support.migration_tables"),
    ("docs/reference/settings.md", "tests.support.settings_page"),
    ("docs/reference/tensor-parallel-with.md", "tests.support.tensor_pairs"),
    ("docs/reference/upstream-points.md", "tests.support.upstream_page"),
    ("docs/reference/versions.md", "tests.support.versions_page"),
    ("README.md", "tests.support.supported_table"),
)
"""Pages with text that is made from code, and the module whose `page` makes it."""


def unknown_markers(source: Source, declared: set[str]) -> Iterator[Found]:
    """Yields markers of tests that pyproject.toml does not declare."""
    for node in source.nodes:
        match node:
            case ast.Attribute(ast.Attribute(ast.Name("pytest"), "mark"), name):
                if name not in declared:
                    yield node.lineno, f"marker '{name}' is not declared in pyproject.toml"


def declared_markers(pyproject: str) -> set[str]:
    """Returns the markers that tests may have."""
    block = pyproject.partition("\nmarkers = [\n")[2].partition("\n]\n")[0]
    return {*re.findall(r'^ *"(\w+)', block, re.MULTILINE), *BUILT_IN}


def long_tables(tests: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields functions with more rows than `MOST_ROWS`, from the names of tests."""
    for test, count in Counter(test.partition("[")[0] for test in tests).most_common():
        if count > MOST_ROWS:
            yield test, f"{count} rows; name {MOST_ROWS} at most in @pytest.mark.table"


def unknown_rows(tests: Iterable[str], named: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yields functions whose `table` mark, in `named`, has a row that is none of theirs."""
    rows = defaultdict[str, set[str]](set)
    for test in tests:
        function, _, row = test.partition("[")
        rows[function].add(row.removesuffix("]"))
    for function, names in named.items():
        for name in sorted(names - rows[function]):
            yield function, f"@pytest.mark.table names {name!r}, which is no row of it"


# --- What needs the package. ---


def stale_line(shown: str, made: str) -> int:
    """Returns the first line in which two texts differ; 0 if none does."""
    if shown == made:
        return 0
    lines, others = shown.splitlines(), made.splitlines()
    same = (a == b for a, b in zip(lines, others, strict=False))
    return next((n for n, equal in enumerate(same, 1) if not equal), min(len(lines), len(others)))


def missing_sections(function: Callable[..., Any], text: str) -> list[str]:
    """Returns what the docstring of a public function lacks."""
    parts = re.split(r"^(Args|Returns|Yields|Raises|Source|Example):", text, flags=re.MULTILINE)
    found, name = dict(zip(parts[1::2], parts[2::2], strict=True)), function.__name__
    signature = inspect.signature(function)
    described = {*re.findall(r"^ {4}(\w+):", found.get("Args", ""), re.MULTILINE)}
    lacks = [f"argument {param}" for param in signature.parameters if param not in described]
    if not re.search(r"\bCollective: (yes|no)\b", text):
        lacks.append("Collective: yes or no")
    nothing = signature.return_annotation in (None, "None")
    if not nothing and not found.keys() & {"Returns", "Yields"}:
        lacks.append("Returns")
    if "Raises" not in found and name not in NEVER_RAISES:
        lacks.append("Raises")
    if ">>> " not in found.get("Example", ""):
        lacks.append("Example")
    if name in WITH_SOURCE and "https://" not in found.get("Source", ""):
        lacks.append("Source")
    return lacks


def public_docstrings() -> Iterator[str]:
    """Yields public names whose docstring lacks a section; errors need no example."""
    package = importlib.import_module(PACKAGE)
    for name in package.__all__:
        value = getattr(package, name)
        text = inspect.getdoc(value) or ""
        if inspect.isfunction(value):
            lacks = missing_sections(value, text)
        else:
            needed = "" if name.endswith("Error") or name.startswith("__") else ">>> "
            lacks = [] if needed in text else ["Example"]
        if lacks:
            line = inspect.getsourcelines(value)[1]
            file = Path(inspect.getfile(value)).relative_to(ROOT)
            yield f"{file}:{line}: public docstring: '{name}' lacks {', '.join(lacks)}"


def wrong_links_to_torch(sources: Iterable[Source], torch: Path) -> Iterator[str]:
    """Yields links to a line of a file that the installed torch, the links' version, lacks."""
    link = re.compile(r"pytorch/pytorch/blob/v[\d.]+/(torch/\S+?\.py)(?:#L(\d+))?")
    for source in sources:
        for number, match in pages.find(link, source.text):
            file = torch / match[1]
            lines = file.read_text().count("\n") + 1 if file.exists() else 0
            if int(match[2] or 1) > lines:
                yield f"{source.name}:{number}: link to torch: {match[1]} has {lines} lines"


# --- The runs. ---


def _sources(*folders: str) -> list[Source]:
    return [read(file) for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


PACKAGE_RULES = {
    "arrow": code.wrong_arrows,
    "patches": code.imported_patches,
    "library": code.wrong_libraries,
    "assignment": code.foreign_assignments,
    "assert": code.caught_asserts,
    "private member": code.private_members,
    "docstring": code.vague_docstrings,
}


def check_source() -> Iterator[str]:
    """Yields offenders against the rules about text."""
    package = _sources(PACKAGE)
    for rule, check in PACKAGE_RULES.items():
        for source in package:
            yield from (f"{source.name}:{n}: {rule}: {text}" for n, text in check(source))
    for source, (n, text) in code.shared_names(package):
        yield f"{source.name}:{n}: name: {text}"
    for name in code.circles(code.module_imports(package)):
        yield f"{PACKAGE}/{name.replace('.', '/')}.py:1: circle: imports itself by way of others"
    for source in _sources("tests", "benchmarks", PACKAGE, "yamls"):
        yield from (f"{source.name}:{n}: outside: {text}" for n, text in code.paths_outside(source))
    declared = declared_markers((ROOT / "pyproject.toml").read_text())
    for source in _sources("tests"):
        found = unknown_markers(source, declared)
        yield from (f"{source.name}:{n}: marker: {text}" for n, text in found)
    for file in sorted((ROOT / "tests").glob("*/*.py")):
        if file.parent.name not in TIERS:
            yield f"tests/{file.parent.name}/{file.name}:1: tier: no run selects this folder"
    yield from _check_files()


def _check_files() -> Iterator[str]:
    names = {file: file.relative_to(ROOT).as_posix() for file in prose.pages()}
    for file, name in names.items():
        text = file.read_text()
        yield from (f"{name}:{n}: link: {link}" for n, link in pages.broken_links(file, text))
        if not name.startswith(("CHANGELOG", ".github/")):
            yield from (f"{name}:{n}: missing: {found}" for n, found in pages.missing_files(text))
            yield from (f"{name}:{n}: form: {found}" for n, found in pages.wrong_form(text))
        if name in {"README.md", "MIGRATION.md"}:
            yield from (f"{name}:{n}: wide: {found}" for n, found in pages.wide_commands(text))
    for kind in ("composer_fsdp2/**/*.py", "yamls/**/*.py", "yamls/**/*.yaml"):
        for file in sorted(ROOT.glob(kind)):
            found = pages.missing_pages(file.read_text())
            yield from (f"{file.relative_to(ROOT)}:{n}: missing: {page}" for n, page in found)
    for kind in (".ci/*", "tests/data/**/*.yaml", "yamls/**/*.yaml", "pyproject.toml"):
        for file in sorted(file for file in ROOT.glob(kind) if file.is_file()):
            found = pages.paths_above(file.read_text()) if file.suffix != ".py" else ()
            yield from (f"{file.relative_to(ROOT)}:{n}: outside: {path}" for n, path in found)
    ignored = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "tests/data"]
    for file in _run(ignored).splitlines():
        if "__pycache__" not in file:
            yield f"{file}:1: ignored: a clone would not have this file"


def check_made() -> Iterator[str]:
    """Yields pages that are not what the code makes, and public names that say too little."""
    for page, name in MADE:
        module, shown = importlib.import_module(name), (ROOT / page).read_text()
        if line := stale_line(shown, module.page()):
            yield f"{page}:{line}: stale: `python -m {name}` writes the page"
        if hasattr(module, "MARK") and not module.MARK.search(shown):
            yield f"{page}:1: stale: {module.MARK.pattern} is gone"
    yield from public_docstrings()
    torch = importlib.import_module("torch")
    if torch.__version__.startswith("2.7.0"):
        yield from wrong_links_to_torch(_sources(PACKAGE), Path(torch.__file__).parents[1])


class _Collected:
    """A plugin of pytest that keeps all tests, before options choose among them."""

    items: Sequence[Any] = ()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.items = [*items]


def check_tables() -> Iterator[str]:
    """Yields tests with too many rows in the default tier, and names of rows that there are not."""
    pytest, tiers = (importlib.import_module(name) for name in ("pytest", "tests.support.tiers"))
    found = _Collected()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(["--collect-only", "-q"], plugins=[found])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest cannot collect the tests:\n{printed.getvalue()[-2000:]}")
    named = {}
    for item in found.items:
        if (mark := item.get_closest_marker("table")) is not None:
            named[item.nodeid.partition("[")[0]] = set(mark.args)
    default = [item.nodeid for item in found.items if tiers.in_default_tier(item)]
    for test, text in (
        *long_tables(default),
        *unknown_rows([item.nodeid for item in found.items], named),
    ):
        yield f"{test}: table: {text}"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, check=False, cwd=ROOT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return done.stdout


def show_size() -> None:
    """Prints statements and files of each folder, and of the package."""
    statements, files = Counter[str](), Counter[str]()
    for source in _sources(PACKAGE):
        folder = source.name.split("/", 2)[1] if source.name.count("/") > 1 else "."
        statements[folder] += code.statements(source)
        files[folder] += 1
    for folder, count in [*statements.items(), ("all", statements.total())]:
        print(f"{folder:12} {count:6} statements {files[folder] or files.total():4} files")


def main(names: list[str]) -> int:
    """Prints notes and offenders; returns 1 if there are offenders."""
    if names == ["size"]:
        show_size()
        return 0
    checks = {"source": check_source, "made": check_made, "tables": check_tables}
    sys.path[0] = str(ROOT)
    count = 0
    for name in names or ["source", "made"]:
        for offender in checks[name]():
            count += 1
            print(offender)
    for source in _sources(PACKAGE) if "tables" not in names else ():
        for line, text in code.lengths(source):
            print(f"note: {source.name}:{line}: {text}")
    print(f"{count} offenders")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
