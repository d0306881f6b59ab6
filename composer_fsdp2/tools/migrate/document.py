"""A YAML or JSON file as data and as lines: only the lines of replaced keys change.

[Note: lines] Everything outside the replaced keys stays byte for byte, which keeps comments, key
order, anchors, interpolations and layout. ruamel.yaml says at which line and column each key and
value stands; the new settings take the places of the old ones, with the comments around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.tag import Tag

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.report import ADDED, SAME, Entry, Path, Site, Status, value_at

__all__ = ["Document", "dump", "parse_value", "read_settings"]

_MOST_VALUES = 1_000_000
_MOST_BYTES = 10_000_000
_LONGEST_NOTE = 600
_WHOLE_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""as YAML 1.2 counts lines; `splitlines` ends them at more characters"""
_TAG = "tag:yaml.org,2002:"
_SWITCH = re.compile("[Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF")
"""truth values of YAML 1.1 alone"""
_NO_COMMENT = re.compile(
    r"""(?: (?:^|(?<=[ \[{,:])) (?:'[^']*(?:'|$) | "[^"]*(?:"|$))  # text in quotes
          | [^#]
          | (?<![ \t])\#  # a part of a word
        )*""",
    re.VERBOSE,
)
"""a line up to its comment"""


class Document:
    """Holds the text of a configuration and where its keys stand."""

    def __init__(self, text: str, name: str, *, is_new: bool = False) -> None:
        """Reads a mapping.

        Args:
            text: YAML or JSON.
            name: of the text, in error messages.
            is_new: whether an anchor in a replaced block can have broken the text.

        Raises:
            ConfigError: it is not one YAML or JSON mapping.
        """
        self.name = name
        try:
            written = _json_mapping(text)
            self.text = text if written is None else dump(written)
            reader: Any = YAML(typ="safe", pure=True)
            reader.allow_duplicate_keys = True
            self.root: Any = _composed(reader, self.text)
            # Merging by `<<` changes the nodes.
            node = _composed(reader, self.text) if "<<" in self.text else self.root
            data = _texts(None if node is None else reader.constructor.construct_document(node))
        except (YAMLError, ValueError) as error:  # the second for dates and numbers out of range
            told = " ".join(str(error).split())
            raise ConfigError(
                f"After the replacement the file is not valid YAML: {told}. A replaced block "
                "holds something that is used elsewhere. Move the anchor out of it."
                if is_new
                else f"'{name}' is not valid YAML: {told}. None of it can be migrated. Correct it "
                "at that place."
            ) from None
        except RecursionError:
            raise ConfigError(
                f"'{name}' has values inside values without end, or {_MOST_VALUES:,} of them. An "
                "alias may stand inside its own anchor. Write out what the aliases stand for."
            ) from None
        if not isinstance(data, dict) or not isinstance(self.root, MappingNode):
            raise ConfigError(
                f"'{name}' holds no settings. There is nothing to migrate. Give the path of a "
                "file with a mapping at its top."
            )
        self.data: dict[str, Any] = data
        self.whole: list[str] = _WHOLE_LINE.findall(self.text)
        self.lines = [line.rstrip("\r\n") for line in self.whole]
        self.end = self.whole[0][len(self.lines[0]) :]
        """line ending of written lines, that of the file's first line"""
        self.pairs: dict[Path, tuple[Node, Any]] = {}
        """nodes of a key and its value; of a key that is written twice, the first ones"""
        values: dict[Path, list[Any]] = {}
        for path, key, value in _pairs(self.root, ()):
            self.pairs.setdefault(path, (key, value))
            values.setdefault(path, []).append(getattr(value, "value", None))
        # Keys inside a mapping that is written twice belong to two mappings.
        self.duplicates = {
            path: key_values
            for path, key_values in values.items()
            if len(key_values) > 1
            and path[-1] != "<<"
            and all(len(values[outer]) == 1 for outer in _outer_paths(path)[:-1] if outer in values)
        }
        """keys written twice in one mapping, with all their values"""

    def replace(self, results: Sequence[tuple[Site, list[Entry]]]) -> Document:
        """Returns the file with the keys of each site replaced by what its entries became.

        Raises:
            ConfigError: a site cannot be replaced line by line.
        """
        for site, _ in results:
            if site.parent and getattr(self._node(site.parent), "flow_style", False):
                return self._replace_braces(site.parent).replace(results)
        edits: list[tuple[int, int, list[str]]] = []
        for site, entries in results:
            parent = self._node(site.parent)
            spans: list[tuple[Any, int, int]] = []
            for key, value in [] if parent is None else parent.value:
                if str(key.value) not in site.keys:
                    continue
                # Of the key and its value, without remarks behind them. An alias has its anchor's
                # marks, which lie before the key. A block ends at the next key.
                end = value.end_mark if key.end_mark.index < value.end_mark.index else key.end_mark
                line = "".join(self.lines[end.line : end.line + 1])
                start, stop = key.start_mark.line, end.line + bool(line[: end.column].strip())
                while stop - 1 > start and _is_remark(self.lines[stop - 1]):
                    stop -= 1
                spans.append((key, start, stop))
            if parent is None or parent.flow_style or not spans:
                raise ConfigError(
                    f"'{'.'.join(site.parent) or self.name}' is written in braces, by an alias or "
                    "as `${...}`. Its lines cannot be replaced without touching others. Write it "
                    "as a block, one key per line."
                )
            # Comments of later keys move into the block, at the place of the first one.
            edits += [(start, end, []) for _, start, end in spans[1:]]
            edits.append((*spans[0][1:], self._ended(self._block(site, spans, entries))))
        lines = list(self.whole)
        for start, end, block in sorted(edits, reverse=True):
            lines[start:end] = block
        return Document("".join(lines), self.name, is_new=True)

    def noted(self, entries: list[Entry]) -> Document:
        """Returns the file with open decisions as comments above the keys, which stay."""
        above: dict[int, list[str]] = {}
        statuses = "|".join(status.value for status in Status)
        for entry in entries:
            # The key itself where it begins its line, or else a key that it is inside of.
            in_blocks = (
                self.pairs[path][0].start_mark
                for path in _outer_paths(entry.path)
                if path in self.pairs and not getattr(self._node(path[:-1]), "flow_style", True)
            )
            line_starts = [m for m in in_blocks if not self.lines[m.line][: m.column].strip()]
            # An earlier run may have said something of the key.
            noted = re.compile(rf"^ *# ({statuses}): {re.escape(entry.key)}: ", re.MULTILINE)
            if line_starts and not noted.search(self.text):
                above.setdefault(line_starts[-1].line, []).append(
                    " " * line_starts[-1].column + _note(entry)
                )
        text = "".join(
            part
            for number, line in enumerate(self.whole)
            for part in (*self._ended(above.get(number, [])), line)
        )
        return Document(text, self.name, is_new=True)

    def _ended(self, lines: list[str]) -> list[str]:
        return [line + (self.end or "\n") for line in lines]

    def _replace_braces(self, path: Path) -> Document:
        """Returns the file with one mapping, or the first around it in braces, as a block.

        Raises:
            ConfigError: something in it would be lost.
        """
        outer = next(
            outer for outer in _outer_paths(path) if getattr(self._node(outer), "flow_style", None)
        )
        key, value = self.pairs[outer]
        start, end = key.start_mark, value.end_mark
        if re.search(r"[&*#]", self.text[value.start_mark.index : end.index]):
            raise ConfigError(
                f"'{'.'.join(outer)}' is written in braces and holds an anchor, an alias or a "
                "comment. Rewriting it would lose them. Write it as a block, one key per line."
            )
        written = dump(value_at(self.data, outer)).splitlines()
        block = [" " * (start.column + 2) + line for line in written]
        # What is around the mapping in its first and its last line stays.
        before, after = self.lines[start.line][: start.column], self.lines[end.line][end.column :]
        head = f"{before}{outer[-1]}:{after}"
        lines = [*self.whole[: start.line], *self._ended([head, *block])]
        return Document("".join([*lines, *self.whole[end.line + 1 :]]), self.name)

    def _node(self, path: Path) -> MappingNode | None:
        """Returns the mapping at a path that leads through mappings written in place."""
        node = self.pairs[path][1] if path in self.pairs else None if path else self.root
        return node if isinstance(node, MappingNode) else None

    def _block(
        self, site: Site, spans: list[tuple[Any, int, int]], entries: list[Entry]
    ) -> list[str]:
        indent = spans[0][0].start_mark.column
        block = [" " * (indent + 2 * i) + f"{name}:" for i, name in enumerate(site.wrapper)]
        inner = " " * (indent + 2 * len(site.wrapper))
        old = [entry for entry in entries if entry.status is not ADDED]
        body: list[str] = []
        for key, start, end in spans:
            prefix = (*site.parent, str(key.value))
            starting: dict[int, list[Entry]] = {}
            for entry in (e for e in old if e.path[: len(prefix)] == prefix):
                # One that is not in the text itself stands where what brings it in does.
                pairs = [self.pairs[p] for p in _outer_paths(entry.path) if p in self.pairs]
                line = pairs[-1][0].start_mark.line
                starting.setdefault(line if start <= line < end else start, []).append(entry)
            for number in range(start, end):
                text, here = self.lines[number], starting.get(number, [])
                if _is_remark(text):
                    body.append(inner + text.strip() if text.strip() else "")
                    continue
                lines = [line for entry in here for line in self._written(entry, inner)]
                comment = _NO_COMMENT.sub("", text, count=1).rstrip()
                if comment and len(lines) == 1:
                    lines = [f"{lines[0]}  {comment}"]
                elif comment:
                    lines.insert(0, inner + comment)
                body += lines
        added = [entry for entry in entries if entry.status is ADDED]
        body += [line for entry in added for line in self._written(entry, inner)]
        if all(map(_is_remark, body)):
            block[-1] += " {}"
        beside = {key: value for entry in entries for key, value in entry.beside.items()}
        written = [" " * indent + line for line in dump(beside).splitlines() if beside]
        return block + body + written

    def _written(self, entry: Entry, indent: str) -> list[str]:
        lines = [_note(entry)] if entry.is_open else []
        _, node = self.pairs.get(entry.path, (None, None))
        raw = ""
        if isinstance(node, ScalarNode) and not node.anchor:
            raw = self.text[node.start_mark.index : node.end_mark.index]
        for setting, value in entry.becomes.items():
            # A scalar in one line stays as the input writes it.
            is_raw = value is SAME and raw and not set(raw) & set("\r\n")
            text = f"{setting}: {raw}" if is_raw else dump({setting: entry.settings[setting]})
            lines += text.rstrip("\n").splitlines()
        return [indent + line for line in lines]


