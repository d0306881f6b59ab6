"""A YAML or JSON file as data and as lines: only the lines of replaced keys change.

[Note: lines] Everything outside the replaced keys stays byte for byte, which keeps comments, key
order, anchors, interpolations and layout. ruamel.yaml says at which line and column each key and
value stands; the new settings take the places of the old ones, with the comments around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as File
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.report import SAME, Entry, Path, Site, Status

__all__ = ["Document", "check_result", "dump", "parse_value", "read_settings"]

_MOST_VALUES = 1_000_000
_MOST_BYTES = 10_000_000
_LONGEST_NOTE = 600
_WHOLE_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""as YAML 1.2 counts lines; `splitlines` ends them at more characters"""


class Document:
    """The text of a configuration and where its keys stand."""

    def __init__(self, text: str, name: str) -> None:
        """Reads a mapping.

        Raises:
            ConfigError: it is not one YAML or JSON mapping.
        """
        self.name = name
        self.text = _json_as_yaml(text)
        self.whole: list[str] = _WHOLE_LINE.findall(self.text)
        self.lines = [line.rstrip("\r\n") for line in self.whole]
        self.end = self.whole[0][len(self.lines[0]) :] if self.whole else "\n"
        """of the lines that are written, as the file's first one has it"""
        try:
            reader: Any = YAML(typ="safe", pure=True)
            reader.allow_duplicate_keys = True
            self.root: Any = reader.compose(self.text)
            # Merging by `<<` changes the nodes.
            node = reader.compose(self.text) if "<<" in self.text else self.root
            data = _texts(None if node is None else reader.constructor.construct_document(node))
        except (YAMLError, ValueError) as error:  # the second for dates and numbers out of range
            raise ConfigError(
                f"'{name}' is not valid YAML: {' '.join(str(error).split())}. None of it can be "
                "migrated. Correct it at that place."
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

    def duplicates(self) -> dict[Path, list[Any]]:
        """Keys written twice in one mapping, with all their values."""
        found: dict[Path, list[Any]] = {}
        for path, mapping in _mappings(self.root, ()):
            seen: dict[str, list[Any]] = {}
            for key, value in mapping.value:
                seen.setdefault(str(key.value), []).append(getattr(value, "value", None))
            found |= {(*path, k): v for k, v in seen.items() if len(v) > 1 and k != "<<"}
        return found

    def replace(self, site: Site, entries: list[Entry]) -> str:
        """The text with the site's keys replaced by what the entries became.

        Raises:
            ConfigError: the site cannot be replaced line by line.
        """
        parent = self._node(site.parent)
        if parent is not None and parent.flow_style and site.parent:
            return self._replace_braces(site.parent).replace(site, entries)
        spans = [
            (key, *self._span(key, value))
            for key, value in ([] if parent is None else parent.value)
            if str(key.value) in site.keys
        ]
        if parent is None or parent.flow_style or not spans:
            raise ConfigError(
                f"'{'.'.join(site.parent) or self.name}' is written in braces, by an alias or as "
                "`${...}`. Its lines cannot be replaced without touching others. Write it as "
                "a block, one key per line."
            )
        block = self._block(site, spans[0][0].start_mark.column, spans, entries)
        lines = list(self.whole)
        for position, (_, start, end) in reversed(list(enumerate(spans))):
            # Comments of later keys moved into the block, at the place of the first one.
            lines[start:end] = self._ended(block) if position == 0 else []
        return "".join(lines)

    def noted(self, entries: list[Entry]) -> str:
        """The text with what is left to decide as comments above the keys, which stay."""
        above: dict[int, list[str]] = {}
        for entry in entries:
            place = self._own_line(entry.path)
            if place is None:
                continue
            number, column = place
            if not self._is_noted(number, entry.key):
                above.setdefault(number, []).append(" " * column + _note(entry))
        return "".join(
            part
            for number, line in enumerate(self.whole)
            for part in (*self._ended(above.get(number, [])), line)
        )

    def _is_noted(self, number: int, key: str) -> bool:
        """Whether the comments above a line hold what an earlier run said of a key."""
        start = re.compile(
            rf"# ({'|'.join(status.value for status in Status)}): {re.escape(key)}: "
        )
        while number and (above := self.lines[number - 1].lstrip()).startswith("#"):
            if start.match(above):
                return True
            number -= 1
        return False

    def _own_line(self, path: Path) -> tuple[int, int] | None:
        """Line and column of a key that begins its line, or else of one that it is inside of."""
        found = None
        for length in range(1, len(path) + 1):
            parent, pair = self._node(path[: length - 1]), self._pair(path[:length])
            if parent is None or parent.flow_style or pair is None:
                break
            mark = pair[0].start_mark
            if not self.lines[mark.line][: mark.column].strip():
                found = mark.line, mark.column
        return found

    def _ended(self, lines: list[str]) -> list[str]:
        return [line + (self.end or "\n") for line in lines]

    def _replace_braces(self, path: Path) -> Document:
        """The same with one mapping, or the first around it in braces, as a block.

        Raises:
            ConfigError: something in it would be lost.
        """
        depths = range(1, len(path) + 1)
        place = next(path[:n] for n in depths if getattr(self._node(path[:n]), "flow_style", None))
        pair = self._pair(place)
        assert pair is not None
        key, value = pair
        start, end = key.start_mark, value.end_mark
        raw = self.text[value.start_mark.index : end.index]
        if re.search(r"[&*#]", raw):
            raise ConfigError(
                f"'{'.'.join(place)}' is written in braces and holds an anchor, an alias or a "
                "comment. Rewriting it would lose them. Write it as a block, one key per line."
            )
        data: Any = self.data
        for name in place:
            data = data[name]
        block = [" " * (start.column + 2) + line for line in dump(data).splitlines()]
        rest = self.lines[end.line][end.column :]
        head = self.lines[start.line][: start.column] + f"{place[-1]}:{rest}"
        lines = [*self.whole[: start.line], *self._ended([head, *block])]
        return Document("".join([*lines, *self.whole[end.line + 1 :]]), self.name)

    def first_line(self, site: Site) -> int:
        """Where the mapping of a site begins."""
        node = self._node(site.parent)
        return -1 if node is None else node.start_mark.line

    def _node(self, path: Path) -> MappingNode | None:
        node: Any = self.root
        for name in path:
            pairs = [v for k, v in node.value if str(k.value) == name]
            if not pairs or not isinstance(pairs[-1], MappingNode):
                return None
            node = pairs[-1]
        return node

    def _span(self, key: Node, value: Node) -> tuple[int, int]:
        start, end = key.start_mark.line, _last_line(key, value) + 1
        while end - 1 > start and _is_remark(self.lines[end - 1]):
            end -= 1
        return start, end

    def _block(
        self, site: Site, indent: int, spans: list[tuple[Any, int, int]], entries: list[Entry]
    ) -> list[str]:
        block = [" " * (indent + 2 * i) + f"{name}:" for i, name in enumerate(site.wrapper)]
        inner = " " * (indent + 2 * len(site.wrapper))
        body: list[str] = []
        for key, start, end in spans:
            starting = self._starting(site, str(key.value), (start, end), entries)
            for number in range(start, end):
                body += self._line(number, inner, starting.get(number, []))
        for entry in entries:
            if entry.value is None and entry.path[: len(site.parent)] == site.parent:
                body += self._written(entry, inner) if entry.status.value == "added" else []
        if not any(line.strip() and not _is_remark(line) for line in body):
            block[-1] += " {}"
        beside = {key: value for entry in entries for key, value in entry.beside.items()}
        for key, value in beside.items():
            body += [" " * indent + line for line in dump({key: value}).splitlines()]
        return block + body

    def _starting(
        self, site: Site, key: str, span: tuple[int, int], entries: list[Entry]
    ) -> dict[int, list[Entry]]:
        """Entries of one replaced key by the line they begin at."""
        starting: dict[int, list[Entry]] = {}
        prefix = (*site.parent, key)
        for entry in entries:
            if entry.path[: len(prefix)] == prefix and entry.status.value != "added":
                line = self._line_of(entry.path)
                inside = line is not None and span[0] <= line < span[1]
                starting.setdefault(line if inside and line else span[0], []).append(entry)
        return starting

    def _line_of(self, path: Path) -> int | None:
        """Where a key stands; one that is not in the text itself, where what brings it in does."""
        pairs = (self._pair(path[:length]) for length in range(len(path), 0, -1))
        pair = next((pair for pair in pairs if pair is not None), None)
        return None if pair is None else pair[0].start_mark.line

    def _pair(self, path: Path) -> tuple[Node, Node] | None:
        parent = self._node(path[:-1])
        pairs = [] if parent is None else [p for p in parent.value if str(p[0].value) == path[-1]]
        return pairs[0] if pairs else None

    def _line(self, number: int, indent: str, entries: list[Entry]) -> list[str]:
        text = self.lines[number]
        if _is_remark(text):
            return [indent + text.strip() if text.strip() else ""]
        written = [line for entry in entries for line in self._written(entry, indent)]
        comment = _comment(text)
        if not comment:
            return written
        if len(written) == 1:
            return [f"{written[0]}  {comment}"]
        return [indent + comment, *written]

    def _written(self, entry: Entry, indent: str) -> list[str]:
        lines = [indent + _note(entry)] if entry.is_open else []
        for setting, value in entry.becomes.items():
            raw = self._raw(entry.path) if value is SAME else None
            text = f"{setting}: {raw}" if raw else dump({setting: entry.settings[setting]})
            lines += [indent + line for line in text.rstrip("\n").splitlines()]
        return lines

    def _raw(self, path: Path) -> str | None:
        """A scalar as the input writes it."""
        pair = self._pair(path)
        if pair is None or not isinstance(pair[1], ScalarNode):
            return None
        raw = self.text[pair[1].start_mark.index : pair[1].end_mark.index]
        return raw if raw and not set(raw) & set("\r\n") and not pair[1].anchor else None


def _note(entry: Entry) -> str:
    """Returns the comment that says what to decide; it stands in the place of the key."""
    text = f"{entry.status.value}: {entry.key}: {entry.value} - {entry.reason}"
    if entry.options:
        text += f"; decide: {' or '.join(entry.options)}"
    # Whatever is in a value, a comment is one line.
    text = "".join(char if char.isprintable() else " " for char in text)
    return f"# {text if len(text) <= _LONGEST_NOTE else text[:_LONGEST_NOTE] + '...'}"


def parse_value(text: str) -> Any:
    """One value as YAML reads it; text that is no YAML is a string."""
    try:
        return _texts(YAML(typ="safe", pure=True).load(text))
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
        place = next((p for p in (folder / path, File.cwd() / path) if p.is_file()), None)
        if place is None:
            return None, f"{value!r} is neither in {str(folder)!r} nor in the current folder"
        if place.stat().st_size > _MOST_BYTES:
            return None, f"{str(place)!r} is larger than {_MOST_BYTES:,} bytes"
        text = place.read_text(encoding="utf-8-sig")
        document = Document(text, str(place))
    except (OSError, ValueError, ConfigError) as error:
        return None, f"{value!r} cannot be read: {error}"
    if document.duplicates():
        twice = ".".join(next(iter(document.duplicates())))
        return None, f"{str(place)!r} says {twice!r} more than once"
    return document.data, str(place)


def check_result(text: str) -> None:
    """Reads what was written, which an anchor in a replaced block can have broken.

    Raises:
        ConfigError: it is not valid YAML.
    """
    try:
        YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise ConfigError(
            f"After the replacement the file is not valid YAML: {' '.join(str(error).split())}. "
            "A replaced block holds something that is used elsewhere. Move the anchor out of it."
        ) from None


class _Dumper(yaml.SafeDumper):
    """Repeats a value that occurs twice, instead of an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(data: Any) -> str:
    """Writes plain data as YAML blocks, quoted so that readers of YAML 1.1 and 1.2 agree on it."""
    style: dict[str, Any] = {"default_flow_style": False, "sort_keys": False, "width": 10**6}
    return yaml.dump(data, Dumper=_Dumper, allow_unicode=True, **style)


def _json_mapping(text: str) -> dict[str, Any] | None:
    """Returns the mapping that a JSON text is; `None` for other texts and keys written twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError  # read as the YAML that it is too, where duplicates are reported
        return found

    try:
        data = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _json_as_yaml(text: str) -> str:
    data = _json_mapping(text)
    try:
        return text if data is None else dump(data)
    except RecursionError:
        return text


def _texts(data: Any, left: Iterator[int] | None = None) -> Any:
    """The same with keys that are strings. Ends too where aliases multiply values."""
    left = iter(range(_MOST_VALUES)) if left is None else left
    if next(left, None) is None:
        raise RecursionError
    if isinstance(data, Mapping):
        return {str(key): _texts(value, left) for key, value in data.items()}
    if isinstance(data, int):
        str(data)  # a ValueError for thousands of digits, which nobody could show
    return [_texts(item, left) for item in data] if isinstance(data, list) else data


def _mappings(node: Any, path: Path) -> Iterator[tuple[Path, MappingNode]]:
    if isinstance(node, SequenceNode):
        for number, item in enumerate(node.value):
            yield from _mappings(item, (*path, str(number)))
    if not isinstance(node, MappingNode):
        return
    yield path, node
    for key, value in node.value:
        yield from _mappings(value, (*path, str(key.value)))


def _last_line(key: Node, value: Any) -> int:
    """Last line of a value. An alias shows its anchor's marks, which lie before the key."""
    if value.start_mark.index < key.start_mark.index:
        return key.end_mark.line
    if isinstance(value, ScalarNode):
        if value.start_mark.index == value.end_mark.index:  # nothing written
            return key.end_mark.line
        return value.end_mark.line - (value.style in ("|", ">"))
    if value.flow_style:
        return value.end_mark.line
    if isinstance(value, MappingNode):
        return max([key.end_mark.line, *(_last_line(k, v) for k, v in value.value)])
    return max([key.end_mark.line, *(_last_line(item, item) for item in value.value)])


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _comment(line: str) -> str:
    """The comment at the end of a line, or ''."""
    quote = ""
    for position, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (position == 0 or line[position - 1] in " [{,:"):
            quote = char
        elif char == "#" and position and line[position - 1] in " \t":
            return line[position:].rstrip()
    return ""
