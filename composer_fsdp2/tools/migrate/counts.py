"""Keys that count: batches, durations, checkpoints and learning rates, as LLM Foundry writes them.

[Note: batches] Other trainers count the samples of one forward of a rank, and how many forwards
make one step of the optimizer. LLM Foundry counts the samples of a step over all ranks
(`global_train_batch_size`) and of one forward (`device_train_microbatch_size`). The number of ranks
is between them, those that read the same batch taken once. A step is one step of the optimizer in
all of them, and so is a batch (`ba`) of Composer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.group_size import written_group_size
from composer_fsdp2.tools.migrate.report import (
    ADDED,
    CHANGES,
    CONVERTED,
    DECISION,
    NOT_NEEDED,
    RENAMED,
    Context,
    Entry,
    Row,
)
from composer_fsdp2.tools.migrate.shared_rows import is_count

__all__ = [
    "DEEPSPEED_KEYS",
    "DEFAULT_WRITTEN",
    "TRAINING",
    "add_beside",
    "count_rows",
    "finish_counts",
    "optimizer_rows",
]

DEFAULT_WRITTEN = "the default of `TrainingArguments`, written out"

_BATCH, _MICROBATCH = "global_train_batch_size", "device_train_microbatch_size"
_OPTIMIZER, _SCHEDULER = "among the arguments of `optimizer`", "an argument of `scheduler`"
_SCHEDULES = {
    "linear": "linear_decay_with_warmup",
    "cosine": "cosine_with_warmup",
    "constant": "constant_with_warmup",
    "constant_with_warmup": "constant_with_warmup",
}
_DEEPSPEED_SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear_decay_with_warmup",
}
_WARMUPS = ("warmup", "warmed part")
_ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
"""defaults of `TrainingArguments`, which are DeepSpeed's too"""


# --- Values. Docstrings describe them in the tables of the documentation. ---


def _is_number(value: Any) -> bool:
    """A number."""
    try:
        return not isinstance(value, bool) and float(value) >= 0
    except (TypeError, ValueError):
        return False


def _is_whole(value: Any) -> bool:
    """A whole number above 0."""
    return is_count(value) or (isinstance(value, float) and value > 0 and value.is_integer())


def _is_part(value: Any) -> bool:
    """A number between 0 and 1."""
    return isinstance(value, float) and 0 < value < 1


def _is_word(value: Any) -> bool:
    """Another word."""
    return isinstance(value, str) and bool(value)


def _is_path(value: Any) -> bool:
    """A path."""
    return isinstance(value, str) and bool(value)


def _is_adam(value: Any) -> bool:
    """A word that begins with `adamw`."""
    return isinstance(value, str) and value.startswith("adamw")


def _is_adam_in_bits(value: Any) -> bool:
    """A word that begins with `adamw` and ends in `8bit` or `4bit`."""
    return _is_adam(value) and value.endswith(("8bit", "4bit"))


def _is_prefixes(value: Any) -> bool:
    """A name, several with commas between them, or a list of names."""
    return isinstance(value, str | list) and bool(value)


# --- One table for all trainers: what a key counts, and what becomes of it. ---


def _written(name: str, unit: str = "") -> Callable[[Any], dict[str, Any]]:
    """Returns a converter of whole numbers to a setting of LLM Foundry."""
    return lambda value: {name: f"{int(value)}{unit}" if unit else value}


def _interval(name: str) -> tuple[Row, ...]:
    """Returns the rows of a number of steps, or of a part of all steps, between two events."""
    return (
        Row("", RENAMED, f"`{name}`", _is_whole, trainer=_written(name, "ba")),
        Row(
            "",
            RENAMED,
            f"`{name}`, as a part of all steps",
            _is_part,
            trainer=lambda value: {name: f"{value}dur"},
        ),
    )


def _moment(interval: str, every: str) -> tuple[Row, ...]:
    """Returns the rows of a word that says when something happens."""
    return (
        Row("", NOT_NEEDED, f"{every} says how often", ("steps",)),
        Row("", CONVERTED, f"`{interval}`", ("epoch",), trainer={interval: "1ep"}),
    )


