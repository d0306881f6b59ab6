"""`composer-fsdp2 quickstart`: the files of a first run, for an installation without a clone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import reported, say
from composer_fsdp2.errors import ConfigError

__all__ = ["HELP", "quickstart", "write_quickstart"]

HELP = """Write the folder `yamls` into FOLDER: a first run, and ready runs of many models.

`yamls/quickstart.yaml` is the first run, which needs no GPU and no network. The others are to
pretrain and fine-tune Llama, Qwen, Gemma, Phi, Mixtral, OLMoE and MPT, with LoRA, DPO,
distillation, long sequences and tensor parallelism. A file that exists with other content is never
replaced.

- `composer-fsdp2 quickstart && composer-fsdp2 train yamls/quickstart.yaml`

Exit code 0 if the files were written or were there, 2 if another file has one of their names.
"""


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where the run will start.")] = Path(),
) -> None:
    """Writes the files and says what to do with them."""
    with reported():
        if written := write_quickstart(folder):
            say(f"Wrote {len(written)} files into {escape(str(folder / 'yamls'))}")
        place = "" if folder == Path() else f"cd {escape(str(folder))} && "
        say(f"Next: {place}composer-fsdp2 train yamls/quickstart.yaml")


def write_quickstart(folder: Path) -> list[Path]:
    """Writes the quickstart and the ready runs into `folder/yamls`.

    Returns:
        The paths of the files that were not there before.

    Raises:
        ConfigError: a file of that name exists with other content; nothing is written then.
    """
    source = _source()
    contents = {
        folder / "yamls" / path.relative_to(source): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.suffix in (".py", ".yaml")
    }
    missing = [path for path in contents if not path.exists()]
    for path in contents:
        if path not in missing and not _holds(path, contents[path]):
            raise ConfigError(
                f"'{path}' exists with other content. The quickstart would replace it. Name "
                "another folder, as in `composer-fsdp2 quickstart FOLDER`, or move the file."
            )
    try:
        for path in missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[path])
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written: {error.strerror}. There is no run without its files. "
            "Name another folder, as in `composer-fsdp2 quickstart FOLDER`."
        ) from None
    return missing


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _source() -> Path:
    """Returns the folder of the files: a wheel has it in the package, a clone beside it."""
    packed = Path(__file__).parents[1] / "yamls"
    return packed if packed.is_dir() else Path(__file__).parents[2] / "yamls"
