"""Every figure about checkpoints: `checkpoint.py FIGURE [options]`, or `all` of them.

    save, load, async    `checkpoint_io.py`
    convert              `checkpoint_convert.py`
    pretrained           `checkpoint_pretrained.py`

`checkpoint.py FIGURE --help` says what is measured, how, and what the goal is.
"""

from __future__ import annotations

import sys

import checkpoint_convert
import checkpoint_io
import checkpoint_pretrained

FIGURES = {
    "save": lambda rest: checkpoint_io.main(["--figure", "save", *rest]),
    "load": lambda rest: checkpoint_io.main(["--figure", "load", *rest]),
    "async": lambda rest: checkpoint_io.main(["--figure", "async", *rest]),
    "convert": checkpoint_convert.main,
    "pretrained": checkpoint_pretrained.main,
}


def main() -> None:
    figure, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if figure not in (*FIGURES, "all"):
        sys.exit(f"{__doc__}\nFIGURE is one of: {', '.join(FIGURES)}, all")
    for name in FIGURES if figure == "all" else [figure]:
        FIGURES[name](rest)


if __name__ == "__main__":
    main()
