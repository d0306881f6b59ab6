"""Writes docs/reference/settings.md: `python -m tests.support.settings_page`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from composer_fsdp2.config.messages import ascii_repr
from composer_fsdp2.config.schema import FIELDS
from composer_fsdp2.config.setting import Setting, settings_of

__all__ = ["PAGE", "example_of", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"

_HEAD = """\
# Settings

All keys of `parallelism_config.fsdp2`. An unknown key, a wrong type and an impossible value are
errors. One message lists all of them, with the nearest valid name.

`python -m tests.support.settings_page` writes this page from the declarations in
`composer_fsdp2/config`. Version 0.1.0 was not published. 0.2.0 is the first release.

"""


def page(settings: Mapping[str, Setting[Any]] = FIELDS) -> str:
    """Returns the reference page: an overview, and a section for each setting."""
    overview = "".join(
        f"| [`{name}`](#{name}) | {_default(one)} | {one.meaning.split('. ')[0].rstrip('.')} |\n"
        for name, one in settings.items()
    )
    sections = "\n".join(_section(one) for one in settings.values())
    return f"{_HEAD}| setting | default | meaning |\n|---|---|---|\n{overview}\n{sections}"


def _section(one: Setting[Any]) -> str:
    facts = {
        "Default": _default(one) and f"`{_default(one)}`",
        "Values": _values(one),
        "Saves": one.saves,
        "Costs": one.costs,
        "Since": one.since or "0.1.0",
    }
    options = {} if one.values.spec is None else settings_of(one.values.spec)
    rows = "".join(f"| {name} | {text} |\n" for name, text in facts.items() if text)
    parts = [f"## `{one.name}`\n\n{one.meaning}\n", f"| | |\n|---|---|\n{rows}"]
    if options:
        rows = "".join(
            f"| `{name}` | {_default(option)} | {_values(option)} | {option.meaning} |\n"
            for name, option in options.items()
        )
        parts.append(
            f"Options:\n\n| option | default | values | meaning |\n|---|---|---|---|\n{rows}"
        )
    if one.example:
        parts.append(f"```yaml\n{example_of(one)}```\n")
    if one.see:
        parts.append(f"More: [{one.see}](../{one.see}).\n")
    return "\n".join(parts)


def _default(setting: Setting[Any]) -> str:
    default: Any = setting.default
    if default is MISSING:
        return "has to be given"
    if default is None or isinstance(default, bool):
        return ascii_repr(default)
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    return "{}" if dataclasses.is_dataclass(default) else str(default)


def _values(setting: Setting[Any]) -> str:
    spec = setting.values.spec
    names = "" if spec is None else f" with {', '.join(f'`{name}`' for name in settings_of(spec))}"
    return setting.values.expected + names


def example_of(one: Setting[Any]) -> str:
    """Returns the example of a setting as a block of a run; its values hold no comma."""
    lines = one.example[1:-1].split(", ") if one.example.startswith("{") else [one.example]
    return "parallelism_config:\n  fsdp2:\n" + "".join(f"    {line}\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
