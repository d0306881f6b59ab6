"""Text about settings, made from their declarations.

`python -m composer_fsdp2.config.describe README.md` writes the tables into the page, between the
marks `<!-- settings -->` and `<!-- options of settings -->` and their ends.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from composer_fsdp2.config.schema import FIELDS, FSDP2Config, known_settings, values_of
from composer_fsdp2.config.setting import Setting, settings_of

__all__ = ["describe_options", "describe_page", "describe_settings", "describe_values"]


def describe_values(settings: FSDP2Config) -> str:
    """Returns a line for each setting; the same on all ranks that have the same settings."""
    known = known_settings()
    return "\n".join(
        f"{name}: {value}"
        for name, value in values_of(settings).items()
        if known[name].same_on_ranks
    )


def describe_settings(settings: Mapping[str, Setting[Any]] | None = None) -> str:
    """Returns a Markdown table of settings: by default of all that a run may have."""
    known = known_settings() if settings is None else settings
    rows = [
        f"| `{name}` | {_default(one)} | {_values(one)} | {one.meaning}{_link(one)} |"
        for name, one in known.items()
    ]
    return "\n".join(["| key | default | values | meaning |", "|---|---|---|---|", *rows, ""])


def describe_options(settings: Mapping[str, Setting[Any]] | None = None) -> str:
    """Returns a Markdown table of the options of settings that are mappings."""
    known = known_settings() if settings is None else settings
    rows = [
        f"| `{key}` | {_default(one)} | {_values(one)} | {one.meaning} |"
        for key, one in _options(known)
    ]
    return "\n".join(["| option | default | values | meaning |", "|---|---|---|---|", *rows, ""])


def _options(settings: Mapping[str, Setting[Any]]) -> Iterator[tuple[str, Setting[Any]]]:
    for name, one in settings.items():
        if one.values.spec is not None:
            inner = settings_of(one.values.spec)
            yield from ((f"{name}.{option}", inner[option]) for option in inner)


def _default(setting: Setting[Any]) -> str:
    default: Any = setting.default
    if default is MISSING:
        return "has to be given"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[]" if not default else f"[{', '.join(map(str, default))}]"
    return "" if dataclasses.is_dataclass(default) else str(default)


def _values(setting: Setting[Any]) -> str:
    spec = setting.values.spec
    if spec is None:
        return setting.values.expected
    return f"{setting.values.expected} with {', '.join(f'`{name}`' for name in settings_of(spec))}"


def _link(setting: Setting[Any]) -> str:
    return f"; see [below](#{setting.see})" if setting.see else ""


def describe_page(text: str) -> str:
    """Returns the page with its tables written anew, for the settings of the package."""
    tables = {
        "settings": describe_settings(FIELDS),
        "options of settings": describe_options(FIELDS),
    }
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = marked.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)
    return text


def main() -> None:
    """Rewrites the pages that are named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(describe_page(page.read_text()))


if __name__ == "__main__":
    main()
