"""`composer-fsdp2 init` and `quickstart`: files that a first run starts from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from composer_fsdp2.cli.console import reported, say
from composer_fsdp2.errors import ConfigError

if TYPE_CHECKING:
    from composer_fsdp2.tools.starter import Answers

__all__ = ["init", "quickstart", "write_quickstart"]


_QUESTIONS = {
    "model": "Model: mpt-tiny, mpt-125m, mpt-1b, mpt-7b, a folder, or a name on the hub",
    "data": "Data: a folder of MDS shards to pretrain, of train.jsonl to fine-tune, or an address",
    "gpus": "GPUs of the whole run (0: the CPU)",
    "goal": "Goal: pretrain, finetune or lora",
}


def init(
    file: Annotated[Path, typer.Argument(help="Where to write.", metavar="FILE")] = Path(
        "run.yaml"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="mpt-tiny, mpt-125m, mpt-1b, mpt-7b, a folder, or a name on the hub."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A folder of MDS shards (pretrain) or with train.jsonl, or an address."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of the whole run; 0 for the CPU.")
    ] = None,
    goal: Annotated[
        Literal["pretrain", "finetune", "lora"] | None, typer.Option(help="What the run is for.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder or a name on the hub; default the model's own.")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default by the model.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU, to say whether a step fits: H100.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a commented training YAML from four answers: model, data, GPUs, goal.

    Each has an option, and only what is missing is asked for. `composer-fsdp2 doctor` passes the
    file where model and data are on this machine. An existing file stays, unless `--force` is
    given.

    - `composer-fsdp2 init`

    - `composer-fsdp2 init run.yaml --model ./llama --data ./prompts --gpus 8 --goal lora`

    - `composer-fsdp2 init run.yaml --model mpt-7b --data ./shards --gpus 8 --gpu H100`: fits?

    - `composer-fsdp2 init tiny.yaml --model mpt-tiny --data ./shards --gpus 0 --goal pretrain`

    Exit code 0 if the file was written, 2 if an answer is missing or cannot be.
    """
    from composer_fsdp2.tools.starter import Answers

    with reported():
        if gpu is not None:
            _memory_of(gpu)
        if file.exists() and not force:
            raise ConfigError(
                f"'{file}' exists. What is in it would be lost. Write another name, or --force."
            )
        options = {"model": model, "data": data, "gpus": gpus, "goal": goal}
        answers = Answers(**_ask(options), tokenizer=tokenizer, max_seq_len=max_seq_len)
        if gpu is not None and not answers.gpus:
            raise ConfigError(
                f"--gpu is {gpu}, and the run has no GPUs. Its memory would be compared with "
                "nothing. Leave --gpu out, or write --gpus 1 or more."
            )
        _write(file, answers, gpu)


def _write(file: Path, answers: Answers, gpu: str | None) -> None:
    """Writes the run, and says how to start it and whether a step fits a GPU that is named."""
    from composer_fsdp2.tools.starter import starter_yaml

    text = starter_yaml(answers)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"'{file}' cannot be written: {reason}. There is no run without it. Write another path."
        ) from None
    # Doctor looks at the cluster of the answers, not at this machine.
    per_node, cluster = answers.gpus // answers.nodes, ""
    if answers.gpus not in (0, _local_gpus()):
        cluster = f" --ranks {answers.gpus} --gpus-per-node {per_node}"
    command = f"composer-fsdp2 train {file} --ranks {answers.ranks}"
    if answers.nodes > 1:
        command = (
            f"on each node: torchrun --nnodes {answers.nodes} --nproc-per-node {per_node} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python "
            f"composer-fsdp2 train {file}"
        )
    say(f"[green]Wrote {escape(str(file))}[/]")
    say(f"Check it:  composer-fsdp2 doctor {escape(f'{file}{cluster}')}")
    say(f"Train:     {escape(command)}")
    if gpu is None:
        return

    from composer_fsdp2.cli.doctor import rehearsed
    from composer_fsdp2.cli.plan import forecast_of
    from composer_fsdp2.estimate.report import fits, verdict
    from composer_fsdp2.foundry import run_file
    from composer_fsdp2.foundry.cluster import Cluster

    memory_gib = _memory_of(gpu)
    meant = Cluster(ranks=answers.gpus, ranks_per_node=per_node, on_gpus=True)
    rehearsal = rehearsed(run_file.read_run(file, []), meant, plan_only=True)
    forecast = forecast_of(rehearsal, meant)
    search = f"composer-fsdp2 plan {file} --gpus {answers.gpus} --gpu {gpu} --search"
    if forecast is None:
        say("Whether it fits is not known: the model cannot be built here.")
        for finding in rehearsal.findings:
            say(f"[yellow]{escape(finding.what)}[/] {escape(finding.advice)}")
    elif fits(forecast, memory_gib):
        say(verdict(forecast, memory_gib))
    else:
        say(f"[yellow]{verdict(forecast, memory_gib)}[/]\nFind what fits:  {escape(search)}")