_ROWS: Mapping[str, tuple[Row, ...]] = {
    "batch": (Row("", RENAMED, f"`{_BATCH}`", is_count, trainer=_written(_BATCH)),),
    "microbatch": (
        Row(
            "",
            RENAMED,
            f"`{_MICROBATCH}`, the samples of one forward of a rank",
            is_count,
            trainer=_written(_MICROBATCH),
        ),
    ),
    "accumulation": (
        Row("", CONVERTED, f"a factor of `{_BATCH}`, the samples of a step of all ranks", is_count),
    ),
    "evaluated": (
        Row(
            "",
            RENAMED,
            "`device_eval_batch_size`",
            is_count,
            trainer=_written("device_eval_batch_size"),
        ),
    ),
    # Before epochs, which steps outdo.
    "steps": (
        Row(
            "",
            CONVERTED,
            "`max_duration`, in batches (`ba`)",
            is_count,
            trainer=_written("max_duration", "ba"),
        ),
        Row("", NOT_NEEDED, "epochs are counted", (-1, 0)),
    ),
    "epochs": (
        Row(
            "",
            CONVERTED,
            "`max_duration`, in epochs (`ep`) of the data of `train_loader`",
            _is_whole,
            trainer=_written("max_duration", "ep"),
        ),
        Row(
            "",
            DECISION,
            "Composer counts whole epochs; a part of one is written in batches",
            _is_number,
            options=("=1", "write max_duration: <batches>ba"),
        ),
    ),
    "folder": (Row("", RENAMED, "`save_folder`", _is_path, trainer=_written("save_folder")),),
    "saves": _interval("save_interval"),
    "saved": (
        *_moment("save_interval", "`save_interval`"),
        Row("", CONVERTED, "without `save_folder` nothing is saved", ("no", False)),
        Row(
            "",
            DECISION,
            "which checkpoint is the best is known only to a callback",
            ("best",),
            options=("=steps", "=epoch"),
        ),
    ),
    "kept": (
        Row("", NOT_NEEDED, "all checkpoints are kept", (0, -1)),
        Row(
            "",
            RENAMED,
            "`save_num_checkpoints_to_keep`",
            is_count,
            trainer=_written("save_num_checkpoints_to_keep"),
        ),
    ),
    "weights": (
        Row("", NOT_NEEDED, "off is the default", (False,)),
        Row("", RENAMED, "`save_weights_only`", (True,), trainer=_written("save_weights_only")),
    ),
    "evaluates": _interval("eval_interval"),
    "evaluation": (
        *_moment("eval_interval", "`eval_interval`"),
        Row("", NOT_NEEDED, "without `eval_loader` nothing is evaluated", ("no", False)),
    ),
    "logs": (
        Row(
            "",
            RENAMED,
            "`console_log_interval`",
            _is_whole,
            trainer=_written("console_log_interval", "ba"),
        ),
        Row("", CHANGES, "write `console_log_interval` in batches, such as `10ba`", _is_part),
        Row("", NOT_NEEDED, "never", (0,)),
    ),
    "seed": (Row("", RENAMED, "`seed`", _is_number, trainer=_written("seed")),),
    "rate": (Row("", CONVERTED, f"`lr`, {_OPTIMIZER}", _is_number),),
    "decay": (
        Row(
            "",
            CONVERTED,
            f"`weight_decay`, {_OPTIMIZER}: times the rate, which `decoupled_adamw` does not "
            "multiply it with",
            _is_number,
        ),
    ),
    **{name: (Row("", CONVERTED, _OPTIMIZER, _is_number),) for name in _ADAM},
    "warmup": (
        Row("", CONVERTED, f"`t_warmup`, {_SCHEDULER}, in batches", _is_whole),
        Row("", CONVERTED, f"`t_warmup`, {_SCHEDULER}, as a part of all steps", _is_part),
        Row("", NOT_NEEDED, "0 is no warmup", (0, 0.0)),
    ),
    "warmed part": (
        Row("", CONVERTED, f"`t_warmup`, {_SCHEDULER}, as a part of all steps", _is_part),
        Row("", NOT_NEEDED, "0 is no warmup", (0, 0.0)),
    ),
    "schedule": (
        Row("", CONVERTED, "`scheduler`", tuple(_SCHEDULES)),
        Row(
            "",
            DECISION,
            "LLM Foundry has no such schedule",
            _is_word,
            options=("=linear", "=cosine"),
        ),
    ),
    "method": (
        Row(
            "",
            CHANGES,
            "`decoupled_adamw`, with `optimizer_state: {bits: 8}`, which rounds in another way",
            _is_adam_in_bits,
            {"optimizer_state": {"bits": 8}},
        ),
        Row("", CONVERTED, "`decoupled_adamw` computes the same", _is_adam),
        Row("", CHANGES, "write `optimizer` as LLM Foundry has it", _is_word),
    ),
    "frozen": (
        Row(
            "",
            CONVERTED,
            "`disable_grad` of `optimizer`: patterns of names, which LLM Foundry's models begin "
            "with `model.`",
            _is_prefixes,
        ),
    ),
}
"""by what a key counts; rows without a setting have a part in one that `finish_counts` adds"""

