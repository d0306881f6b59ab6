"""YAML as nodes with places and as data, by the rules of YAML 1.2; long files by libyaml's parser.

ruamel.yaml reads 1.2 but is written in Python: 60,000 items take it seconds, and a file is read
several times. libyaml finds the same structure thirty times as fast; what a plain scalar means is
decided by ruamel's own tables either way.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

__all__ = ["check", "compose", "dump", "json_mapping", "load"]

_LONG = 20_000
"""characters; shorter files are read by ruamel alone"""
_OTHER_BREAKS = "\x85\u2028\u2029"
"""ends of lines for libyaml, which reads YAML 1.1, and characters for YAML 1.2"""


def compose(text: str) -> Any:
    """The nodes of the one document in a text, or `None`.

    Raises:
        YAMLError: it is not valid, or there are several documents.
        RecursionError: it is nested too deeply.
    """
    return _compose_fast(text) if _is_fast(text) else YAML().compose(text)


def check(text: str) -> None:
    """Reads a text and keeps nothing of it.

    Raises:
        YAMLError: as `compose` does.
        RecursionError: as `compose` does.
    """
    if not _is_fast(text):
        YAML().compose(text)
        return
    anchors: set[str] = set()
    documents = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            documents += isinstance(event, yaml.DocumentStartEvent)
            anchor = getattr(event, "anchor", None)
            if documents > 1 or (isinstance(event, yaml.AliasEvent) and anchor not in anchors):
                raise yaml.YAMLError("several documents, or an alias of nothing")
            anchors.add(anchor or "")
    except yaml.YAMLError:
        YAML().compose(text)


def load(text: str, root: Any = None, *, duplicates: bool) -> Any:
    """The data of the one document in a text, keys written twice allowed or not.

    Args:
        text: the text.
        root: its node, if it is known.
        duplicates: whether keys may be written twice.

    Raises:
        YAMLError: it is not valid.
        ValueError: a date or a number is out of range.
        RecursionError: it is nested too deeply.
    """
    reader = YAML(typ="safe", pure=True)
    reader.allow_duplicate_keys = duplicates
    if not _is_fast(text):
        return reader.load(text)
    # Constructing what is merged changes the nodes.
    node = _compose_fast(text) if root is None or "<<" in text else root
    return None if node is None else reader.constructor.construct_document(node)


def dump(data: Any, *, is_long: bool = False) -> str:
    """Plain data as YAML blocks, quoted so that readers of YAML 1.1 and of 1.2 agree on it."""
    if is_long and hasattr(yaml, "CSafeDumper"):
        with contextlib.suppress(ValueError):  # half a surrogate pair, which libyaml cannot write
            return _dump(data, _FastDumper)
    return _dump(data, _Dumper)


def _dump(data: Any, dumper: Any) -> str:
    return yaml.dump(
        data,
        Dumper=dumper,
        default_flow_style=False,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )


class _Dumper(yaml.SafeDumper):
    """Repeats what occurs twice, instead of an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # pyright: ignore
    """The same by libyaml."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def json_mapping(text: str) -> dict[str, Any] | None:
    """The mapping that a JSON text is; `None` for other texts and for keys written twice."""
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON in which a key is written twice is read as the YAML it is too, where that shows."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


# --- libyaml. ---


def _is_fast(text: str) -> bool:
    has_libyaml = hasattr(yaml, "CSafeLoader")
    return has_libyaml and len(text) > _LONG and not any(char in text for char in _OTHER_BREAKS)


def _compose_fast(text: str) -> Any:
    try:
        return _Composer(text).document()
    except yaml.YAMLError:
        # What is wrong is said by the reader that decides.
        return YAML().compose(text)


class _Composer:
    """ruamel's nodes out of libyaml's events."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.CSafeLoader))
        self.anchors: dict[str, Node] = {}
        self.resolver: Any = YAML(typ="safe", pure=True).resolver
        self.patterns: dict[Any, Any] = self.resolver.versioned_resolver
        self.tags: dict[Any, Any] = {}

    def document(self) -> Any:
        next(self.events)  # the stream
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        node = self._node(next(self.events))
        next(self.events)  # the end of the document
        if not isinstance(next(self.events), yaml.StreamEndEvent):
            raise yaml.YAMLError("several documents")
        return node

    def _node(self, event: Any) -> Any:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise yaml.YAMLError("undefined alias")
            return self.anchors[event.anchor]
        kinds = {yaml.ScalarEvent: ScalarNode, yaml.SequenceStartEvent: SequenceNode}
        kind = kinds.get(type(event), MappingNode)
        value: Any = event.value if kind is ScalarNode else []
        tag: Any = event.tag
        if tag is None or tag == "!":
            tag = self._resolved(kind, value if kind is ScalarNode else "", event.implicit)
        place = (event.start_mark, event.end_mark)
        style = event.style if kind is ScalarNode else event.flow_style
        node = kind(tag, value, *place, style, anchor=event.anchor)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        if kind is not ScalarNode:
            self._fill(node)
        return node

    def _resolved(self, kind: Any, value: str, implicit: Any) -> Any:
        """The tag of what has none; ruamel's own function looks up its version every time."""
        name: Any = kind
        if kind is ScalarNode and implicit[0]:
            patterns = (*self.patterns.get(value[:1], ()), *self.patterns.get(None, ()))
            name = next((tag for tag, pattern in patterns if pattern.match(value)), kind)
        if name not in self.tags:
            self.tags[name] = self.resolver.resolve(kind, value, implicit)
        return self.tags[name]

    def _fill(self, node: Any) -> None:
        """Reads items until the end of a collection."""
        mapping = isinstance(node, MappingNode)
        ends = yaml.MappingEndEvent if mapping else yaml.SequenceEndEvent
        while not isinstance(event := next(self.events), ends):
            item = self._node(event)
            node.value.append((item, self._node(next(self.events))) if mapping else item)
        node.end_mark = event.end_mark
