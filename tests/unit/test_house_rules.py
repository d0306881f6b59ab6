"""House rules of `.ci/rules.py` and `.ci/prose.py`: each finds a bad example, and passes a good."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[2] / ".ci"
sys.path.insert(0, str(CI))
try:
    import prose
    import rules
    import rules_code as code
    import rules_pages as pages
finally:
    sys.path.remove(str(CI))

README = CI.parent / "README.md"
WORDS = (CI / "words.txt").read_text()

# Check, file in the package, a source with an offender and a source without.
CODE: dict[str, tuple[Any, str, str, str | None]] = {
    "arrow": (
        code.wrong_arrows,
        "plan/x.py",
        "def f():\n    from composer_fsdp2.shard import apply",
        "from composer_fsdp2 import PlanError\nfrom composer_fsdp2.errors import PlanError\n"
        "from composer_fsdp2.plan.rules import a\nfrom composer_fsdp2.torch_private import b",
    ),
    "relative arrow": (
        code.wrong_arrows,
        "plan/x.py",
        "from ..shard.apply import f",
        "from .rules import f",
    ),
    "stage": (code.wrong_arrows, "utils/x.py", "", None),
    "room": (
        code.wrong_arrows,
        "torch_private/x.py",
        "from composer_fsdp2.config import schema",
        "from composer_fsdp2.errors import PatchError",
    ),
    "patches": (
        code.imported_patches,
        "trainer/x.py",
        "import composer_fsdp2.patches.core",
        "import composer_fsdp2.trainer.checkpoint.load",
    ),
    "glue": (code.wrong_libraries, "trainer/x.py", "import llmfoundry.x", "import composer"),
    "torch alone": (code.wrong_libraries, "plan/x.py", "import yaml", "import torch.nn, json"),
    "checkpoint": (code.wrong_libraries, "checkpoint/x.py", "import rich", "import safetensors"),
    "private fsdp": (
        code.wrong_libraries,
        "torch_private/x.py",
        "from torch.distributed.fsdp import _fully_shard",
        "from torch.distributed.fsdp import FSDPModule",
    ),
    "assignment": (
        code.foreign_assignments,
        "shard/x.py",
        "import torch.nn as n\nn.Linear.forward = None",
        "import json, torch\njson.x = torch.nn\nself.torch = 1",
    ),
    "setattr": (
        code.foreign_assignments,
        "shard/x.py",
        "from torch import nn\nsetattr(nn.Linear, 'forward', None)",
        "from torch import nn\nsetattr(own, 'forward', nn)",
    ),
    "assert": (
        code.caught_asserts,
        "plan/x.py",
        "try:\n    f()\nexcept (AssertionError, ValueError): ...",
        "try:\n    f()\nexcept ValueError: ...",
    ),
    "docstring": (
        code.vague_docstrings,
        "plan/x.py",
        '"""Number of ranks."""\nx = 1\n"""What it is."""',
        '"""Returns the number."""',
    ),
    "outside": (
        code.paths_outside,
        "plan/x.py",
        'X = Path(__file__).resolve().parents[3] / "fixtures"',
        'X = Path(__file__).parents[2] / "docs"',
    ),
    "outside by a name": (
        code.paths_outside,
        "plan/x.py",
        "from tests.support.data_folder import ROOT as R\nX = R.parent",
        "from tests.support.data_folder import ROOT as R\nX = R / 'docs'",
    ),
    "outside by dots": (
        code.paths_outside,
        "plan/x.py",
        'HERE = Path(__file__).parent\nX = HERE / "../../../x"',
        'HERE = Path(__file__).parent\nX = HERE / ".."',
    ),
    "length": (
        lambda source: code.lengths(source, function=2),
        "plan/x.py",
        "def f():\n    a = 1\n    return a",
        'def f():\n    """One\n    two."""\n    return a',
    ),
    "marker": (
        lambda source: rules.unknown_markers(source, {"slow"}),
        "x.py",
        "@pytest.mark.slw\ndef test(): ...",
        "@pytest.mark.slow\ndef test(): ...",
    ),
}


def test_rules_about_code_find_the_offender_alone():
    for rule, (check, file, bad, good) in CODE.items():
        assert list(check(code.Source(f"composer_fsdp2/{file}", bad))), rule
        found = [] if good is None else list(check(code.Source(f"composer_fsdp2/{file}", good)))
        assert not found, rule


@pytest.mark.parametrize(
    ("line", "found"),
    {
        "attribute": ("unit._get_fsdp_state()", "_get_fsdp_state"),
        "assigned": ("group._with_fqn = hear", "_with_fqn"),
        "text": ("getattr(param, '_unsharded_param', None)", "_unsharded_param"),
        "of C": ("torch._C.thing()", "_C"),
        "import": ("import torch._dynamo", "torch._dynamo"),
        "name": ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        "imported late": ("import_module('torch._inductor')", "torch._inductor"),
        "without underscore": ("group.post_backward = around", "post_backward"),
    }.values(),
)
def test_a_private_member_is_found(line: str, found: str):
    source = code.Source("composer_fsdp2/shard/x.py", f"import torch\n{line}\n")
    assert list(code.private_members(source)) == [(2, found)]
    room = code.Source("composer_fsdp2/torch_private/x.py", source.text)
    assert not list(code.private_members(room))


def test_members_of_ours_or_of_everybody_are_not_private():
    good = """