TRAINING = {
    "per_device_train_batch_size": "microbatch",
    "gradient_accumulation_steps": "accumulation",
    "per_device_eval_batch_size": "evaluated",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "folder",
    "save_strategy": "saved",
    "save_steps": "saves",
    "save_total_limit": "kept",
    "save_only_model": "weights",
    "eval_strategy": "evaluation",
    "evaluation_strategy": "evaluation",
    "eval_steps": "evaluates",
    "logging_steps": "logs",
    "seed": "seed",
    "learning_rate": "rate",
    "weight_decay": "decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "epsilon",
    "optim": "method",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmed part",
    "lr_scheduler_type": "schedule",
}
"""keys of `TrainingArguments`, and of ROLL's `training_args`, with what they count"""
DEEPSPEED_KEYS = {
    "train_batch_size": "batch",
    "train_micro_batch_size_per_gpu": "microbatch",
    "gradient_accumulation_steps": "accumulation",
    "steps_per_print": "logs",
    "seed": "seed",
}


def count_rows(keys: Mapping[str, str], nothing: Any = (None,)) -> tuple[Row, ...]:
    """Returns the rows of keys that count.

    Args:
        keys: of the dialect, with what they count.
        nothing: values that leave the count to somebody else.
    """
    return tuple(
        replace(row, key=key)
        for key, counted in keys.items()
        for row in (*_ROWS[counted], Row("", NOT_NEEDED, "says no number", nothing))
    )


def _adamw(
    rate: float, betas: Sequence[float], epsilon: float, decay: float, **more: Any
) -> dict[str, Any]:
    """Returns the block of an AdamW, whose decay counts times the rate in other trainers."""
    return {
        "name": "decoupled_adamw",
        "lr": rate,
        "betas": list(betas),
        "eps": epsilon,
        # Of 12 digits, without what is left of the multiplication.
        "weight_decay": float(f"{rate * decay:.12g}"),
        **more,
    }


def _is_deepspeeds(value: Any) -> bool:
    """An Adam or AdamW with a learning rate."""
    params = value.get("params") if isinstance(value, Mapping) else None
    return (
        isinstance(params, Mapping)
        and str(value.get("type")).lower() in ("adam", "adamw")
        and _is_number(params.get("lr"))
        and all(_is_number(params.get(name, 0)) for name in ("eps", "weight_decay"))
        and isinstance(params.get("betas", []), list)
        # Decay of an Adam that is no AdamW is a part of the gradient.
        and (params.get("adam_w_mode") is not False or not float(params.get("weight_decay", 0)))
    )