def _memory_of(gpu: str) -> float:
    from composer_fsdp2.estimate.clock import gpu_named

    return gpu_named(gpu).memory_gib


def _ask(answers: dict[str, Any]) -> dict[str, Any]:
    """Asks for missing answers, and refuses where there is no terminal."""
    from composer_fsdp2.tools.starter import check_answers

    missing = [name for name, value in answers.items() if value is None]
    if missing and not _is_terminal():
        flags = " ".join(f"--{name} ..." for name in missing)
        raise ConfigError(
            f"No answer for {', '.join(missing)}, and standard input is no terminal. Nobody can be "
            f"asked. Write {flags}"
        )
    check_answers(answers)
    for name in missing:
        while answers[name] is None:
            default, kind = (_local_gpus(), int) if name == "gpus" else (None, str)
            answer = typer.prompt(_QUESTIONS[name], default=default, type=kind, err=True)
            answer = answer.strip() if kind is str else answer
            try:
                check_answers({**answers, name: answer})
            except ConfigError as error:  # the other answers stay
                say(f"[red]{escape(str(error))}[/]")
                continue
            answers[name] = answer
    # Doctor says it again.
    data = answers["data"]
    is_local = data.startswith((".", "/", "~")) or "/" not in data
    if is_local and not Path(data).exists():
        say(f"[yellow]There is no '{escape(data)}' yet. The run cannot start without it.[/]")
    return answers


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _local_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where the run will start.")] = Path(),
) -> None:
    """Write the folder `yamls` into FOLDER: a first run, and ready runs of many models.

    `yamls/quickstart.yaml` is the first run, which needs no GPU and no network. The others are to
    pretrain and fine-tune Llama, Qwen, Gemma, Phi, Mixtral, OLMoE and MPT, with LoRA, DPO,
    distillation, long sequences and tensor parallelism. A file that exists with other content is
    never replaced.

    - `composer-fsdp2 quickstart && composer-fsdp2 train yamls/quickstart.yaml`

    Exit code 0 if the files were written or were there, 2 if another file has one of their names.
    """
    with reported():
        if written := write_quickstart(folder):
            say(f"Wrote {len(written)} files into {escape(str(folder / 'yamls'))}")
        change_folder = "" if folder == Path() else f"cd {escape(str(folder))} && "
        say(f"Next: {change_folder}composer-fsdp2 train yamls/quickstart.yaml")


def write_quickstart(folder: Path) -> list[Path]:
    """Writes the quickstart and the ready runs into `folder/yamls`.

    Returns:
        The paths of the files that were not there before.

    Raises:
        ConfigError: a file of that name exists with other content; nothing is written then.
    """
    # A wheel has the files in the package, a clone beside it.
    packed = Path(__file__).parents[1] / "yamls"
    source = packed if packed.is_dir() else Path(__file__).parents[2] / "yamls"
    contents = {
        folder / "yamls" / path.relative_to(source): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.suffix in (".py", ".yaml")
    }
    missing = [path for path in contents if not path.exists()]
    for path in contents:
        if path not in missing and not (path.is_file() and path.read_bytes() == contents[path]):
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
