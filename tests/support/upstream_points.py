"""Twenty-four things Composer's own FSDP2 path gets wrong, and the tests that show them right here.

`upstream_page` writes the page on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One finding: what goes wrong upstream, and the tests or the benchmark that show it right."""

    number: int
    text: str
    tests: tuple[str, ...]
    benchmark: str = ""


_D, _U = "tests/dist/", "tests/unit/"

POINTS = (
    Point(
        1,
        "a full checkpoint read by rank 0 alone reaches rank 0's shards only",
        (f"{_D}test_trainer_checkpoints.py::test_weights_read_by_rank0_alone_reach_every_rank",),
    ),
    Point(
        2,
        "the key fsdp2 of a parallelism_config, or a misspelt one, gives plain data parallel",
        (
            f"{_D}test_trainer.py::test_every_way_in_gives_fsdp2",
            f"{_D}test_trainer.py::test_a_misspelt_version_is_an_error",
        ),
    ),
    Point(
        3,
        "a mesh or a replicate degree is replaced by one axis over all ranks",
        (
            f"{_D}test_trainer.py::test_hsdp_mesh_reaches_the_trainer",
            f"{_D}test_trainer.py::test_four_ranks_train_like_one_process",
            f"{_D}test_upstream.py::test_the_mesh_of_composers_config_reaches_the_trainer",
        ),
    ),
    Point(
        4,
        "parameters outside every wrapped module are neither sharded nor averaged",
        (
            f"{_D}test_upstream.py::test_parameters_outside_every_child_that_is_a_unit",
            f"{_D}test_upstream.py::test_the_root_of_a_plain_module_is_a_unit",
        ),
    ),
    Point(
        5,
        "ranks that start from other seeds train a patchwork of their weights",
        (f"{_D}test_initial_weights.py::test_rank_0_wins",),
    ),
    Point(
        6,
        "adaptive clipping takes a shard's norm for the whole",
        (
            f"{_D}test_algorithms.py::test_adaptive_clipping",
            f"{_D}test_algorithms.py::test_adaptive_clipping_on_four_ranks",
        ),
    ),
    Point(
        7,
        "OptimizerMonitor logs norms of the local shard",
        (f"{_D}test_callbacks.py::test_norms_are_those_of_whole_tensors",),
    ),
    Point(
        8,
        "a model on meta on every rank gets the same random rows in every shard",
        (
            f"{_D}test_initial_weights.py::test_all_on_meta",
            f"{_D}test_initial_weights.py::test_weights_do_not_depend_on_the_number_of_ranks",
        ),
    ),
    Point(
        9,
        "from meta, rotary tables and norms are left as uninitialised memory",
        (
            f"{_D}test_initial_weights.py::test_rotary_tables_and_pad_row",
            f"{_D}test_initial_weights.py::test_llama_from_meta_trains",
            f"{_D}test_initial_weights.py::test_what_nothing_initialises_is_named",
        ),
    ),
    Point(
        10,
        "two parameters over one memory are untied",
        (
            f"{_D}test_parity.py::test_ties",
            f"{_U}plan/test_planner.py::test_table_of_every_layout_of_ties",
        ),
    ),
    Point(
        11,
        "FSDP1 settings, and misspelt ones, are dropped with a warning",
        (
            f"{_D}test_bad_input.py::test_wrong_settings",
            f"{_D}test_units.py::test_fsdp1_strategies",
            f"{_U}config/test_fsdp1.py::test_keys_that_would_change_the_run_are_refused",
        ),
    ),
    Point(
        12,
        "state an optimizer has already is thrown away",
        (
            f"{_D}test_optimizer.py::test_state_goes_on",
            f"{_D}test_optimizer.py::test_state_goes_on_on_four_ranks",
        ),
    ),
    Point(
        13,
        "attributes and hooks of parameters are lost",
        (
            f"{_D}test_optimizer.py::test_attributes_stay_on_parameters",
            f"{_D}test_optimizer.py::test_post_accumulate_hooks_stay_and_are_called_once",
            f"{_D}test_optimizer.py::test_tensor_hooks_are_refused_by_name",
        ),
    ),
    Point(
        14,
        "activation checkpointing without a function that chooses wraps nothing",
        (
            f"{_D}test_trainer.py::test_activation_checkpointing_changes_nothing",
            f"{_U}prepare/test_rules.py::test_neither_hook_nor_blocks_is_an_error",
        ),
    ),
    Point(
        15,
        "summon_full_params does nothing",
        (
            f"{_D}test_summon.py::test_any_sequence_of_operations",
            f"{_D}test_summon.py::test_fsdp1s_method_is_led_here",
        ),
    ),
    Point(
        16,
        "a tie across two wrapped modules is refused instead of moved to their parent",
        (
            f"{_D}test_parity.py::test_ties",
            f"{_D}test_parity.py::test_composer_models",
            f"{_D}test_models.py::test_family_trains_like_one_process",
        ),
    ),
    Point(
        17,
        "unequal numbers of microbatches hang until the timeout",
        (
            f"{_D}test_uneven_batches.py::test_trains_like_one_process",
            f"{_D}test_uneven_batches.py::test_evaluation",
        ),
    ),
    Point(
        18,
        "a model on meta on every rank needs CUDA",
        (
            f"{_D}test_initial_weights.py::test_all_on_meta",
            f"{_D}test_upstream.py::test_a_model_on_meta_everywhere_trains_in_the_trainer",
        ),
    ),
    Point(
        19,
        "device_train_microbatch_size: auto is refused",
        (
            f"{_D}test_out_of_memory.py::"
            "test_the_trainer_ends_with_the_weights_of_a_run_of_that_size",
        ),
    ),
    Point(
        20,
        "a full checkpoint and a sharded run do not fit, nor the reverse",
        (f"{_D}test_fsdp1_checkpoints.py::test_every_fixture_into_every_run",),
    ),
    Point(
        21,
        "a file half written when the run was killed stops autoresume",
        (
            f"{_D}test_faults.py::test_all_ranks_killed_in_a_save",
            f"{_D}test_checkpoint_saves.py::test_autoresume_passes_over_a_bad_checkpoint",
        ),
    ),
    Point(
        22,
        "methods other than forward compute with shards",
        (
            f"{_D}test_units.py::test_forward_methods",
            f"{_D}test_trainer.py::test_evaluates_before_any_training",
        ),
    ),
    Point(
        23,
        "settings in a ParallelismConfig or of one unit, scalars and a second wrapping raise "
        "without naming the cure",
        (
            f"{_D}test_trainer.py::test_every_way_in_gives_fsdp2",
            f"{_D}test_units.py::test_mixed_precision_of_one_unit",
            f"{_D}test_bad_input.py::test_scalar_parameter",
            f"{_D}test_bad_input.py::test_applying_twice",
            f"{_U}prepare/test_rules.py::test_strategies_of_torch_are_understood_too",
        ),
    ),
    Point(
        24,
        "preparing is quadratic in the number of parents of wrapped modules",
        (f"{_U}plan/test_planner.py::test_every_rule_is_asked_once_for_every_module",),
        benchmark="benchmarks/prepare.py",
    ),
)


def describe_points() -> str:
    """Returns the table as Markdown."""
    lines = ["| # | in Composer 0.32.1 | here |", "|---|---|---|"]
    for point in POINTS:
        shown = [f"`{name}`" for name in (*point.tests, point.benchmark) if name]
        lines.append(f"| {point.number} | {point.text} | {'<br>'.join(shown)} |")
    return "\n".join(lines)