def _outer_paths(path: Path) -> list[Path]:
    """Returns the paths that lead to a path, and itself as the last."""
    return [path[:length] for length in range(1, len(path) + 1)]


def _note(entry: Entry) -> str:
    """Returns the comment that says what to decide; it stands in the place of the key."""
    text = f"{entry.status.value}: {entry.key}: {entry.value} - {entry.reason}"
    if entry.options:
        text += f"; decide: {' or '.join(entry.options)}"
    # Whatever is in a value, a comment is one line.
    text = "".join(char if char.isprintable() else " " for char in text)
    return f"# {text if len(text) <= _LONGEST_NOTE else text[:_LONGEST_NOTE] + '...'}"


def parse_value(text: str) -> Any:
    """Returns one value as YAML reads it; text that is no YAML is a string."""
    try:
        reader: Any = YAML(typ="safe", pure=True)
        return _texts(reader.constructor.construct_document(_composed(reader, text)))
    except (YAMLError, ValueError, RecursionError):
        return text


def read_settings(value: str, folder: File | None) -> tuple[dict[str, Any] | None, str]:
    """Reads the settings in a file, looked for beside the configuration and in the current folder.

    Args:
        value: a path, or the settings themselves as JSON.
        folder: of the configuration; without one no file is read.

    Returns:
        The settings and where they are, or `None` and what is wrong with the file.
    """
    written = _json_mapping(value)
    if written is not None:
        return written, "the value itself"
    if folder is None:
        return None, f"{value!r} is named, and its settings are not known here"
    try:  # JSON or YAML, never executed
        path = File(value).expanduser()
        file = next((p for p in (folder / path, File.cwd() / path) if p.is_file()), None)
        if file is None:
            return None, f"{value!r} is neither in {str(folder)!r} nor in the current folder"
        if file.stat().st_size > _MOST_BYTES:
            return None, f"{str(file)!r} is larger than {_MOST_BYTES:,} bytes"
        document = Document(file.read_text(encoding="utf-8-sig"), str(file))
    except (OSError, ValueError, ConfigError) as error:
        return None, f"{value!r} cannot be read: {error}"
    if twice := [".".join(path) for path in document.duplicates]:
        return None, f"{str(file)!r} says {twice[0]!r} more than once"
    return document.data, str(file)


