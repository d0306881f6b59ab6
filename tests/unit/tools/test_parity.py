"""Two runs compared, without a process: configurations, arithmetic, text, refusals."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from composer_fsdp2.cli import launch, main
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.tools.migrate.engine import migrate
from composer_fsdp2.tools.parity import (
    SHORT,
    TOLERANCES,
    WRITERS,
    Job,
    RunComparison,
    Speed,
    Step,
    check_same,
    differences,
    overrides_for,
    plan_jobs,
    read_peaks,
    read_steps,
    relative_difference,
    tolerance_for,
)
from composer_fsdp2.tools.pictures import comparison_picture, write_figure

ROOT = Path(__file__).parents[3]
NAN, INF = math.nan, math.inf


def steps_of(*values: tuple[float, float]) -> tuple[Step, ...]:
    return tuple(Step(number, *pair) for number, pair in enumerate(values, start=1))


def compared(old: Any, new: Any, tolerance: float = 1e-5) -> RunComparison:
    return RunComparison(steps_of(*old), steps_of(*new), tolerance)


# --- Arithmetic. ---


@pytest.mark.table(
    "2.0-1.0-0.5",
    "1.0-2.0-0.5",
    "-1.0-1.0-2.0",
    "0.0-0.0-0.0",
    "0.0-1e-30-1.0",
    "nan-nan-0.0",
    "inf-inf-0.0",
    "inf--inf-inf",
    "nan-1.0-inf",
    "1.0-nan-inf",
    "inf-1.0-inf",
    "nan-inf-inf",
)
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (2.0, 2.0, 0.0),
        (2.0, 1.0, 0.5),
        (1.0, 2.0, 0.5),
        (-1.0, 1.0, 2.0),
        (0.0, 0.0, 0.0),
        (0.0, 1e-30, 1.0),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (INF, -INF, INF),
        (NAN, 1.0, INF),
        (1.0, NAN, INF),
        (INF, 1.0, INF),
        (NAN, INF, INF),
    ],
)
def test_relative_difference(old, new, expected):
    assert relative_difference(old, new) == expected


def test_the_largest_difference_and_its_step():
    found = compared([(1, 1), (1, 4), (2, 8)], [(1, 1), (1, 3), (1, 6)])
    assert found.largest("loss") == (0.5, 3)
    assert found.largest("gradient_norm") == (0.25, 2)


@pytest.mark.parametrize(
    ("new", "within"),
    [
        ((1.0, 1.0), True),
        ((0.75, 1.0), True),
        ((1.0, 0.75), True),
        ((0.74, 1.0), False),
        ((1.0, 0.74), False),
        ((NAN, 1.0), False),
        ((1.0, INF), False),
    ],
)
def test_both_quantities_decide_and_the_tolerance_itself_passes(new, within):
    assert compared([(1.0, 1.0)], [new], tolerance=0.25).within is within


def test_a_run_without_difference_passes_with_tolerance_zero():
    assert compared([(1.5, 2.5)], [(1.5, 2.5)], tolerance=0.0).within


def test_not_finite_in_both_is_no_difference_but_is_said():
    found = compared([(1, 1), (NAN, NAN)], [(1, 1), (NAN, NAN)])
    assert found.within
    assert "not finite at 1 of the steps, first at 2" in "\n".join(found.verdict(""))


def test_every_precision_of_composer_has_a_tolerance():
    from composer.core import Precision

    assert {precision.value for precision in Precision} == TOLERANCES.keys()
    assert tolerance_for("fp32") < tolerance_for("amp_bf16")


def test_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match=r"'fp64'.*--tolerance"):
        tolerance_for("fp64")


def test_steps_are_read_as_far_as_they_are_written(tmp_path):
    file = tmp_path / "steps.jsonl"
    assert read_steps(file) == ()
    line = {"number": 3, "loss": NAN, "gradient_norm": 1.25}
    file.write_text(json.dumps(line) + "\n")
    (step,) = read_steps(file)
    assert (step.number, step.gradient_norm) == (3, 1.25)
    assert math.isnan(step.loss)
    file.write_text(json.dumps(line) + '\n{"number": 4, "lo')
    assert len(read_steps(file)) == 1


def timed(*seconds: float) -> tuple[Step, ...]:
    """Steps of 60 tokens."""
    return tuple(Step(number, 1.0, 1.0, s, 60) for number, s in enumerate(seconds, start=1))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((90.0, 9.0, 9.0, 1.0, 5.0, 3.0, 2.0, 4.0), (2.0, 3.0, 4.0, 300 / 15)),
        ((90.0, 9.0, 9.0, 2.0), (2.0, 2.0, 2.0, 30.0)),
        ((90.0, 9.0, 3.0), (3.0, 3.0, 3.0, 20.0)),
        ((6.0,), (6.0, 6.0, 6.0, 10.0)),
    ],
)
def test_speed_after_the_warm_up_or_of_the_last_step(seconds, expected):
    assert Speed.of(timed(*seconds)) == Speed(*expected)


def test_peaks_of_a_run_that_wrote_none(tmp_path):
    assert read_peaks(tmp_path / "memory.json") == ()
    (tmp_path / "memory.json").write_text("[5, 7]")
    assert read_peaks(tmp_path / "memory.json") == (5, 7)


# --- Text, JSON, CSV, picture. ---


PEAKS = ((4 * 1024**3, 3 * 1024**3), (2 * 1024**3, 3 * 1024**3))
MEASURED = RunComparison(timed(9, 9, 9, 2, 4, 6), timed(9, 9, 9, 1, 2, 3), 1e-5, PEAKS)


def test_speed_and_memory_as_text():
    head, _, *rows = MEASURED.performance()
    assert head == "Speed after 3 of 6 steps, and memory:"
    assert [row.split() for row in rows] == [
        ["seconds", "a", "step,", "median", "4", "2", "0.500"],
        ["seconds", "a", "step,", "lower", "quartile", "3", "1.5", "0.500"],
        ["seconds", "a", "step,", "upper", "quartile", "5", "2.5", "0.500"],
        ["tokens", "a", "second", "15", "30", "2.000"],
        ["peak", "memory,", "rank", "0", "4", "GiB", "2", "GiB", "0.500"],
        ["peak", "memory,", "rank", "1", "3", "GiB", "3", "GiB", "1.000"],
    ]
    assert max(map(len, rows)) <= 100


def test_speed_and_memory_as_json():
    found = MEASURED.as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["within"] is True
    assert found["warm_up_steps"] == 3
    assert found["speed"]["new"] == {
        "lower_quartile": 1.5,
        "median": 2,
        "upper_quartile": 2.5,
        "tokens_per_second": 30,
    }
    assert found["peak_bytes"] == {"old": list(PEAKS[0]), "new": list(PEAKS[1])}
    assert found["steps"][3]["seconds"] == {"old": 2, "new": 1}


def test_speed_and_memory_in_the_picture():
    pytest.importorskip("matplotlib", reason="needs the extra foundry")
    names = ("old: DDP", "new: FSDP2")
    above, below, *_ = comparison_picture(MEASURED, names).get_axes()
    curves = [list(line.get_ydata()) for line in above.lines]
    assert curves == [[2, 4, 6], [1, 2, 3]]
    assert [bar.get_height() for bar in below.patches] == [4, 3, 2, 3]
    plain = compared([(1.0, 2.0)], [(1.0, 2.0)])
    assert len(comparison_picture(plain, names).get_axes()) == 4


def test_the_table_fits_in_100_columns_and_marks_what_is_beyond():
    old = [(-8.123456e-10, 1.0), (1.0, 123456789.0)]
    found = compared(old, [(-8.123456e-10, 2.0), (1.0, NAN)])
    lines = found.table()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["loss", "gradient", "norm"]
    assert lines[1].split() == ["step", *["old", "new", "relative"] * 2]
    assert lines[2].split()[-1] == "5.0e-01*"
    assert lines[3].split()[-3:] == ["1.23457e+08", "nan", "inf*"]


def test_a_long_run_shows_some_steps_and_the_worst():
    old = [(1.0, 1.0)] * 1000
    new = [*old[:700], (0.5, 1.0), *old[701:]]
    lines = compared(old, new).table()
    shown = [int(line.split()[0]) for line in lines[2:-1]]
    assert len(shown) <= 41
    assert shown[:3] == [1, 2, 3]
    assert shown[-3:] == [998, 999, 1000]
    assert 701 in shown
    assert lines[-1] == f"{len(shown)} of 1000 steps are shown."


def test_the_verdict_names_the_tolerance_and_where_it_is_from():
    lines = compared([(1.0, 1.0)], [(1.0, 0.5)]).verdict("the default for fp32")
    assert "gradient norm 5.0e-01 at step 1" in lines[0]
    assert lines[-1] == "Beyond the tolerance of 1e-05 (the default for fp32)."


def test_json_has_no_value_that_json_lacks():
    found = compared([(1.0, NAN)], [(1.0, 2.0)]).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["within"] is False
    (step,) = found["steps"]
    expected = {"old": "nan", "new": 2.0, "relative_difference": "inf"}
    assert step == {
        "step": 1,
        "loss": {"old": 1.0, "new": 1.0, "relative_difference": 0.0},
        "gradient_norm": expected,
        "seconds": {"old": "nan", "new": "nan"},
    }


def test_csv_keeps_every_digit(tmp_path):
    third = 1 / 3
    compared([(third, 2.0)], [(third, NAN)]).write_csv(tmp_path / "parity.csv")
    (row,) = csv.DictReader((tmp_path / "parity.csv").read_text().splitlines())
    assert row["step"] == "1"
    assert float(row["loss_old"]) == third
    assert math.isnan(float(row["gradient_norm_new"]))
    assert float(row["gradient_norm_relative_difference"]) == INF


@pytest.mark.table
@pytest.mark.parametrize("tolerance", [1e-5, 0.0])
@pytest.mark.parametrize("new", [[(1.0, 1.0), (1.0, INF)], [(1.0, 2.0), (NAN, 1.0)]])
def test_the_picture_is_a_png_also_of_values_that_are_not_finite(tmp_path, new, tolerance):
    pytest.importorskip("matplotlib", reason="needs the extra foundry")
    file = tmp_path / "parity.png"
    found = compared([(1.0, 2.0), (NAN, 1.0)], new, tolerance)
    write_figure(comparison_picture(found, ("old: DDP", "new: FSDP2")), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture_and_parity_says_so(tmp_path, monkeypatch, capsys):
    from composer_fsdp2.cli.parity import _write

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "picture" not in _write(compared([(1, 1)], [(1, 1)]), tmp_path, jobs_of())
    assert not (tmp_path / "parity.png").exists()
    assert "No picture: matplotlib is not installed" in capsys.readouterr().err


# --- Is it one job? ---


def config(text: str) -> Any:
    return OmegaConf.create(text)


def test_only_sharding_and_what_has_no_influence_may_differ():
    old = config("""
        fsdp_config: {sharding_strategy: FULL_SHARD}
        run_name: a
        save_folder: a
        loggers: {wandb: {}}
        model: {init_device: cpu, d_model: 8}
    """)
    new = config("""
        parallelism_config: {fsdp2: {}}
        callbacks: {fsdp2_monitor: {gpu_flops_available: 1e15}}
        run_name: b
        eval_interval: 3ba
        model: {init_device: meta, d_model: 8}
    """)
    assert differences(old, new) == {}
    check_same(old, new)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seed: 1", "seed: 2", {"seed": ("1", "2")}),
        ("seed: 1", "seed: 1.0", {}),
        ("seed: 1", "{}", {"seed": ("1", "not set")}),
        ("{}", "seed: 1", {"seed": ("not set", "1")}),
        ("a: {b: [1, 2]}", "a: {b: [1, 3]}", {"a.b.1": ("2", "3")}),
        ("a: {b: 1}", "a: {}", {"a.b": ("1", "not set"), "a": ("not set", "{}")}),
        ("a: null", "a: {}", {"a": ("None", "{}")}),
        ("{x: 1, a: '${x}'}", "{x: 1, a: 1}", {}),
        ("{x: 1, a: '${x}'}", "{x: 2, a: '${x}'}", {"x": ("1", "2"), "a": ("1", "2")}),
        ("a: '${mine:1}'", "a: '${mine:1}'", {}),
        ("a: '${mine:1}'", "a: '${mine:2}'", {"a": ("'${mine:1}'", "'${mine:2}'")}),
        ("tokenizer: {name: a}", "tokenizer: {name: b}", {"tokenizer.name": ("'a'", "'b'")}),
    ],
)
def test_differences(old, new, expected):
    assert differences(config(old), config(new)) == expected


def test_different_jobs_are_refused_with_twenty_settings_and_a_count():
    old, new = ({f"key{i}": value for i in range(23)} for value in (1, 2))
    with pytest.raises(ConfigError) as caught:
        check_same(OmegaConf.create(old), OmegaConf.create(new))
    message = str(caught.value)
    assert "\n  key19: 1 -> 2\n  and 3 more\n" in message
    assert "key20" not in message
    assert "--allow-different" in message


def test_overrides_of_a_sharding_block_go_where_the_block_is():
    items = ["seed=3", "fsdp_config.verbose=true", "parallelism_config.fsdp2.verbose=true"]
    assert overrides_for(config("fsdp_config: {}"), items) == items[:2]
    fsdp1 = config("parallelism_config: {fsdp: {}}")
    assert overrides_for(fsdp1, items) == items[:1]
    assert overrides_for(config("parallelism_config: {fsdp2: {}}"), items) == [items[0], items[2]]


# --- What is changed in both. ---


FSDP1 = "fsdp_config: {sharding_strategy: FULL_SHARD}"
FSDP2 = "parallelism_config: {fsdp2: {}}"


def jobs_of(old: str = "", new: str = "", shared: str = "precision: fp32") -> tuple[Job, Job]:
    return (
        Job("old", config(f"{FSDP1}\n{shared}\n{old}"), "FSDP1"),
        Job("new", config(f"{FSDP2}\n{shared}\n{new}"), "FSDP2", "parallelism_config.fsdp2"),
    )


def test_without_cuda_the_old_run_is_ddp_and_that_is_said():
    old, new = jobs_of()
    notes = plan_jobs(old, new, cuda=False, ranks=2)
    assert notes == ["No CUDA: the old configuration runs as DDP, whose numbers FSDP1's are."]
    assert (old.kind, new.kind) == ("DDP", "FSDP2")
    assert "fsdp_config" not in old.config
    assert new.value("parallelism_config.fsdp2") == {}


def test_with_cuda_both_stay_as_they_are():
    old, new = jobs_of(shared="precision: amp_bf16\nmodel: {init_device: mixed}")
    before = [OmegaConf.to_container(job.config) for job in (old, new)]
    assert plan_jobs(old, new, cuda=True, ranks=2) == []
    assert [OmegaConf.to_container(job.config) for job in (old, new)] == before
    assert (old.kind, old.precision) == ("FSDP1", "amp_bf16")


@pytest.mark.parametrize("precision", ["amp_bf16", None])
def test_without_cuda_both_compute_in_fp32(precision):
    old, new = jobs_of(shared=f"precision: {precision}" if precision else "seed: 1")
    notes = plan_jobs(old, new, cuda=False, ranks=2)
    assert "No CUDA: both runs compute in fp32, as amp_bf16 needs a GPU." in notes
    assert {job.value("precision") for job in (old, new)} == {"fp32"}


def test_without_cuda_fsdp2_keeps_no_precision_of_its_own():
    old, new = jobs_of()
    new.set("parallelism_config.fsdp2.mixed_precision", {"param_dtype": "bf16"})
    notes = plan_jobs(old, new, cuda=False, ranks=2)
    assert new.value("parallelism_config.fsdp2.mixed_precision") == "FULL"
    assert any("mixed_precision is FULL here" in note for note in notes)


@pytest.mark.parametrize(
    ("old_start", "new_start", "cuda", "expected", "said"),
    [
        ("cpu", "cpu", False, ("cpu", "cpu"), None),
        ("mixed", "mixed", False, ("cpu", "mixed"), None),
        ("mixed", "mixed", True, ("mixed", "mixed"), None),
        ("meta", "meta", True, ("mixed", "mixed"), "meta in OLD and NEW"),
        ("meta", "meta", False, ("cpu", "mixed"), "meta in OLD and NEW"),
        ("cpu", "meta", True, ("cpu", "mixed"), "meta in NEW"),
    ],
)
def test_both_start_from_rank_0s_weights(old_start, new_start, cuda, expected, said):
    starts = (f"model: {{init_device: {start}}}" for start in (old_start, new_start))
    old, new = jobs_of(*starts)
    notes = " ".join(plan_jobs(old, new, cuda=cuda, ranks=2))
    assert (old.value("model.init_device"), new.value("model.init_device")) == expected
    assert (said in notes) if said else "init_device" not in notes


def test_weights_that_only_the_new_run_reads_are_said():
    def notes(model: str) -> str:
        old, new = jobs_of(shared=f"precision: fp32\nmodel: {model}")
        new.set("parallelism_config.fsdp2.pretrained_weights", "folder")
        return " ".join(plan_jobs(old, new, cuda=True, ranks=2))

    assert "the runs will differ" in notes("{pretrained: false}")
    assert "the runs will differ" not in notes("{pretrained: true}")


def test_different_precisions_are_said():
    old, new = jobs_of()
    new.precision = "amp_bf16"
    assert "fp32 in OLD and amp_bf16 in NEW" in plan_jobs(old, new, cuda=True, ranks=2)[0]


def test_a_new_configuration_without_fsdp2_is_refused():
    old, _ = jobs_of()
    with pytest.raises(ConfigError, match="composer-fsdp2 migrate OLD -o NEW"):
        plan_jobs(old, old, cuda=False, ranks=2)


def test_one_rank_is_refused():
    with pytest.raises(ConfigError, match=r"one rank.*-n 2"):
        plan_jobs(*jobs_of(), cuda=True, ranks=1)


def test_a_run_is_shortened_to_what_changes_its_numbers():
    job, _ = jobs_of("""
