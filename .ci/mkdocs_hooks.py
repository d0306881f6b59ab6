"""Pages of the site that do not lie in docs/: files of the top level, notebooks, and linked files.

Links in the repository are relative to the file they stand in, so that they work where the
repository is read. Here they are led to the page, or the copy, that the site has of their target.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOP_LEVEL = ("CHANGELOG.md", "CONTRIBUTING.md", "MIGRATION.md")
COPIES = "files"
"""Folder of the site with the files that pages link to: YAML files, scripts."""
ROWS_ARE_SECTIONS = "reference/errors.md"
"""A page whose rows get an address each, and are found by the search one by one."""

_LINK = re.compile(r"(?<=\]\()([^\s)#:]+)((?:#[^\s)]*)?)(?=\))")
_TABLE = re.compile(r"^\| (.*) \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", re.MULTILINE)
_IN_CELL = re.compile(r"(?<=<td>).*?(?=</td>)", re.DOTALL)
_IN_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_PART_OF_NAME = re.compile(r"(?<=[._/=\[])(?=\w)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here, and a copy of every linked file outside docs/."""
    for name in TOP_LEVEL:
        if (ROOT / name).exists():
            _add(files, config, name.lower(), (ROOT / name).read_text())
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        uri = notebook.relative_to(DOCS).with_suffix(".md").as_posix()
        _add(files, config, uri, notebook_markdown(json.loads(notebook.read_text())))
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for target in sorted(_linked(_source(page), page.content_string)):
            uri = _uri(target)
            if uri.startswith(f"{COPIES}/") and files.get_file_from_path(uri) is None:
                copy = File.generated(config, uri, abs_src_path=str(target))
                files.append(copy)
                pages += [copy] if copy.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads each relative link to where the site has its target."""
    source = _source(page.file)
    folder = Path(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        return link[0] if target is None else os.path.relpath(_uri(target), folder) + link[2]

    if page.file.src_uri == "changelog.md":
        page.meta["search"] = {"exclude": True}  # it has every word, and answers no question
    if page.file.src_uri == ROWS_ARE_SECTIONS:
        markdown = _TABLE.sub(_sections, markdown)
    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Lets long names in tables break between their parts: else the table is cut off."""
    return _IN_CELL.sub(lambda cell: _IN_CODE.sub(_with_breaks, cell[0]), html)


def _with_breaks(code: re.Match[str]) -> str:
    return _PART_OF_NAME.sub("<wbr>", code[0])


def _sections(table: re.Match[str]) -> str:
    """Returns a heading for each row, its first cell, with the other cells below it."""
    _, *names = table[1].split(" | ")
    rows = (row.strip("| ").split(" | ") for row in table[2].splitlines())
    parts = ((f"### {first}\n", *map("- **{}**: {}".format, names, rest)) for first, *rest in rows)
    return "".join("\n".join(part) + "\n\n" for part in parts)


def notebook_markdown(notebook: dict[str, Any]) -> str:
    """Returns the cells of a notebook as Markdown, each with its text output."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell_parts(cell))


def _cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        text = output["text"] if "text" in output else output.get("data", {}).get("text/plain", "")
        if "".join(text).strip():
            yield f"```text\n{''.join(text).rstrip()}\n```"


def _add(files: Files, config: MkDocsConfig, uri: str, content: str) -> None:
    files.append(File.generated(config, uri, content=content))


def _source(file: File) -> Path:
    """The file of the repository that a page is made from."""
    for name in TOP_LEVEL:
        if file.src_uri == name.lower():
            return ROOT / name
    if file.src_uri.startswith(f"{COPIES}/") and file.abs_src_path is not None:
        return Path(file.abs_src_path)
    return DOCS / file.src_uri


def _linked(source: Path, markdown: str) -> set[Path]:
    targets = (_target(source, link[1]) for link in _LINK.finditer(markdown))
    return {target for target in targets if target is not None}


def _target(source: Path, link: str) -> Path | None:
    """The existing file of the repository that a link in `source` leads to."""
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _uri(target: Path) -> str:
    """Where the site has a file of the repository."""
    if target.parent == ROOT and target.name in TOP_LEVEL:
        return target.name.lower()
    if target == ROOT / "README.md":
        return "index.md"
    if target.is_relative_to(DOCS):
        page = target.with_suffix(".md") if target.suffix == ".ipynb" else target
        return page.relative_to(DOCS).as_posix()
    # mkdocs leaves out what begins with a dot.
    parts = [part.lstrip(".") for part in target.relative_to(ROOT).parts]
    return "/".join([COPIES, *parts])