class _Dumper(yaml.SafeDumper):
    """Repeats a value that occurs twice, instead of an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(data: Any) -> str:
    """Writes plain data as YAML blocks, quoted so that readers of YAML 1.1 and 1.2 agree on it."""
    style: dict[str, Any] = {"default_flow_style": False, "sort_keys": False, "width": 10**6}
    return yaml.dump(data, Dumper=_Dumper, allow_unicode=True, **style)


def _composed(reader: Any, text: str) -> Any:
    """Returns the nodes of a text, with plain scalars of the types that they have for a run.

    OmegaConf reads YAML 1.1 without dates, and ruamel.yaml reads YAML 1.2.
    """
    root = reader.compose(text)
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:  # by an alias
            continue
        seen.add(id(node))
        if isinstance(node, MappingNode):
            todo += (value for _, value in node.value)
        elif isinstance(node, SequenceNode):
            todo += node.value
        elif isinstance(node, ScalarNode) and node.style is None:
            if node.tag == f"{_TAG}timestamp":
                node.ctag = Tag(suffix=f"{_TAG}str")
            elif node.tag == f"{_TAG}str" and _SWITCH.fullmatch(node.value):
                node.ctag = Tag(suffix=f"{_TAG}bool")
    return root


def _json_mapping(text: str) -> dict[str, Any] | None:
    """Returns the mapping that a JSON text is; `None` for other texts and keys written twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            raise ValueError  # read as the YAML that it is too, where duplicates are reported
        return mapping

    try:
        data = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _texts(data: Any, budget: Iterator[int] | None = None) -> Any:
    """Returns the same with keys that are strings. Ends too where aliases multiply values."""
    budget = iter(range(_MOST_VALUES)) if budget is None else budget
    if next(budget, None) is None:
        raise RecursionError
    if isinstance(data, Mapping):
        return {str(key): _texts(value, budget) for key, value in data.items()}
    if isinstance(data, int):
        str(data)  # a ValueError for thousands of digits, which nobody could show
    return [_texts(item, budget) for item in data] if isinstance(data, list) else data


def _pairs(node: Any, path: Path) -> Iterator[tuple[Path, Node, Any]]:
    """Yields keys and values at any depth, each before those inside of it."""
    if isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            yield from _pairs(item, (*path, str(number)))
    if isinstance(node, MappingNode):
        for key, value in node.value:
            key_path = (*path, str(key.value))
            yield key_path, key, value
            yield from _pairs(value, key_path)


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
