"""What a contributor meets first: the guide, the hooks, the workflow and the forms are true."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import composer_fsdp2
from tests.support import supported_table

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MADE = ("build", ".venv")
"""beginnings of paths that a command of the guide makes"""


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL)
    return [
        "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        for indent, text in found
    ]


def words() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [word for line in lines for word in shlex.split(line)]


# --- The guide. ---


def test_every_file_a_command_names_is_there():
    files = [word for word in words() if re.fullmatch(r"[\w.-]+(/[\w.-]+)+", word)]
    assert len(files) > 10
    assert [file for file in files if not (file.startswith(MADE) or (ROOT / file).exists())] == []


def test_every_module_a_command_starts_is_there():
    modules = [after for word, after in zip(words(), words()[1:], strict=False) if word == "-m"]
    own = [module for module in modules if module.startswith(("composer_fsdp2", "tests"))]
    assert own
    assert [m for m in own if not (ROOT / f"{m.replace('.', '/')}.py").exists()] == []


def test_its_python_can_be_read():
    assert len(blocks("python")) == 3
    for block in blocks("python"):
        ast.parse(block)


def test_the_names_of_its_example_are_those_of_the_code():
    names = {
        "composer_fsdp2/prepare/plan.py": (
            "class PreparePlan:",
            "self.units = facts.units",
        ),
        "composer_fsdp2/config/schema.py": ("class FSDP2Config:", "null_or("),
        "composer_fsdp2/config/setting.py": ("def count(", "def null_or("),
        "composer_fsdp2/ranks.py": ("def raise_on_all_ranks(",),
        "tests/unit/config/test_schema.py": ("GOOD = {", "BAD = {"),
    }
    for file, expected in names.items():
        text = (ROOT / file).read_text()
        assert [name for name in expected if name not in text] == []


# --- A release. ---


def changelog_mistake(version: str, changelog: str) -> str | None:
    """Returns how the headings of the changelog disagree with the version of the package."""
    sections = re.split(r"^## (.*)$", changelog, flags=re.MULTILINE)
    first, entries, second = sections[1], sections[2].strip(), sections[3]
    is_dated = re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", second)
    if first == "Unreleased" and (".dev" in version or (is_dated and not entries)):
        return None
    expected = "what changed" if ".dev" in version else f"nothing, and '## {version} - YYYY-MM-DD'"
    return (
        f"CHANGELOG.md begins with '## {first}' and '## {second}'. For version {version} write "
        f"'## Unreleased', below it {expected}."
    )


def test_the_changelog_begins_with_the_version():
    assert changelog_mistake(composer_fsdp2.__version__, CHANGELOG) is None


@pytest.mark.parametrize(
    ("version", "beginning", "right"),
    [
        ("0.3.0.dev0", "## Unreleased\n\n- A line.\n\n## 0.2.0 - 2026-11-22", True),
        ("0.3.0", "## Unreleased\n\n## 0.3.0 - 2026-12-01", True),
        ("0.3.0.dev0", "## 0.2.0 - 2026-11-22", False),
        ("0.3.0", "## Unreleased\n\n- A line.\n\n## 0.3.0 - 2026-12-01", False),
        ("0.3.0", "## Unreleased\n\n## 0.3.0", False),
        ("0.3.0", "## Unreleased\n\n## 0.2.0 - 2026-11-22", False),
    ],
)
def test_a_changelog_of_another_version_is_found(version, beginning, right):
    mistake = changelog_mistake(version, f"# Changelog\n\n{beginning}\n\n## 0.1.0 - 2026-01-01\n")
    assert (mistake is None) == right


def test_the_note_of_a_release_is_its_section():
    script = ROOT / ".ci" / "release-note"
    version = re.findall(r"^## (\d\S+) - ", CHANGELOG, re.MULTILINE)[0]
    note = subprocess.run([script, version], capture_output=True, text=True, check=True).stdout
    assert note.startswith(f"composer_fsdp2 {version}\n\n")
    assert "### Added" in note
    assert "\n## " not in note
    unknown = subprocess.run([script, "9.9"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, unknown.stdout) == (1, "")


# --- What GitHub and pre-commit read. ---


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_scripts_that_exist(file):
    text = file.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    scripts = set(re.findall(r"\.ci/\w+(?![\w*.])", text))
    assert scripts
    assert {name for name in scripts if not os.access(ROOT / name, os.X_OK)} == set()


def test_ci_runs_every_row_of_the_stacks():
    workflow = yaml.safe_load(WORKFLOWS[0].read_text())
    matrix = workflow["jobs"]["check"]["strategy"]["matrix"]["include"]
    assert {job["row"] for job in matrix} == {row[0] for row in supported_table.rows()} | {"docs"}


def test_hooks_use_the_pinned_tools():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {hook["id"] for hook in hooks} == {
        *("codespell", "prose", "rules", "ruff", "ruff-format", "workflows")
    }
    pins = (ROOT / ".ci" / "docs.txt").read_text().splitlines()
    assert {pin for hook in hooks for pin in hook.get("additional_dependencies", ())} <= set(pins)


def test_forms_ask_for_what_is_needed():
    forms = {file.stem: yaml.safe_load(file.read_text()) for file in FORMS}
    assert list(forms) == ["bug", "config", "feature", "migration"]
    assert forms.pop("config") == {"blank_issues_enabled": True}
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
        ids = [part["id"] for part in form["body"]]
        assert len(set(ids)) == len(ids)
        assert all(part["attributes"]["label"] for part in form["body"])