class Watch:
    _count: int

    def __init__(self, other):
        self._seen = other._count + other._seen
        self._look(other.__class__, other._version)

    def _look(self, kind, module):
        return module._parameters, getattr(kind, "name"), trainer._original_model
"""
    assert not list(code.private_members(code.Source("composer_fsdp2/shard/x.py", good)))


def test_a_circle_is_found():
    assert code.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    texts = {"plan/a.py": "from . import b", "plan/b.py": "from composer_fsdp2.plan.a import f"}
    sources = [code.Source(f"composer_fsdp2/{name}", text) for name, text in texts.items()]
    assert code.module_imports(sources) == {"plan.a": {"plan.b"}, "plan.b": {"plan.a"}}


def test_a_long_table_is_found():
    long = [f"tests/unit/x.py::test_a[{n}::{n}]" for n in range(13)]
    short = [f"tests/unit/x.py::test_b[{n}]" for n in range(12)]
    ((test, text),) = rules.long_tables([*long, *short])
    assert test == "tests/unit/x.py::test_a"
    assert text.startswith("13 rows")


def test_a_row_that_a_table_has_not_is_found():
    tests = ["x.py::test_a[1]", "x.py::test_a[b[0]]"]
    assert list(rules.unknown_rows(tests, {"x.py::test_a": {"1", "b[0]"}})) == []
    ((test, text),) = rules.unknown_rows(tests, {"x.py::test_a": {"1", "2"}})
    assert test == "x.py::test_a"
    assert "names '2'" in text


def test_markers_are_read():
    declared = rules.declared_markers('x\nmarkers = [\n  "slow: long",\n  "world(n): x",\n]\n"y"')
    assert declared == {"slow", "world", *rules.BUILT_IN}


# --- Pages: check, a text with an offender and a text without. ---

PAGES: dict[str, tuple[Any, str, str]] = {
    "link": (
        lambda text: pages.broken_links(README, text),
        "[a\nb](nowhere.md)",
        "[a](docs/index.md) `[b](nowhere.md)`",
    ),
    "heading": (
        lambda text: pages.broken_links(README, text),
        "[a](docs/index.md#nowhere)",
        "[a](https://example.org/nowhere.md)",
    ),
    "page": (pages.missing_pages, "see docs/nowhere.md", "see docs/index.md"),
    "file": (pages.missing_files, "`tests/nowhere.py`", "`tests/conftest.py`"),
    "test": (
        pages.missing_files,
        "`tests/unit/test_public_api.py::test_nowhere`",
        "`tests/unit/test_public_api.py::test_the_public_names`",
    ),
    "language": (pages.wrong_form, "```c\nx\n```", "```bash\n# x\n```"),
    "wide": (pages.wide_commands, "```bash\n" + 91 * "x" + "\n```", 91 * "x"),
    "above": (pages.paths_above, "cp -r ../other/x .", "docs_dir: ../docs"),
}


def test_rules_about_pages_find_the_offender_alone():
    for rule, (check, bad, good) in PAGES.items():
        found = [line for line, _ in check(f"# Title\n\n{bad}\n")]
        assert found == [3 + bad.startswith("```bash")], rule
        assert not list(check(f"# Title\n\n{good}\n")), rule


def test_a_second_title_is_found():
    assert list(pages.wrong_form("# One\n\n# Two\n"))


def test_a_stale_line_is_found():
    assert rules.stale_line("a\nb\n", "a\nc\n") == 2
    assert rules.stale_line("a\n", "a\nb\n") == 1
    assert rules.stale_line("a\n", "a\n") == 0


def test_missing_sections_of_a_public_docstring_are_found():
    def apply_plan(model: object, plan: object) -> int: ...

    text = "Does it.\n\nArgs:\n    model: whole.\n\nRaises:\n    PlanError: never."
    lacks = ["argument plan", "Collective: yes or no", "Returns", "Example", "Source"]
    assert rules.missing_sections(apply_plan, text) == lacks


# --- Prose. ---


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A warning.\n\nThe loss is told of in it.", 3),
        ("A block that Stands\nin for another.", 1),
        ("Composer has `x`,\nFSDP2 has not.", 2),
    ],
)
def test_a_phrase_is_found_with_its_line(text: str, line: int):
    found = prose.find_phrases(text, prose.read_phrases(WORDS, by_hand=True))
    assert [one.line for one in found] == [line]


def test_code_comments_and_parts_of_words_are_not_read():
    text = "retold offers, `echo told of`\n```\ntold of\n```\n<!-- told of -->"
    assert not list(prose.find_phrases(prose.without_code(text), prose.read_phrases(WORDS)))


def test_blanks_keep_the_lines_and_their_places():
    text = "a\n```python\nb\n\nc = 1\n```\nd `e\nf` g"
    blank = prose.without_code(text)
    assert [len(line) for line in blank.split("\n")] == [len(line) for line in text.split("\n")]
    assert blank.endswith("d --\n-- g")


def test_a_name_stands_for_one_thing():
    def offenders(*texts: str) -> list[str]:
        sources = [code.Source(f"composer_fsdp2/plan/{n}.py", text) for n, text in enumerate(texts)]
        return [said for _, (_, said) in code.shared_names(sources)]

    assert offenders("class _Run: ...", "class Run: ...") == ["'Run' is another thing in plan/0.py"]
    assert offenders("def run(): ...", "def run(): ...") == ["'run' is another thing in plan/0.py"]
    assert offenders("def _run(): ...", "def _run(): ...\nclass Run: ...") == []
