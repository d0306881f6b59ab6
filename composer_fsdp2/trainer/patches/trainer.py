"""Rows of Composer's Trainer and State: settings, preparation, the step, evaluation."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from composer_fsdp2.trainer.patches.engine import (
    CORE,
    Asked,
    Feature,
    PatchPoint,
    check_features,
    imported,
)

__all__ = ["TRAINER_ROWS"]

_VERSIONS = "mosaicml 0.32.1"
_UPSTREAM = "https://github.com/mosaicml/composer/blob/v0.32.1/composer"
_TRAINER = "composer.trainer.trainer"
_MICROBATCHING = "composer_fsdp2.trainer.auto_microbatching"
_GROUPS = "composer_fsdp2.trainer.parallelism.tensor_groups"
_UNEQUAL = "composer_fsdp2.trainer.uneven_batches"

_AUTO = Feature(
    "device_train_microbatch_size: auto",
    "Write a number of samples for device_train_microbatch_size.",
    lambda given: given.microbatch_size == "auto",
)
_TENSOR = Feature(
    "tensor_parallel",
    "Take 'tp' out of parallelism_config.",
    lambda given: (
        (given.settings.tensor_parallel, given.settings.sequence_parallel) != (None, None)
    ),
)
_EVALUATION = Feature(
    "Evaluation of a model sharded with FSDP2",
    "Save a checkpoint and evaluate without parallelism_config, and leave out eval_dataloader.",
)
_PREDICTION = Feature(
    "Trainer.predict with a model sharded with FSDP2",
    "Save a checkpoint and predict without parallelism_config.",
)


def _parse_parallelism_config(original: Any, trainer: Any, parallelism_config: Any) -> Any:
    from composer_fsdp2.trainer.compile_once import check_compiled_once
    from composer_fsdp2.trainer.config import (
        concerns_fsdp2,
        parse_parallelism_config,
        resolve_settings,
    )
    from composer_fsdp2.trainer.extensions import check_extensions, given_of
    from composer_fsdp2.trainer.parallelism.refused import check_items

    if not concerns_fsdp2(parallelism_config):
        return original(trainer, parallelism_config)
    parsed = parse_parallelism_config(parallelism_config)
    if parsed is not None and parsed.fsdp2 is not None:
        check_extensions(trainer)
        given = given_of(trainer)
        check_items(resolve_settings(parsed.fsdp2), given.items, given.microbatch_size)
        check_features(
            Asked(
                items=given.items,
                microbatch_size=given.microbatch_size,
                settings=parsed.fsdp2,
            )
        )
        check_compiled_once(trainer, parsed.fsdp2)
    return parsed


def _parallelize_composer_model(
    _original: Any, composer_model: Any, optimizer: Any, config: Any, precision: Any = None
) -> None:
    from composer_fsdp2.trainer.prepare import prepare_fully_shard

    prepare_fully_shard(composer_model, optimizer, config, precision)


def _init(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
    from composer_fsdp2.trainer.auto_microbatching import strip_auto_microbatch_size
    from composer_fsdp2.trainer.autoresume import note_autoresume
    from composer_fsdp2.trainer.config import concerns_fsdp2
    from composer_fsdp2.trainer.extensions import note_extensions
    from composer_fsdp2.trainer.parallelism.tensor_groups import deal_to_groups

    try:
        given = inspect.signature(original).bind(trainer, *args, **kwargs)
    except TypeError:
        given = None  # Python says it about the original
    if given is None or not concerns_fsdp2(given.arguments.get("parallelism_config")):
        original(trainer, *args, **kwargs)
        return
    note_extensions(trainer, given.arguments)
    deal_to_groups(given.arguments)
    with strip_auto_microbatch_size(original, trainer, args, kwargs) as given:
        note_autoresume(original, *given.args, **given.kwargs)


def _wrap_model(original: Any, trainer: Any, model: Any, optimizers: Any) -> None:
    from composer.utils import ensure_tuple

    from composer_fsdp2.optim.lion_state import save_lions_as_text
    from composer_fsdp2.trainer.autoresume import settle_autoresume
    from composer_fsdp2.trainer.save import check_saved_adapters, note_start

    if trainer.state.fsdp_config_version != 2:
        original(trainer, model, optimizers)
        return
    note_start(trainer.state)
    save_lions_as_text(ensure_tuple(optimizers))
    check_saved_adapters(trainer.state)
    settle_autoresume(original, trainer, model, optimizers)


def _apply_fsdp(original: Any, state: Any) -> None:
    from composer_fsdp2.trainer.algorithms import move_averages
    from composer_fsdp2.trainer.callbacks import start_memory_records

    original(state)
    if state.fsdp_config_version == 2:
        move_averages(state)
        start_memory_records(state)


def _train_loop(original: Any, trainer: Any) -> None:
    from composer_fsdp2.guards.explain import explained_reading
    from composer_fsdp2.step.run import run_of
    from composer_fsdp2.trainer.auto_microbatching import leaving_together
    from composer_fsdp2.trainer.parallelism.tensor_groups import begin_fit
    from composer_fsdp2.trainer.uneven_batches import train_loop

    begin_fit(trainer.state)
    model = trainer.state.model
    reading = explained_reading() if run_of(model) else contextlib.nullcontext()
    with reading, leaving_together(trainer):
        train_loop(original, trainer)


def _train_microbatches(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.step.run import run_of
    from composer_fsdp2.trainer.uneven_batches import train_microbatches

    sharding = run_of(trainer.state.model)
    with sharding.accumulation.batch() if sharding else contextlib.nullcontext():
        return train_microbatches(original, trainer, *args, **kwargs)


def _train_microbatch(
    original: Any,
    trainer: Any,
    use_grad_scaling: bool,
    current_batch_size: Any,
    is_final_microbatch: bool,
) -> Any:
    from composer_fsdp2.guards.explain import explained
    from composer_fsdp2.step.run import run_of
    from composer_fsdp2.trainer.uneven_batches import train_microbatch

    sharding = run_of(trainer.state.model)
    if sharding is None:
        return train_microbatch(
            original, trainer, use_grad_scaling, current_batch_size, is_final_microbatch
        )
    last = sharding.accumulation.microbatch(last=is_final_microbatch)
    with explained(sharding), last:
        return train_microbatch(
            original, trainer, use_grad_scaling, current_batch_size, is_final_microbatch
        )


def _evaluate(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.guards.explain import explained
    from composer_fsdp2.step.run import run_of

    sharding = run_of(trainer.state.model)
    if sharding is None:
        return original(trainer, *args, **kwargs)
    with explained(sharding), sharding.evaluating():
        return original(trainer, *args, **kwargs)


def _eval_loop(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer import auto_microbatching, uneven_batches
    from composer_fsdp2.trainer.parallelism.tensor_groups import check_evaluation

    evaluator = inspect.signature(original).bind(trainer, *args, **kwargs).arguments["evaluator"]
    check_evaluation(trainer.state.model, evaluator)
    auto = functools.partial(auto_microbatching.evaluate, original)
    even = functools.partial(uneven_batches.evaluate, auto)
    with auto_microbatching.leaving_together(trainer, evaluator):
        return _evaluate(even, trainer, *args, **kwargs)


def _predict(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.parallelism.tensor_groups import deal_later

    given = inspect.signature(original).bind(trainer, *args, **kwargs)
    deal_later(trainer.state.model, given.arguments["dataloader"])
    return _evaluate(original, trainer, *args, **kwargs)


def _fit(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    from composer_fsdp2.trainer.parallelism.tensor_groups import deal_later

    given = inspect.signature(original).bind(trainer, *args, **kwargs)
    deal_later(trainer.state.model, given.arguments.get("train_dataloader"))
    return original(trainer, *args, **kwargs)


def _is_sharded(trainer: Any, *_args: Any, **_kwargs: Any) -> bool:
    from composer_fsdp2.step.run import run_of

    return run_of(trainer.state.model) is not None


def _row(
    target: str,
    replacement: Callable[..., Any],
    fingerprint: str,
    why: str,
    lines: str,
    feature: Feature = CORE,
) -> PatchPoint:
    return PatchPoint(
        target=target,
        replacement=replacement,
        feature=feature,
        why=why,
        upstream=f"{_UPSTREAM}/{lines}",
        fingerprints=frozenset({fingerprint}),
        versions=_VERSIONS,
    )


TRAINER_ROWS: tuple[PatchPoint, ...] = (
    _row(
        f"{_TRAINER}:Trainer._parse_parallelism_config",
        _parse_parallelism_config,
        "510a4ea0ad5762b0",
        "reads only the keys fsdp and tp, so that fsdp2 and a misspelt key become plain DDP",
        "trainer/trainer.py#L3750",
    ),
    _row(
        "composer.distributed.prepare_distributed:parallelize_composer_model",
        _parallelize_composer_model,
        "19c74c0eabbbbc2f",
        "wraps without the root, refuses ties, drops optimizer state and knows only CUDA",
        "distributed/prepare_distributed.py#L198",
    ),
    _row(
        f"{_TRAINER}:Trainer.__init__",
        _init,
        "033af637c4b54cb2",
        "refuses `device_train_microbatch_size: auto` and tells nobody of autoresume",
        "trainer/trainer.py#L1003",
    ),
    _row(
        f"{_TRAINER}:Trainer._wrap_model_for_distributed",
        _wrap_model,
        "2435a98fc7f5dec4",
        "is the last step before autoresume follows a link that may point to a damaged checkpoint",
        "trainer/trainer.py#L1775",
    ),
    _row(
        "composer.core.state:State._apply_fsdp",
        _apply_fsdp,
        "41fdeca275a7b6f1",
        "leaves averages of weights with whole tensors, and does not start to record memory",
        "core/state.py#L1338",
    ),
    _row(
        f"{_TRAINER}:Trainer._train_loop",
        _train_loop,
        "71c0fc0ce3b828a4",
        "lets ranks run different numbers of microbatches, and wait for each other for ever",
        "trainer/trainer.py#L2383",
    ),
    _row(
        f"{_TRAINER}:Trainer._iter_dataloader",
        imported(_UNEQUAL, "iterate"),
        "05e8c2ab73c107bd",
        "says nothing of data left out because that of another rank has ended",
        "trainer/trainer.py#L3594",
    ),
    PatchPoint(
        target="composer.core.state:_create_device_mesh",
        replacement=imported(_GROUPS, "create_mesh"),
        feature=_TENSOR,
        why="builds a mesh without the axis of tensor parallelism",
        upstream=f"{_UPSTREAM}/core/state.py#L175",
        takes=frozenset({"device", "fsdp_config", "tp_config"}),
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_TRAINER}:Trainer._accumulate_time_across_ranks",
        replacement=imported(_GROUPS, "counted_once"),
        feature=_TENSOR,
        why="counts samples and tokens once for each rank of a tensor group",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2347",
        takes=frozenset({"num_samples", "num_tokens"}),
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_TRAINER}:Trainer.fit",
        replacement=_fit,
        feature=_TENSOR,
        why="takes data that a sampler dealt to single ranks for that of groups",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1933",
        takes=frozenset({"train_dataloader"}),
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_TRAINER}:dist",
        replacement=imported("composer_fsdp2.trainer.parallelism.group_views", "DealsToGroups"),
        feature=_TENSOR,
        why="takes samples that a sampler repeated off single ranks of a tensor group",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L1",
        fingerprints=frozenset({"960e706755b76e86"}),
        source=_TRAINER,
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_TRAINER}:Trainer._train_microbatches",
        replacement=_train_microbatches,
        feature=CORE,
        why="leaves gradients of a batch that failed half way to the next one",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2779",
        takes=frozenset({"microbatches"}),
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_TRAINER}:Trainer._train_microbatch",
        replacement=_train_microbatch,
        feature=CORE,
        why="tells only DDP which microbatch is the last one",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L2870",
        takes=frozenset({"is_final_microbatch"}),
        versions=_VERSIONS,
    ),
    PatchPoint(
        target=f"{_TRAINER}:Trainer._eval_loop",
        replacement=_eval_loop,
        feature=_EVALUATION,
        why="gathers as training does, and leaves ranks waiting for one that runs out of memory",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3314",
        takes=frozenset({"evaluator"}),
        versions=_VERSIONS,
        refused=_is_sharded,
    ),
    PatchPoint(
        target=f"{_TRAINER}:Trainer.predict",
        replacement=_predict,
        feature=_PREDICTION,
        why="has no other choice between memory and gathers than training has",
        upstream=f"{_UPSTREAM}/trainer/trainer.py#L3016",
        takes=frozenset({"dataloader"}),
        versions=_VERSIONS,
        refused=_is_sharded,
    ),
    _row(
        f"{_TRAINER}:Trainer._train_batch",
        imported(_MICROBATCHING, "train_batch"),
        "79220c70cf066a13",
        "leaves ranks waiting for one that runs out of memory under FSDP2",
        "trainer/trainer.py#L2636",
        _AUTO,
    ),
    _row(
        f"{_TRAINER}:_readd_fsdp_sync_hooks",
        imported(_MICROBATCHING, "guard_again"),
        "fe056f15fc39d5a9",
        "keeps the ranks of FSDP1 together alone",
        "trainer/trainer.py#L429",
        _AUTO,
    ),
    _row(
        f"{_TRAINER}:patch_unshard_for_automicrobatching",
        imported(_MICROBATCHING, "restore_unshard"),
        "2d51024db35f2770",
        "restores a function of FSDP1 which it keeps on older torch alone",
        "trainer/_patch_pytorch.py#L23",
        _AUTO,
    ),
    _row(
        f"{_TRAINER}:_update_num_consecutive_thrashes",
        imported(_MICROBATCHING, "count_thrashes"),
        "eee383ef46fa85e9",
        "trains twice on a batch in which allocations were tried again",
        "trainer/trainer.py#L400",
        _AUTO,
    ),
    _row(
        f"{_TRAINER}:_clear_incomplete_train_states",
        imported(_MICROBATCHING, "clear_attempt"),
        "4cbb94b52229e0a1",
        "leaves an aborted FSDP2 step, the optimizer's state and random states as they are",
        "trainer/trainer.py#L328",
        _AUTO,
    ),
)