def _from_deepspeed(value: Mapping[str, Any]) -> dict[str, Any]:
    params = value["params"]
    betas = params.get("betas", [_ADAM["beta1"], _ADAM["beta2"]])
    rest = (params.get("eps", _ADAM["epsilon"]), params.get("weight_decay", 0))
    return {"optimizer": _adamw(float(params["lr"]), betas, *map(float, rest))}


def optimizer_rows(key: str) -> tuple[Row, ...]:
    """Returns the row of DeepSpeed's block of an optimizer that LLM Foundry has."""
    reason = "`decoupled_adamw`, whose decay is not multiplied with the rate"
    return (Row(key, CONVERTED, reason, _is_deepspeeds, trainer=_from_deepspeed),)


# --- Settings that follow from several keys. ---


def finish_counts(
    context: Context,
    keys: Mapping[str, str],
    ranks: int | None = None,
    *,
    around: bool = False,
    scheduler: Entry | None = None,
) -> None:
    """Adds settings that follow from several keys: the batch of all ranks, optimizer, scheduler.

    What is left to the user keeps its value here, so that nothing is written in its place.

    Args:
        context: entries of the place that holds the settings.
        keys: of the dialect, with what they count.
        ranks: of the run, where the context does not know them.
        around: whether the keys stand around the site instead of in it.
        scheduler: entry of DeepSpeed's block of a scheduler, which the trainer prefers to its own.
    """
    values, entries = dict[str, Any](), dict[str, Entry]()
    for key, counted in keys.items():
        value = context.around(key)[1] if around else context.value(key)
        row = next((row for row in _ROWS[counted] if row.matches(value)), None)
        if row is not None and row.status is not NOT_NEEDED:
            values[counted] = value
        if key in context.entries:
            entries[counted] = context.entries[key]
    is_saved = values.get("saved") not in ("no", False)
    # What a key says goes where another one has the last word.
    pairs = [("steps", "epochs"), ("saved", "saves"), ("evaluation", "evaluates")]
    pairs += [] if is_saved else [("saved", "saves"), ("saved", "folder")]
    for first, second in pairs:
        last, other = entries.get(first), entries.get(second)
        if last and other and other.beside and (last.beside or not is_saved):
            other.beside.clear()
            other.become(NOT_NEEDED, f"`{last.path[-1]}: {last.value}` has the last word")
    if "folder" in values and "saves" not in values and values.get("saved", "steps") == "steps":
        add_beside(context, DEFAULT_WRITTEN, save_interval="500ba")
    if "batch" not in values:
        _add_batch(context, values, context.world_size or ranks)
    _add_optimizer(context, values)
    if not {"rate", *_WARMUPS, "schedule"}.isdisjoint(values):
        _add_scheduler(context, values, entries, scheduler)


def _add_scheduler(
    context: Context,
    values: Mapping[str, Any],
    entries: Mapping[str, Entry],
    of_deepspeed: Entry | None,
) -> None:
    """Adds the scheduler; keys of which the trainer reads nothing are no longer needed."""
    word = str(values.get("schedule", "linear")).lower()
    name, warmup = _SCHEDULES.get(word), values.get("warmup", values.get("warmed part", 0))
    unread, reason = (), ""
    if of_deepspeed is not None and isinstance(of_deepspeed.value, Mapping):
        block = of_deepspeed.value.get("params") or {}
        params: Mapping[str, Any] = block if isinstance(block, Mapping) else {}
        steps = params.get("warmup_num_steps", "auto")
        word = str(of_deepspeed.value.get("type"))
        highest = params.get("warmup_max_lr", "auto")
        # DeepSpeed's rate rises from 0 to the trainer's, in a number of steps.
        is_from_zero = (
            params is block
            and params.get("warmup_min_lr", "auto") in ("auto", 0)
            and (highest == "auto" or highest == values.get("rate"))
            and (steps == "auto" or steps == 0 or is_count(steps))
        )
        name = _DEEPSPEED_SCHEDULES.get(word) if is_from_zero else None
        warmup = warmup if steps == "auto" else steps
        unread = ("schedule",) if name and steps == "auto" else ("schedule", *_WARMUPS)
        reason = f"`{of_deepspeed.key}` has the last word"
        if name and params.get("warmup_type") != "linear" and warmup:
            told = "`scheduler`; the rate rises in a line here, and with a logarithm there"
            of_deepspeed.become(CHANGES, told)
        elif name:
            of_deepspeed.become(CONVERTED, "`scheduler`")
    elif word == "constant":
        unread, warmup, reason = _WARMUPS, 0, "`constant` has no warmup"
    for counted in unread:
        if counted in entries:
            entries[counted].become(NOT_NEEDED, reason)
    if name:
        block = {
            "name": name,
            "t_warmup": f"{warmup}dur" if 0 < warmup < 1 else f"{int(warmup)}ba",
        }
        reason = "how the learning rate rises and falls, one batch later than in other trainers"
        add_beside(context, reason, scheduler=block)