callbacks:
  fsdp2_monitor: {}
  hf_checkpointer: {save_folder: a}
  layer_freezing: {layer_names: [a]}
algorithms: {gradient_clipping: {clipping_threshold: 1.0}}
save_folder: a
loggers: {wandb: {}}
max_duration: 300ba
a: ${max_duration}
""")
    written = OmegaConf.to_container(job.config)
    job.shorten("recorder", {"steps": 3})
    assert list(job.value("callbacks")) == ["layer_freezing"]
    assert list(job.value("algorithms")) == ["gradient_clipping", "recorder"]  # last runs first
    assert all(job.value(key) in (value, None) for key, value in SHORT.items())
    after = OmegaConf.to_container(job.config)
    assert (after["max_duration"], after["a"]) == (written["max_duration"], "${max_duration}")


def test_a_run_without_callbacks_and_algorithms_is_shortened_too():
    job = Job("old", config("{callbacks: null, algorithms: null}"), "DDP")
    job.shorten("recorder", {"steps": 3})
    assert OmegaConf.to_container(job.config["algorithms"]) == {"recorder": {"steps": 3}}


def test_the_callbacks_left_out_and_the_settings_are_llm_foundrys():
    registry = pytest.importorskip("llmfoundry", reason="needs the extra foundry").registry
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS

    known = set(registry.callbacks.get_all()) | set(registry.callbacks_with_config.get_all())
    assert set(WRITERS) <= known
    assert SHORT.keys() <= TRAIN_CONFIG_KEYS


# --- The command, up to the first process. ---


@pytest.fixture
def parity(monkeypatch, tmp_path):
    """Runs `composer-fsdp2 parity` on two texts; starting ranks would be a failure."""
    pytest.importorskip("llmfoundry", reason="needs the extra foundry")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def started(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"ranks started: {args}")

    monkeypatch.setattr(launch, "launch_ranks", started)

    def run(old: str, new: str, *args: str):
        for name, text in (("old", old), ("new", new)):
            (tmp_path / f"{name}.yaml").write_text(text)
        paths = [str(tmp_path / f"{name}.yaml") for name in ("old", "new")]
        return CliRunner().invoke(main.app, ["parity", *paths, "-n", "2", *args])

    return run


def refused(result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    message = " ".join(result.stderr.split())
    for part in ("ConfigError", *parts):
        assert part in message


DEGREE = "parallelism_config.fsdp2.data_parallel_shard_degree"
OLD_TEXT = f"{FSDP1}\nseed: 1\noptimizer: {{lr: 1}}\n"
NEW_TEXT = migrate("fsdp_config:\n  sharding_strategy: FULL_SHARD\nseed: 1\noptimizer: {lr: 1}\n")


@pytest.mark.table(
    (
        "fsdp_config: {sharding_strategy: FULL_SHARD}\\nseed: 1\\noptimizer: {lr: 1}\\n-new2"
        "-args2-parts2"
    ),
    (
        "fsdp_config: {sharding_strategy: FULL_SHARD}\\nseed: 1\\noptimizer: {lr: 1}\\n-new6"
        "-args6-parts6"
    ),
    (
        "fsdp_config: {sharding_strategy: FULL_SHARD}\\nseed: 1\\noptimizer: {lr: 1}\\n-new7"
        "-args7-parts7"
    ),
    (
        "fsdp_config: {sharding_strategy: FULL_SHARD}\\nseed: 1\\noptimizer: {lr: 1}\\n-new9"
        "-args9-parts9"
    ),
)
@pytest.mark.parametrize(
    ("old", "new", "args", "parts"),
    [
        (OLD_TEXT, NEW_TEXT.text.replace("lr: 1", "lr: 2"), (), ("optimizer.lr: 1 -> 2",)),
        (OLD_TEXT, NEW_TEXT.text, ("seed",), ("'seed' is not an override",)),
        (OLD_TEXT, NEW_TEXT.text, ("tp_config.a=1",), ("neither OLD nor NEW has",)),
        (OLD_TEXT, NEW_TEXT.text, ("-n", "1"), ("one rank",)),
        (OLD_TEXT, NEW_TEXT.text, ("-n", "1000000"), ("-n is 1000000", "or less")),
        (OLD_TEXT, OLD_TEXT, (), ("NEW does not ask for FSDP2",)),
        (OLD_TEXT, NEW_TEXT.text, (f"{DEGREE}=3",), ("to the world size 2",)),
        (OLD_TEXT, NEW_TEXT.text.replace("auto", "sometimes"), (), ("reshard_after_forward",)),
        (OLD_TEXT, "", (), ("holds no settings",)),
        (OLD_TEXT, NEW_TEXT.text, ("--out", __file__), ("--out", "is no folder")),
        (OLD_TEXT, NEW_TEXT.text, ("precision=fp64",), ("no default tolerance",)),
    ],
)
def test_refused_before_a_process_starts(parity, monkeypatch, old, new, args, parts):
    if "precision=fp64" in args:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    refused(parity(old, new, *args), *parts)


def test_under_a_launcher_it_is_refused(parity, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(parity(OLD_TEXT, NEW_TEXT.text), "without the launcher")


@pytest.mark.parametrize(
    "option", [("--steps", "0"), ("--tolerance", "-1"), ("-n", "0"), ("-n", "-2")]
)
def test_impossible_numbers_are_mistakes(parity, option):
    assert parity(OLD_TEXT, NEW_TEXT.text, *option).exit_code == 2


def test_the_repositorys_quickstart_is_one_job_with_itself():
    quickstart = OmegaConf.load(ROOT / "yamls" / "quickstart.yaml")
    assert differences(quickstart, quickstart) == {}