def add_beside(context: Context, reason: str, **beside: Any) -> None:
    """Adds keys of LLM Foundry beside the settings of FSDP2."""
    path = (*context.site.parent, ", ".join(beside))
    context.added.append(Entry(path, None, ADDED, reason, beside=beside))


def _tell(context: Context, setting: str, value: str, reason: str) -> None:
    """Says what to write where the file does not say enough to write it."""
    context.added.append(Entry((*context.site.parent, setting), value, CHANGES, reason))


def _add_batch(context: Context, values: Mapping[str, Any], ranks: int | None) -> None:
    """Adds the samples of a step of all ranks, or says how they are worked out.

    See [Note: batches].
    """
    microbatch, forwards = values.get("microbatch"), values.get("accumulation", 1)
    if microbatch is None and "accumulation" not in values:
        return
    settings = {k: v for e in context.entries.values() for k, v in e.settings.items()}
    settings |= {k: v for e in context.added for k, v in e.settings.items()}
    group = written_group_size(settings)
    if microbatch is not None and ranks is not None and ranks % group == 0:
        reason = f"{microbatch} samples x {forwards} forwards x {ranks // group} ranks"
        reason += f"; {group} ranks read the same samples" if group > 1 else ""
        add_beside(context, reason, **{_BATCH: microbatch * forwards * (ranks // group)})
        return
    samples = "samples of one forward" if microbatch is None else microbatch
    _tell(
        context,
        _BATCH,
        f"{samples} x {forwards} x {ranks or 'ranks'}{f' / {group}' if group > 1 else ''}",
        "write the number; `--world-size N` does it where the file says the samples of one forward",
    )


def _add_optimizer(context: Context, values: Mapping[str, Any]) -> None:
    prefixes = values.get("frozen", [])
    names = prefixes.split(",") if isinstance(prefixes, str) else prefixes
    # LLM Foundry holds the model in an attribute `model`, and looks for each pattern in a name:
    # https://github.com/mosaicml/llm-foundry/blob/v0.22.0/llmfoundry/utils/builders.py#L401
    patterns = [rf"^model\.{re.escape(str(name).strip())}" for name in names]
    frozen: dict[str, Any] = {"disable_grad": patterns} if patterns else {}
    if "rate" not in values or not _is_adam(values.get("method", "adamw")):
        if frozen:
            _tell(context, "optimizer.disable_grad", str(patterns), "write it, with an optimizer")
        return
    adam = {name: float(values.get(name, default)) for name, default in _ADAM.items()}
    betas, decay = (adam["beta1"], adam["beta2"]), float(values.get("decay", 0))
    # https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/trainer.py#L1189
    groups = [{"param_str_match": r"bias|norm|\bln_", "weight_decay": 0.0}]
    more = {"param_groups": groups} | frozen if decay else frozen
    block = _adamw(float(values["rate"]), betas, adam["epsilon"], decay, **more)
    reason = "AdamW with what the file says, or the defaults of its trainer"
    reason += "; biases and norms have no decay there either" if decay else ""
    add_beside(context, reason, optimizer=block)
